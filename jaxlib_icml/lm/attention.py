"""Multi-head attention with grouped keys, rotary positions and an optional cache."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlib_icml.lm.cache import LayerCache, append
from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.nn import apply_rotary, dot_general, fan_in_normal, logical_axes
from kernels_pallas.causal_attention import causal_attention

Rotary = tuple[Float[Array, "*b seq half"], Float[Array, "*b seq half"]]


def rms_norm(size: int, config: LMConfig, rngs: nnx.Rngs, axis: str | None = "embed") -> nnx.RMSNorm:
    """An RMSNorm in the model's dtype; statistics are float32 whatever that is."""
    return nnx.RMSNorm(
        size,
        epsilon=config.norm_epsilon,
        dtype=config.compute_dtype,
        use_fast_variance=False,
        scale_metadata=logical_axes(axis),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal self-attention: (batch, seq, width) -> (batch, seq, width).

    Kernels keep their head axes, (width, heads, head_dim) and (heads, head_dim, width), so that optimizers and
    sharding rules can see them.
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        heads, kv_heads, head_dim = config.num_heads, config.resolved_num_kv_heads, config.resolved_head_dim

        def projection(num: int, axis: str) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.width,
                (num, head_dim),
                use_bias=config.qkv_bias,
                dtype=config.compute_dtype,
                kernel_init=fan_in_normal(),
                kernel_metadata=logical_axes("embed", axis, "head_dim"),
                bias_metadata=logical_axes(axis, "head_dim"),
                dot_general=dot_general,
                rngs=rngs,
            )

        self.query = projection(heads, "heads")
        self.key = projection(kv_heads, "kv_heads")
        self.value = projection(kv_heads, "kv_heads")
        self.out = nnx.LinearGeneral(
            (heads, head_dim),
            config.width,
            axis=(-2, -1),
            use_bias=False,
            dtype=config.compute_dtype,
            kernel_init=fan_in_normal(),
            kernel_metadata=logical_axes("heads", "head_dim", "embed"),
            dot_general=dot_general,
            rngs=rngs,
        )
        self.query_norm = rms_norm(head_dim, config, rngs, "head_dim") if config.qk_norm else None
        self.key_norm = rms_norm(head_dim, config, rngs, "head_dim") if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        rotary: Rotary,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: LayerCache | None = None,
        lengths: Int[Array, " batch"] | None = None,
        prefill: bool = False,
    ) -> tuple[Float[Array, "batch seq width"], LayerCache | None]:
        """Attend; with a cache, append the new tokens to it first.

        Args:
          x: (batch, seq, width) normalised inputs.
          rotary: cosines and sines of the tokens' positions.
          segment_ids: (batch, seq) documents of packed training rows; not with a cache.
          cache: this layer's cache.
          lengths: (batch,) tokens in the cache before this call.
          prefill: the cache is empty, so the new tokens only see one another.

        Returns:
          The output and the updated cache (None without one).
        """
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if cache is None or lengths is None:
            return self.out(causal_attention(q, k, v, segment_ids=segment_ids)), None
        cache = append(cache, k, v, lengths)
        if prefill:
            return self.out(causal_attention(q, k, v)), cache
        query_positions = lengths[:, None] + jnp.arange(x.shape[1])
        visible = jnp.arange(cache.keys.shape[1]) <= query_positions[:, :, None]
        return self.out(cached_attention(q, cache, visible)), cache


def cached_attention(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    visible: Bool[Array, "batch seq slots"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention of a few new tokens over the slots of a cache that they may see, in float32."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = cache.keys.shape[2]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btgrd,bsgd->bgrts", grouped, cache.keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bgrts,bsgd->btgrd", weights, cache.values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape)
