"""Causal attention as the formula reads: every score at once, highest precision."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    scale: float,
) -> Float[Array, "batch seq heads dim"]:
    """softmax(scale q kᵀ + mask) v with all seq × seq scores in memory; see `api.causal_attention`."""
    return attention_and_lse(query, key, value, segment_ids, scale)[0]


def attention_and_lse(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    scale: float,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch kv_heads rows"]]:
    """The output and the log-sum-exp of the scores; rows = seq * (heads // kv_heads), position-major."""
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    q = q.reshape(batch, seq, kv_heads, heads // kv_heads, dim)
    highest = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("btgrd,bsgd->bgtrs", q, k, precision=highest)
    visible = jnp.tril(jnp.ones((seq, seq), bool))[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
    out = jnp.einsum("bgtrs,bsgd->btgrd", jax.nn.softmax(scores), v, precision=highest)
    lse = jax.nn.logsumexp(scores, axis=-1).reshape(batch, kv_heads, -1)
    return out.reshape(query.shape).astype(query.dtype), lse
