"""Causal attention in blocks of queries that skip the keys after them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 128


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    scale: float,
) -> Float[Array, "batch seq heads dim"]:
    """See `api.causal_attention`."""
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    q = (scale * q).reshape(batch, seq, kv_heads, heads // kv_heads, dim)

    @jax.checkpoint
    def block(q, k, v, query_segments, key_segments):
        first = k.shape[1] - q.shape[1]
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k)
        positions = jnp.arange(k.shape[1])
        visible = (first + jnp.arange(q.shape[1]))[None, :, None] >= positions
        if query_segments is not None:
            visible = visible & (query_segments[:, :, None] == key_segments[:, None, :])
        probabilities = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bgrts,bsgd->btgrd", probabilities, v)

    blocks = []
    for start in range(0, seq, _BLOCK):
        end = min(start + _BLOCK, seq)
        segments = (None, None) if segment_ids is None else (segment_ids[:, start:end], segment_ids[:, :end])
        blocks.append(block(q[:, start:end], k[:, :end], v[:, :end], *segments))
    return jnp.concatenate(blocks, axis=1).reshape(query.shape).astype(query.dtype)
