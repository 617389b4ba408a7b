"""Multi-head attention with grouped keys, rotary positions and an optional cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlib_icml.lm.cache import LayerCache, append
from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.hooks import Tap
from jaxlib_icml.nn import apply_rotary, dot_general, fan_in_normal, logical_axes
from kernels_pallas.causal_attention import causal_attention

Rotary = tuple[Float[Array, "*b seq half"], Float[Array, "*b seq half"]]

# Queries that share a slice of keys in windowed attention.
_QUERY_BLOCK = 256


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


def residual_norm(config: LMConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
    """The normalisation before a block's parts and before the head."""
    if config.norm == "rmsnorm":
        return rms_norm(config.width, config, rngs)
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_epsilon,
        dtype=config.compute_dtype,
        use_fast_variance=False,
        scale_metadata=logical_axes("embed"),
        bias_metadata=logical_axes("embed"),
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
        self.window = config.sliding_window
        self.out = nnx.LinearGeneral(
            (heads, head_dim),
            config.width,
            axis=(-2, -1),
            use_bias=config.out_bias,
            dtype=config.compute_dtype,
            kernel_init=fan_in_normal(),
            kernel_metadata=logical_axes("heads", "head_dim", "embed"),
            bias_metadata=logical_axes("embed"),
            dot_general=dot_general,
            rngs=rngs,
        )
        scope = config.qk_norm_scope if config.qk_norm else None
        sizes = {"head": (head_dim, head_dim), "all": (heads * head_dim, kv_heads * head_dim)}
        if scope is not None:
            axis = "head_dim" if scope == "head" else None
            self.query_norm, self.key_norm = (rms_norm(size, config, rngs, axis) for size in sizes[scope])

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        rotary: Rotary | None,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: LayerCache | None = None,
        lengths: Int[Array, " batch"] | None = None,
        prefill: bool = False,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "batch seq width"], LayerCache | None]:
        """Attend; with a cache, append the new tokens to it first.

        Args:
          x: (batch, seq, width) normalised inputs.
          rotary: cosines and sines of the tokens' positions; None: no rotary embedding.
          segment_ids: (batch, seq) documents of packed training rows; not with a cache.
          cache: this layer's cache.
          lengths: (batch,) tokens in the cache before this call.
          prefill: the cache is empty, so the new tokens only see one another.
          tap: reads and edits the pattern and the heads' outputs.

        Returns:
          The output and the updated cache (None without one).
        """
        q, k, v = self.query(x), self.key(x), self.value(x)
        if hasattr(self, "query_norm"):
            q, k = _normalise(self.query_norm, q), _normalise(self.key_norm, k)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if cache is None or lengths is None:
            cache = None
            heads = self._attend(q, k, v, segment_ids, tap)
        else:
            cache = append(cache, k, v, None if prefill else lengths)
            if prefill:
                heads = self._attend(q, k, v, None, tap)
            else:
                positions = lengths[:, None] + jnp.arange(x.shape[1])
                visible = _visible(positions, jnp.arange(cache.keys.shape[1]), self.window)
                heads = masked_attention(q, cache.keys, cache.values, visible, _pattern_hook(tap))
        if tap is not None:
            heads = tap("head_output", heads)
        return self.out(heads), cache

    def _attend(self, q: Array, k: Array, v: Array, segment_ids: Array | None, tap: Tap | None) -> Array:
        """Attention among the tokens of one call."""
        seq = q.shape[1]
        hook = _pattern_hook(tap)
        if hook is not None:
            positions = jnp.arange(seq)
            visible = _visible(positions[None], positions, self.window)
            if segment_ids is not None:
                visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
            return masked_attention(q, k, v, jnp.broadcast_to(visible, (q.shape[0], seq, seq)), hook)
        if self.window is None or self.window >= seq:
            return causal_attention(q, k, v, segment_ids=segment_ids)
        return windowed_attention(q, k, v, self.window, segment_ids)


def _normalise(norm: nnx.RMSNorm, x: Array) -> Array:
    """Over the last axis, or over heads and head_dim together, whichever the scale fits."""
    if norm.num_features == x.shape[-1]:
        return norm(x)
    return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _visible(positions: Array, slots: Array, window: int | None) -> Array:
    """(batch, seq, slots): which slots a query at each position sees."""
    visible = slots <= positions[:, :, None]
    return visible if window is None else visible & (slots > positions[:, :, None] - window)


def _pattern_hook(tap: Tap | None) -> Callable[[Array], Array] | None:
    if tap is None or not tap.wants("attention_pattern"):
        return None
    return lambda pattern: tap("attention_pattern", pattern)


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


def windowed_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    window: int,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention to the last `window` tokens, in memory linear in seq.

    Args:
      q: queries.
      k: keys.
      v: values.
      window: tokens that a token sees, itself included.
      segment_ids: documents of packed rows; None: one document.

    Returns:
      The heads' outputs.
    """
    seq = q.shape[1]
    block = min(_QUERY_BLOCK, seq)
    count = -(-seq // block)
    # Keys of a block of queries are one slice, once `window` - 1 slots lie before the first token.
    before, after, span = window - 1, count * block - seq, window - 1 + block
    pad = lambda x, front: jnp.pad(x, [(0, 0), (front, after)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    q, k, v = pad(q, 0), pad(k, before), pad(v, before)
    segments = None if segment_ids is None else (pad(segment_ids, 0), pad(segment_ids, before))
    slots = jnp.arange(span)

    @jax.checkpoint
    def attend(start: Array) -> Array:
        def cut(x: Array, size: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        rows = before + jnp.arange(block)[:, None]
        # A padding row sees itself, so that its softmax is defined.
        visible = (slots <= rows) & (slots > rows - window) & (slots + start >= before)
        visible = jnp.broadcast_to(visible, (q.shape[0], block, span))
        if segments is not None:
            visible &= cut(segments[0], block)[:, :, None] == cut(segments[1], span)[:, None, :]
        return masked_attention(cut(q, block), cut(k, span), cut(v, span), visible)

    out = jax.lax.map(attend, block * jnp.arange(count))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)[:, :seq]
