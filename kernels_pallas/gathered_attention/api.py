"""Causal attention of some rows of a sequence: the public function."""

from types import ModuleType

import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.flash import rules
from kernels_pallas.flash.arguments import check_integers, check_qkv, checked_scale, concrete


def gathered_attention(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    scale: float | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal softmax attention of rows that stand anywhere in the sequence, in ascending order.

    Row i of head h attends to all positions s <= positions[i] of key head h // (heads // kv_heads). Keys that no row of
    a block may see are never visited, so time is proportional to the sum of the positions. Scores and sums are float32
    whatever the input dtype. Reverse mode has a rule of its own, so forward-mode differentiation (`jax.jvp`) needs
    "reference", while gradients of gradients work for all.

    Args:
      query: Shape (batch, rows, heads, dim); float32, bfloat16 or float16.
      key: Shape (batch, seq, kv_heads, dim), dtype of `query`; heads must be a multiple of kv_heads.
      value: Shape and dtype of `key`.
      positions: Integers of shape (batch, rows), not descending; rows at `seq` or beyond attend to nothing and give 0.
      segment_ids: Integers of shape (batch, seq), packed sequences: attention only between equal ids, where a row has
        the id of its position. 0 is padding: it attends to nothing, and its output is 0.
      scale: Factor on the scores; None is 1 / sqrt(dim).
      implementation: A name, a sequence of names to try in order, or None: the kernel of the platform that the program
        is compiled for, "xla" where there is none.

    Returns:
      Shape (batch, rows, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes, dtypes or numbers that do not fit, an unknown name; positions that are negative or descend,
        where their values are known at trace time.
      UnsupportedError: The implementation asked for cannot run this call on this platform.

    The routed branch of "Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484).

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 2, 4, 8)); kv = jnp.arange(6.0)[None, :, None, None] * jnp.ones((1, 6, 2, 8))
    >>> gathered_attention(q, 0 * kv, kv, jnp.array([[2, 5]]))[0, :, 0, 0].tolist()
    [1.0, 2.5]
    """
    check_qkv(query, key, value, same_length=False)
    check_integers("positions", positions, query.shape[:2])
    values = concrete(positions)
    if values is not None and values.size and (values.min() < 0 or (np.diff(values, axis=1) < 0).any()):
        raise ValueError("positions must be at least 0 and not descend")
    if segment_ids is not None:
        check_integers("segment_ids", segment_ids, key.shape[:2])
    scale = checked_scale(scale, query.shape[-1])

    def unsupported(kernels: ModuleType) -> str | None:
        return kernels.unsupported(query, key, segmented=segment_ids is not None)

    attend = rules.choose("gathered_attention", implementation, unsupported, ("b.", "b."), scale=scale)
    return attend(query, key, value, positions, segment_ids)
