"""Held-out loss of a language model."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlib_icml.lm import loss_fn
from jaxlib_icml.training.data import evaluation_batches


def total_nats(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    token_docs: Sequence[np.ndarray],
    *,
    eos_id: int,
    batch_size: int = 16,
    overlap: int | None = None,
    start_id: int | None = None,
    seq_len: int | None = None,
) -> tuple[float, int]:
    """Negative log-likelihood of documents, each token (and each closing eos) predicted once.

    Args:
      graphdef: the static part of a `Transformer`, from `nnx.split(model)`.
      state: its variables.
      token_docs: one 1-D integer array per document.
      eos_id: the document boundary.
      batch_size: rows per forward pass.
      overlap: tokens of context that every row repeats from the row before; None: a quarter of `seq_len`.
      start_id: the input in front of a document's first token; None: `eos_id`.
      seq_len: tokens per row; None: the context length.

    Returns:
      `(nats, targets)`: the sum and how many targets it has.

    Raises:
      ValueError: no tokens, or an argument out of range.
    """
    context = nnx.merge(graphdef, state).config.context_length
    seq_len = context if seq_len is None else seq_len
    if not 1 <= seq_len <= context:
        raise ValueError(f"seq_len: must be between 1 and {context}, got {seq_len}")
    batches = evaluation_batches(
        token_docs,
        eos_id=eos_id,
        seq_len=seq_len,
        batch_size=batch_size,
        overlap=seq_len // 4 if overlap is None else overlap,
        start_id=start_id,
    )
    nats, targets = 0.0, 0.0
    for batch in batches:
        batch.pop("positions")
        nll, weight = _evaluate(graphdef, state, batch)
        nats, targets = nats + float(nll), targets + float(weight)
    return nats, round(targets)


def routing_usage(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    token_docs: Sequence[np.ndarray],
    *,
    eos_id: int,
    start_id: int | None = None,
    batch_size: int = 16,
) -> np.ndarray:
    """How much each L2A layer uses its global attention on a calibration text.

    Args:
      graphdef: the static part of a `Transformer` with L2A, from `nnx.split(model)`.
      state: its variables.
      token_docs: one 1-D integer array per document.
      eos_id: the document boundary.
      start_id: the input in front of a document's first token; None: `eos_id`.
      batch_size: rows per forward pass.

    Returns:
      (layers,) float64, the mean of the routing mask over the tokens; 0 for pruned layers.

    Raises:
      ValueError: a model without L2A, or no tokens.
    """
    config = nnx.merge(graphdef, state).config
    if config.attention != "l2a":
        raise ValueError(f"graphdef: the model has no routers (attention = {config.attention})")
    batches = evaluation_batches(
        token_docs, eos_id=eos_id, seq_len=config.context_length, batch_size=batch_size, overlap=0, start_id=start_id
    )
    routed, tokens = np.zeros(config.num_layers), 0
    for batch in batches:
        count = int((batch["segment_ids"] != 0).sum())
        rate = _routing_rate(graphdef, state, batch["tokens"], batch["segment_ids"])
        routed, tokens = routed + count * np.asarray(rate, np.float64), tokens + count
    return routed / max(tokens, 1)


@partial(jax.jit, static_argnums=0)
def _routing_rate(
    graphdef: nnx.GraphDef, state: nnx.State, tokens: Int[Array, "batch seq"], segment_ids: Int[Array, "batch seq"]
) -> Float[Array, " layers"]:
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids).l2a.rate


@partial(jax.jit, static_argnums=0)
def _evaluate(
    graphdef: nnx.GraphDef, state: nnx.State, batch: dict[str, Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    _, aux = loss_fn(graphdef, state, batch)
    return aux.nll_sum, aux.weight_sum
