"""Sliding-window attention as the formula reads: every score at once, highest precision."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.flash.reference import masked_attention, segment_starts


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    starts: Int[Array, " batch"] | None,
    *,
    scale: float,
    window: int,
    sinks: int,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """Output and log-sum-exp of the scores; see `api.sliding_window_attention`.

    Row i stands at position starts + i (0 + i without `starts`).
    """
    batch, rows = query.shape[:2]
    first = jnp.zeros(batch, jnp.int32) if starts is None else starts
    positions = first[:, None] + jnp.arange(rows)
    t, s = positions[:, :, None], jnp.arange(key.shape[1])[None, None, :]
    visible = (s <= t) & (s > t - window)
    if segment_ids is None:
        visible |= (s < sinks) & (s <= t)
    else:
        begins = jnp.take_along_axis(segment_starts(segment_ids), positions, axis=1)[:, :, None]
        visible |= (s >= begins) & (s < begins + sinks) & (s <= t)
        of_rows = jnp.take_along_axis(segment_ids, positions, axis=1)[:, :, None]
        visible &= (segment_ids[:, None, :] == of_rows) & (of_rows != 0)
    return masked_attention(query, key, value, visible, scale)
