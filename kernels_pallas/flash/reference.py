"""Attention over any set of keys as the formula reads, which the references of the operations share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.flash.rules import NOTHING


def segment_starts(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Where the run of equal ids begins that a position lies in.

    >>> segment_starts(jnp.array([[5, 5, 3, 3, 3]])).tolist()
    [[0, 0, 2, 2, 2]]
    """
    places = jnp.arange(segment_ids.shape[1])
    begins = jnp.concatenate([jnp.ones_like(segment_ids[:, :1]), jnp.diff(segment_ids, axis=1)], axis=1) != 0
    return jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def masked_attention(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    visible: Bool[Array, "batch rows seq"],
    scale: float,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """softmax(scale q kᵀ) v over the visible keys, and the log-sum-exp; 0 and `NOTHING` for rows that see none."""
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    q = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    highest = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("btgrd,bsgd->bgrts", q, k, precision=highest)
    visible = visible[:, None, None]
    # The maximum only over what is visible, and finite for rows that see nothing.
    largest = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - largest, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out = jnp.einsum("bgrts,bsgd->btgrd", weights / safe, v, precision=highest)
    lse = jnp.where(some, largest + jnp.log(safe), NOTHING)[..., 0]
    return out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, heads, rows)
