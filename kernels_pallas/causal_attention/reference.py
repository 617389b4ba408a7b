"""Causal attention as the formula reads: every score at once, highest precision."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.flash.reference import masked_attention


def forward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch heads seq"]]:
    """softmax(scale q kᵀ + mask) v with all seq × seq scores in memory, and the log-sum-exp of the scores."""
    batch, seq = query.shape[:2]
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((seq, seq), bool)), (batch, seq, seq))
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return masked_attention(query, key, value, visible, scale)
