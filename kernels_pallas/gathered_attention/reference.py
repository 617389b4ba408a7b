"""Causal attention of some rows as the formula reads: every score at once, highest precision."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.flash.reference import masked_attention


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """Output and log-sum-exp of the scores; see `api.gathered_attention`."""
    seq = key.shape[1]
    visible = (jnp.arange(seq) <= positions[:, :, None]) & (positions[:, :, None] < seq)
    if segment_ids is not None:
        inside = jnp.minimum(positions, seq - 1)
        of_rows = jnp.take_along_axis(segment_ids, inside, axis=1)[:, :, None]
        visible &= (segment_ids[:, None, :] == of_rows) & (of_rows != 0)
    return masked_attention(query, key, value, visible, scale)
