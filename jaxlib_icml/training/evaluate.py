"""Held-out loss of a language model."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

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


@partial(jax.jit, static_argnums=0)
def _evaluate(
    graphdef: nnx.GraphDef, state: nnx.State, batch: dict[str, Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    _, aux = loss_fn(graphdef, state, batch)
    return aux.nll_sum, aux.weight_sum
