"""Sliding-window attention: the public function."""

from types import ModuleType

import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.flash import rules
from kernels_pallas.flash.arguments import check_integers, check_qkv, check_window, checked_scale, concrete


def sliding_window_attention(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    *,
    window: int,
    sinks: int = 0,
    q_positions: Int[Array, "batch rows"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    scale: float | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal softmax attention to the last `window` positions, and to the first `sinks`.

    A row at position t of head h attends to the positions t - window < s <= t and s < sinks of key head
    h // (heads // kv_heads). Time and memory are linear in `rows`, forward and backward. Scores and sums are float32
    whatever the input dtype. Reverse mode has a rule of its own, so forward-mode differentiation (`jax.jvp`) needs
    "reference", while gradients of gradients work for all.

    Args:
      query: Shape (batch, rows, heads, dim); float32, bfloat16 or float16.
      key: Shape (batch, seq, kv_heads, dim), dtype of `query`; heads must be a multiple of kv_heads.
      value: Shape and dtype of `key`.
      window: Positions that a row sees, its own included; at least 1.
      sinks: Positions at the beginning that every later row sees too.
      q_positions: Integers of shape (batch, rows), the position of every row among the keys, where the rows are a later
        chunk of the sequence: consecutive, the last one below `seq`. None: row i stands at i, and rows = seq.
      segment_ids: Integers of shape (batch, seq), packed sequences: attention only between equal ids. 0 is padding: it
        attends to nothing, and its output is 0. Sinks are the beginning of the run of equal ids.
      scale: Factor on the scores; None is 1 / sqrt(dim).
      implementation: A name, a sequence of names to try in order, or None: the kernel of the platform that the program
        is compiled for, "xla" where there is none.

    Returns:
      Shape (batch, rows, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes, dtypes or numbers that do not fit, an unknown name; positions that are not consecutive or
        outside of the sequence, where their values are known at trace time.
      UnsupportedError: The implementation asked for cannot run this call on this platform.

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 6, 4, 8)); kv = jnp.arange(6.0)[None, :, None, None] * jnp.ones((1, 6, 2, 8))
    >>> sliding_window_attention(q, 0 * kv, kv, window=2)[0, :, 0, 0].tolist()
    [0.0, 0.5, 1.5, 2.5, 3.5, 4.5]
    """
    check_qkv(query, key, value, same_length=q_positions is None)
    check_window(window, sinks)
    check_positions(q_positions, query, key)
    if segment_ids is not None:
        check_integers("segment_ids", segment_ids, key.shape[:2])
    scale = checked_scale(scale, query.shape[-1])
    # A window longer than the sequence is all of it.
    statics = {"window": min(int(window), key.shape[1]), "sinks": min(int(sinks), key.shape[1]), "scale": scale}

    def unsupported(kernels: ModuleType) -> str | None:
        segmented, chunk = segment_ids is not None, q_positions is not None
        return kernels.unsupported(query, key, **statics, segmented=segmented, chunk=chunk)

    attend = rules.choose("sliding_window_attention", implementation, unsupported, ("b.", "b"), **statics)
    return attend(query, key, value, segment_ids, None if q_positions is None else q_positions[:, 0])


def check_positions(q_positions: Array | None, query: Array, key: Array) -> None:
    """Raises a ValueError unless `q_positions` are consecutive positions of the keys, as far as can be known."""
    if q_positions is None:
        return
    rows, seq = query.shape[1], key.shape[1]
    if rows > seq:
        raise ValueError(f"query must have at most key's {seq} rows, got {rows}")
    check_integers("q_positions", q_positions, query.shape[:2])
    values = concrete(q_positions)
    if values is None:
        return
    if (np.diff(values, axis=1) != 1).any():
        raise ValueError("q_positions must be consecutive in every row of the batch")
    if values.min() < 0 or values.max() >= seq:
        raise ValueError(f"q_positions must be between 0 and {seq - 1}, got {values.min()} to {values.max()}")
