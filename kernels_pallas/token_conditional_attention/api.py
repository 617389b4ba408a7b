"""Token-conditional attention: every row sees a window, chosen rows see everything before them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.flash.arguments import check_integers, concrete
from kernels_pallas.gathered_attention.api import gathered_attention
from kernels_pallas.sliding_window_attention.api import sliding_window_attention


def token_conditional_attention(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    idx: Int[Array, "batch chosen"],
    *,
    window: int,
    sinks: int = 0,
    q_positions: Int[Array, "batch rows"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    scale: float | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal attention to all positions for the rows `idx`, to a sliding window for the others.

    `sliding_window_attention` of all rows, in which the results of `gathered_attention` of the chosen ones are put.
    Time is that of the window plus, for every chosen row, its position; memory is linear in `seq`.

    Args:
      query: Shape (batch, rows, heads, dim); float32, bfloat16 or float16.
      key: Shape (batch, seq, kv_heads, dim), dtype of `query`; heads must be a multiple of kv_heads.
      value: Shape and dtype of `key`.
      idx: Integers of shape (batch, chosen): rows of `query`, strictly ascending, then filled up with `rows`.
      window: Positions that every row sees, its own included; at least 1.
      sinks: Positions at the beginning that every later row sees too.
      q_positions: As for `sliding_window_attention`.
      segment_ids: As for `sliding_window_attention`.
      scale: Factor on the scores; None is 1 / sqrt(dim).
      implementation: As for `sliding_window_attention`, for both parts.

    Returns:
      Shape (batch, rows, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes, dtypes or numbers that do not fit, an unknown name; rows that repeat or descend, where their
        values are known at trace time.
      UnsupportedError: The implementation asked for cannot run this call on this platform.

    The attention of "Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484).

    >>> q = jnp.ones((1, 4, 2, 8)); kv = jnp.arange(4.0)[None, :, None, None] * jnp.ones((1, 4, 2, 8))
    >>> token_conditional_attention(q, 0 * kv, kv, jnp.array([[2, 4]]), window=1)[0, :, 0, 0].tolist()
    [0.0, 1.0, 1.0, 3.0]
    """
    local = sliding_window_attention(
        query,
        key,
        value,
        window=window,
        sinks=sinks,
        q_positions=q_positions,
        segment_ids=segment_ids,
        scale=scale,
        implementation=implementation,
    )
    check_rows(idx, query)
    if idx.shape[1] == 0:
        return local
    chosen, positions = gathered_rows(query, idx, q_positions, key.shape[1])
    wide = gathered_attention(
        chosen, key, value, positions, segment_ids=segment_ids, scale=scale, implementation=implementation
    )
    return merge_rows(local, wide, idx)


def gathered_rows(
    query: Float[Array, "batch rows heads dim"],
    idx: Int[Array, "batch chosen"],
    q_positions: Int[Array, "batch rows"] | None,
    seq: int,
) -> tuple[Float[Array, "batch chosen heads dim"], Int[Array, "batch chosen"]]:
    """The rows `idx` of `query` and their positions among `seq` keys; those of the filling are zeros at `seq`."""
    take = functools.partial(jnp.take_along_axis, axis=1, mode="fill")
    chosen = take(query, idx[:, :, None, None], fill_value=0)
    if q_positions is None:
        return chosen, jnp.where(idx < query.shape[1], idx, seq)
    return chosen, take(q_positions, idx, fill_value=seq)


def merge_rows(
    local: Float[Array, "batch rows heads dim"],
    wide: Float[Array, "batch chosen heads dim"],
    idx: Int[Array, "batch chosen"],
) -> Float[Array, "batch rows heads dim"]:
    """`local` with the rows `idx` replaced by `wide`."""

    def put(local: Array, wide: Array, idx: Array) -> Array:
        return local.at[idx].set(wide, mode="drop", indices_are_sorted=True)

    return jax.vmap(put)(local, wide, idx)


def check_rows(idx: Array, query: Array) -> None:
    """Raises a ValueError unless `idx` are rows of `query` in ascending order, as far as can be known."""
    if idx.ndim != 2:
        raise ValueError(f"idx must have shape (batch, chosen), got {idx.shape}")
    check_integers("idx", idx, (query.shape[0], idx.shape[1]))
    values = concrete(idx)
    if values is None or not values.size:
        return
    rows = query.shape[1]
    ascending = (np.diff(values, axis=1) > 0) | (values[:, 1:] >= rows)
    if values.min() < 0 or not ascending.all():
        raise ValueError(f"idx must be at least 0 and strictly ascending, filled up with {rows}")
