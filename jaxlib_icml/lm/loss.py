"""Training loss: chunked cross-entropy plus the router's balancing terms."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlib_icml.attention.l2a import L2AAux
from jaxlib_icml.attention.l2a_control import sparsity_loss
from jaxlib_icml.lm.attention import Exploration
from jaxlib_icml.moe import RoutingStats

Batch = dict[str, Array]


class LossAux(NamedTuple):
    """What a training step wants to know besides the loss."""

    nll_sum: Float[Array, ""]
    """Weighted sum of negative log-likelihoods, in nats."""
    weight_sum: Float[Array, ""]
    """Sum of the target weights."""
    routing: RoutingStats | None
    """Routing statistics with a leading layer axis, or None for a dense model."""
    l2a: L2AAux | None
    """What L2A's routers did, with a leading layer axis, or None without L2A."""


def cross_entropy_sum(
    hidden: Float[Array, "tokens width"],
    kernel: Float[Array, "width vocab"],
    targets: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
    chunk: int = 1024,
) -> Float[Array, ""]:
    """Σ_t w_t (logsumexp(h_t W) - (h_t W)_{y_t}), with the logits of `chunk` tokens in memory at a time.

    The gradients are formed in the forward pass while a chunk's logits exist, so nothing is computed twice.

    Args:
      hidden: (tokens, width) final hidden states.
      kernel: (width, vocab), in `hidden`'s dtype.
      targets: (tokens,) int32 ids in [0, vocab).
      weights: (tokens,) float32; 0 drops a token. No gradient flows to them.
      chunk: tokens per chunk.

    Returns:
      The weighted sum in nats, float32.

    Raises:
      ValueError: `chunk` below 1, or dtypes of `hidden` and `kernel` that differ.

    >>> h, w = jnp.zeros((3, 2)), jnp.zeros((2, 4))
    >>> float(cross_entropy_sum(h, w, jnp.array([0, 1, 2]), jnp.ones(3)) / 3 - jnp.log(4.0))
    0.0
    """
    if chunk < 1:
        raise ValueError(f"chunk: must be at least 1, got {chunk}")
    if hidden.dtype != kernel.dtype:
        raise ValueError(f"kernel: dtype {kernel.dtype} differs from hidden's {hidden.dtype}")
    return _cross_entropy_sum(hidden, kernel, targets, lax.stop_gradient(weights), chunk)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy_sum(hidden: Array, kernel: Array, targets: Array, weights: Array, chunk: int) -> Array:
    def add(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + _chunk_loss(part[0], kernel, part[1], part[2])[0], None

    return lax.scan(add, jnp.zeros((), jnp.float32), _chunks(hidden, targets, weights, chunk))[0]


def _chunks(hidden: Array, targets: Array, weights: Array, chunk: int) -> tuple[Array, Array, Array]:
    tokens = targets.shape[0]
    count = max(1, -(-tokens // chunk))
    size = -(-tokens // count) if tokens else 1
    pad = count * size - tokens

    def split(x: Array) -> Array:
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(count, size, *x.shape[1:])

    return split(hidden), split(targets), split(weights)


def _chunk_loss(h: Array, kernel: Array, y: Array, w: Array) -> tuple[Array, Array]:
    logits = lax.dot_general(h, kernel, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    is_target = jnp.arange(logits.shape[-1], dtype=y.dtype) == y[:, None]
    logits_bar = w[:, None] * (jnp.exp(logits - log_z[:, None]) - is_target)
    return jnp.sum(w * (log_z - picked)), logits_bar


def _cross_entropy_fwd(
    hidden: Array, kernel: Array, targets: Array, weights: Array, chunk: int
) -> tuple[Array, tuple[Array, ...]]:
    def add(carry: tuple[Array, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        total, kernel_bar = carry
        loss, logits_bar = _chunk_loss(part[0], kernel, part[1], part[2])
        logits_bar = logits_bar.astype(hidden.dtype)
        hidden_bar = lax.dot_general(
            logits_bar, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(hidden.dtype)
        kernel_bar += lax.dot_general(part[0], logits_bar, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (total + loss, kernel_bar), hidden_bar

    start = (jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32))
    (total, kernel_bar), hidden_bar = lax.scan(add, start, _chunks(hidden, targets, weights, chunk))
    hidden_bar = hidden_bar.reshape(-1, hidden.shape[1])[: targets.shape[0]]
    return total, (hidden_bar, kernel_bar.astype(kernel.dtype), targets, weights)


def _cross_entropy_bwd(
    chunk: int, residuals: tuple[Array, ...], total_bar: Array
) -> tuple[Array, Array, np.ndarray, Array]:
    del chunk
    hidden_bar, kernel_bar, targets, weights = residuals
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    scale = total_bar.astype(hidden_bar.dtype)
    return hidden_bar * scale, kernel_bar * scale, no_gradient, jnp.zeros_like(weights)


_cross_entropy_sum.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def loss_fn(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    batch: Batch,
    weight_sum: Float[Array, ""] | None = None,
    *,
    exploration: Exploration | None = None,
    routing_price: Float[Array, ""] | float = 0.0,
) -> tuple[Float[Array, ""], LossAux]:
    """Mean negative log-likelihood plus balancing terms, as a pure function of the model's state.

    Args:
      graphdef: the static part of a `Transformer`, from `nnx.split(model)`.
      state: its variables.
      batch: `tokens` and `targets` (batch, seq) int32; optional `segment_ids` (batch, seq) int32 and `weights`
        (batch, seq) float32.
      weight_sum: divides the summed loss; None: the batch's own sum of weights. Gradient accumulation passes the sum
        over all micro-batches.
      exploration: noise on L2A's decisions, in training.
      routing_price: λ, what L2A's mean routing probability above its target costs.

    Returns:
      `(loss, LossAux)`, the loss in nats per target plus, for `moe_balance="loss"`, the weighted auxiliary terms, and
      with L2A λ (ρ̂ - ρ).

    Raises:
      ValueError: `batch` lacks tokens or targets.

    >>> from jaxlib_icml.lm import LMConfig, Transformer
    >>> model = Transformer(LMConfig(num_layers=1, width=32, num_heads=2), rngs=nnx.Rngs(0))
    >>> graphdef, state = nnx.split(model)
    >>> tokens = jnp.zeros((1, 4), jnp.int32)
    >>> loss, aux = loss_fn(graphdef, state, {"tokens": tokens, "targets": tokens})
    """
    missing = {"tokens", "targets"} - batch.keys()
    if missing:
        raise ValueError(f"batch: lacks {', '.join(sorted(missing))}")
    model = nnx.merge(graphdef, state)
    config = model.config
    out = model(batch["tokens"], segment_ids=batch.get("segment_ids"), exploration=exploration)
    targets = batch["targets"].reshape(-1)
    weights = batch["weights"].reshape(-1) if "weights" in batch else jnp.ones(targets.shape, jnp.float32)
    hidden = out.hidden.reshape(-1, config.width)
    nll_sum = cross_entropy_sum(hidden, model.output_kernel(), targets, weights, config.loss_chunk)
    aux = LossAux(nll_sum, jnp.sum(weights), out.routing, out.l2a)
    loss = nll_sum / jnp.maximum(aux.weight_sum if weight_sum is None else weight_sum, 1.0)
    if out.routing is not None and config.moe_balance == "loss":
        loss += config.aux_loss_weight * jnp.mean(out.routing.aux_loss)
        loss += config.router_z_loss_weight * jnp.mean(out.routing.z_loss)
    if out.l2a is not None:
        loss += sparsity_loss(out.l2a.prob_mean, routing_price, config.l2a.target_rate)
    return loss, aux
