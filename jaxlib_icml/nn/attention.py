"""Attention of a few rows over slots of a cache, or with weights that somebody wants to see."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch slots kv_heads head_dim"],
    v: Float[Array, "batch slots kv_heads head_dim"],
    visible: Bool[Array, "batch seq slots"],
    hook: Callable[[Array], Array] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention over the slots that each token may see, scores and sums in float32.

    Args:
      q: queries.
      k: keys; every one of their heads serves heads / kv_heads query heads.
      v: values.
      visible: which slots a token sees, at least one each.
      hook: called with the weights, (batch, heads, seq, slots); what it returns is used.

    Returns:
      The heads' outputs.
    """
    batch, seq, heads, head_dim = q.shape
    slots, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btgrd,bsgd->bgrts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if hook is not None:
        weights = hook(weights.reshape(batch, heads, seq, slots)).reshape(weights.shape)
    out = jnp.einsum("bgrts,bsgd->btgrd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape)
