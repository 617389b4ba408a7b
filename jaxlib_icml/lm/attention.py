"""Multi-head attention with grouped keys, rotary positions and an optional cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxlib_icml.attention.l2a import L2AAux, Routing, capacity_for, l2a_attention, route
from jaxlib_icml.attention.l2a_cache import L2ACache, decode_attention, fill_cache
from jaxlib_icml.attention.l2a_layer import L2ARouter
from jaxlib_icml.lm.cache import LayerCache, append
from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.hooks import Tap
from jaxlib_icml.nn import apply_rotary, dot_general, fan_in_normal, logical_axes, masked_attention
from kernels_pallas import causal_attention, sliding_window_attention

Rotary = tuple[Float[Array, "*b seq half"], Float[Array, "*b seq half"]]


class Exploration(NamedTuple):
    """Noise on the decisions of L2A's routers in training.

    Attributes:
      key: a JAX random key.
      temperature: of the logistic noise, 1 until shortly before the end of a training, then falling to 0.
    """

    key: Key[Array, "*layers"]
    temperature: Float[Array, ""]


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

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs, layer: int = 0):
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
        # Attention itself divides logits by the root of head_dim; any other scale goes into the queries.
        self.query_scale = 1.0 if config.attention_scale is None else config.attention_scale * head_dim**0.5
        self.window = config.sliding_window
        self.l2a = config.l2a if config.attention == "l2a" else None
        self.pruned = layer in config.pruned_layers
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
        if self.l2a is not None:
            self.router = L2ARouter(config.width, self.l2a, rngs=rngs)

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
        exploration: Exploration | None = None,
    ) -> tuple[Float[Array, "batch seq width"], LayerCache | None, L2AAux | None]:
        """Attend; with a cache, append the new tokens to it first.

        Args:
          x: (batch, seq, width) normalised inputs.
          rotary: cosines and sines of the tokens' positions; None: no rotary embedding.
          segment_ids: (batch, seq) documents of packed training rows; not with a cache.
          cache: this layer's cache.
          lengths: (batch,) tokens in the cache before this call; with `prefill` those of the prompts.
          prefill: the cache is empty, so the new tokens only see one another.
          tap: reads and edits the pattern and the heads' outputs.
          exploration: L2A in training: noise on the router's decisions, and no more of them than its capacity.

        Returns:
          The output, the updated cache (None without one), and what L2A's routing did (None without L2A or with a
          cache).
        """
        q, k, v = self.query(x), self.key(x), self.value(x)
        if hasattr(self, "query_norm"):
            q, k = _normalise(self.query_norm, q), _normalise(self.key_norm, k)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        routing = self._route(x, exploration, tap)
        aux = None
        if cache is None or lengths is None:
            cache = None
            heads, aux = self._attend(q, k, v, routing, segment_ids, tap, exploration is not None)
        elif prefill:
            heads, _ = self._attend(q, k, v, routing, None, tap, False)
            cache = self._prefilled(cache, k, v, lengths)
        else:
            heads, cache = self._decode(q, k, v, routing, cache, lengths, tap)
        if tap is not None:
            heads = tap("head_output", heads)
        return self.out(heads), cache, aux

    def _route(self, x: Array, exploration: Exploration | None, tap: Tap | None) -> Routing | None:
        """L2A's decisions; None without L2A and for a pruned layer, whose decision is always no."""
        if self.l2a is None:
            return None
        watched = tap if tap is not None and tap.wants("routing_probability") else None
        if self.pruned:
            if watched is not None:
                watched("routing_probability", jnp.zeros(x.shape[:2], jnp.float32))
            return None
        key, temperature = (None, 0.0) if exploration is None else exploration
        routing = route(self.router(x), key=key, temperature=temperature, threshold=self.l2a.threshold)
        if watched is not None:
            prob = watched("routing_probability", routing.prob)
            return Routing(prob >= self.l2a.threshold, prob)
        return routing

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        routing: Routing | None,
        segment_ids: Array | None,
        tap: Tap | None,
        train: bool,
    ) -> tuple[Array, L2AAux | None]:
        """Attention among the tokens of one call."""
        batch, seq = q.shape[:2]
        hook = _pattern_hook(tap)
        if hook is not None:
            positions = jnp.arange(seq)
            visible = self._visible(positions[None], positions, routing)
            if segment_ids is not None:
                visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
            return masked_attention(q, k, v, jnp.broadcast_to(visible, (batch, seq, seq)), hook), None
        if self.l2a is None:
            if self.window is None or self.window >= seq:
                return causal_attention(q, k, v, segment_ids=segment_ids), None
            return sliding_window_attention(q, k, v, window=self.window, segment_ids=segment_ids), None
        window, sinks = self.l2a.window, self.l2a.sinks
        if routing is None:
            none, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.float32)
            heads = sliding_window_attention(q, k, v, window=window, sinks=sinks, segment_ids=segment_ids)
            return heads, L2AAux(none, none, nothing, nothing)
        return l2a_attention(
            q,
            k,
            v,
            routing,
            window=window,
            capacity=capacity_for(seq, self.l2a) if train else None,
            segment_ids=segment_ids,
            combine=self.l2a.combine,
            estimator=self.l2a.estimator,
            overflow=self.l2a.overflow if train else "drop_late",
            train=train,
            sinks=sinks,
        )

    def _prefilled(self, cache: LayerCache, k: Array, v: Array, lengths: Array) -> LayerCache:
        if not self.pruned or self.l2a is None:
            return append(cache, k, v, None)
        filled = fill_cache(L2ACache(*cache, lengths), k, v, lengths, sinks=self.l2a.sinks)
        return LayerCache(filled.keys, filled.values)

    def _decode(
        self,
        q: Array,
        k: Array,
        v: Array,
        routing: Routing | None,
        cache: LayerCache,
        lengths: Array,
        tap: Tap | None,
    ) -> tuple[Array, LayerCache]:
        """Attention of the next tokens of every row."""
        hook = _pattern_hook(tap)
        if self.l2a is not None and (hook is None or self.pruned):
            if hook is not None:
                raise ValueError("capture: a pruned layer's cache is a ring, it has no attention_pattern by position")
            heads, new = decode_attention(
                q,
                k,
                v,
                L2ACache(*cache, lengths),
                routing,
                window=self.l2a.window,
                sinks=self.l2a.sinks,
                combine=self.l2a.combine,
                estimator=self.l2a.estimator,
            )
            return heads, LayerCache(new.keys, new.values)
        cache = append(cache, k, v, lengths)
        positions = lengths[:, None] + jnp.arange(q.shape[1])
        visible = self._visible(positions, jnp.arange(cache.keys.shape[1]), routing)
        return masked_attention(q, cache.keys, cache.values, visible, hook), cache

    def _visible(self, positions: Array, slots: Array, routing: Routing | None) -> Array:
        """(batch, seq, slots): which slots a query at each position sees."""
        causal = slots <= positions[:, :, None]
        if self.l2a is None:
            return causal if self.window is None else causal & (slots > positions[:, :, None] - self.window)
        if (self.l2a.combine, self.l2a.estimator) != ("replace", "st"):
            raise ValueError("capture: attention_pattern needs l2a.combine = replace and l2a.estimator = st")
        near = causal & ((slots > positions[:, :, None] - self.l2a.window) | (slots < self.l2a.sinks))
        return near if routing is None else near | (causal & routing.mask[:, :, None])


def _normalise(norm: nnx.RMSNorm, x: Array) -> Array:
    """Over the last axis, or over heads and head_dim together, whichever the scale fits."""
    if norm.num_features == x.shape[-1]:
        return norm(x)
    return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _pattern_hook(tap: Tap | None) -> Callable[[Array], Array] | None:
    if tap is None or not tap.wants("attention_pattern"):
        return None
    return lambda pattern: tap("attention_pattern", pattern)
