"""Sampling from a language model with a key/value cache."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxlib_icml.lm.cache import KVCache, init_cache


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; every field is a flag of `icml generate`.

    Raises:
      ValueError: a value outside its range.
    """

    temperature: float = 0.8
    """Divides the logits; 0: always the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens; None: all."""
    top_p: float | None = None
    """Only the smallest set of likeliest tokens with at least this probability; None: all."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")


class Generation(NamedTuple):
    """New tokens (batch, max_new_tokens), filled with the stop token after the end, and how many each row has."""

    tokens: Int[Array, "batch new"]
    lengths: Int[Array, " batch"]


def sample(key: PRNGKeyArray, logits: Float[Array, "batch vocab"], sampling: Sampling) -> Int[Array, " batch"]:
    """Draw one token per row.

    Args:
      key: a JAX random key.
      logits: (batch, vocab) float32.
      sampling: temperature, top-k (applied first) and top-p.

    Returns:
      (batch,) int32 ids.

    >>> sample(jax.random.key(0), jnp.array([[0.0, 3.0, 1.0]]), Sampling(temperature=0.0)).tolist()
    [1]
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays when the likelier ones do not reach top_p yet; the likeliest always stays.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        threshold = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def pad_prompts(prompts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths as one right-padded array.

    Args:
      prompts: one 1-D integer array per row, none empty.

    Returns:
      `(tokens, lengths)`: (batch, longest) int32 padded with 0, and (batch,) int32.

    Raises:
      ValueError: no prompts, or an empty one.

    >>> pad_prompts([np.array([5]), np.array([1, 2])])[0].tolist()
    [[5, 0], [1, 2]]
    """
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError("prompts: need at least one, each with at least one token")
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def generate(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompts: Int[Array | np.ndarray, "batch seq"],
    prompt_lengths: Int[Array | np.ndarray, " batch"],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: tuple[int, ...] = (),
) -> Generation:
    """Continue a batch of prompts.

    Args:
      graphdef: the static part of a `Transformer`, from `nnx.split(model)`.
      state: its variables.
      prompts: (batch, seq) int32, right-padded (see `pad_prompts`); padding is never attended to.
      prompt_lengths: (batch,) tokens of each prompt.
      key: a JAX random key; the same key gives the same text.
      max_new_tokens: tokens to add at most.
      sampling: how tokens are drawn; None: `Sampling()`.
      stop_tokens: a row ends with the first of these ids (it is part of the result).

    Returns:
      `Generation`; after a row's end its tokens repeat the first stop token.

    Raises:
      ValueError: prompt plus new tokens exceed the context length, or sizes are not positive.
    """
    config = nnx.merge(graphdef, state).config
    seq = prompts.shape[1]
    lengths = np.asarray(prompt_lengths)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
    if lengths.min() < 1 or lengths.max() > seq:
        raise ValueError(f"prompt_lengths: must be between 1 and {seq}, got {lengths.tolist()}")
    if seq + max_new_tokens > config.context_length:
        raise ValueError(
            f"prompts: {seq} tokens and {max_new_tokens} new ones exceed context_length {config.context_length}"
        )
    if any(not 0 <= token < config.vocab_size for token in stop_tokens):
        raise ValueError(f"stop_tokens: must be ids below {config.vocab_size}, got {stop_tokens}")
    return _generate(
        graphdef,
        state,
        jnp.asarray(prompts, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        key,
        max_new_tokens,
        sampling or Sampling(),
        tuple(stop_tokens),
    )


class _Loop(NamedTuple):
    step: Int[Array, ""]
    cache: KVCache
    last: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    tokens: Int[Array, "batch new"]
    lengths: Int[Array, " batch"]


@partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generate(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompts: Array,
    prompt_lengths: Array,
    key: PRNGKeyArray,
    max_new_tokens: int,
    sampling: Sampling,
    stop_tokens: tuple[int, ...],
) -> Generation:
    model = nnx.merge(graphdef, state)
    batch, seq = prompts.shape
    cache = init_cache(model.config, batch, seq + max_new_tokens)
    # The keys of the padding stay in the cache, out of sight: rows overwrite them as they grow.
    out = model(prompts, cache=cache, prefill=True, prompt_lengths=prompt_lengths)
    last_hidden = jnp.take_along_axis(out.hidden, (prompt_lengths - 1)[:, None, None], axis=1)[:, 0]
    stops = jnp.array(stop_tokens, jnp.int32)
    fill = stop_tokens[0] if stop_tokens else 0

    def emit(loop: _Loop, hidden: Array) -> _Loop:
        token = sample(jax.random.fold_in(key, loop.step), model.logits(hidden), sampling)
        token = jnp.where(loop.done, fill, token)
        return loop._replace(
            step=loop.step + 1,
            last=token,
            lengths=loop.lengths + ~loop.done,
            done=loop.done | jnp.isin(token, stops),
            tokens=loop.tokens.at[:, loop.step].set(token),
        )

    def body(loop: _Loop) -> _Loop:
        out = model(loop.last[:, None], cache=loop.cache)
        return emit(loop._replace(cache=out.cache), out.hidden[:, 0])

    first = _Loop(
        step=jnp.zeros((), jnp.int32),
        cache=out.cache,
        last=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        tokens=jnp.full((batch, max_new_tokens), fill, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
    )
    loop = jax.lax.while_loop(
        lambda loop: (loop.step < max_new_tokens) & ~jnp.all(loop.done), body, emit(first, last_hidden)
    )
    return Generation(loop.tokens, loop.lengths)
