"""The L2A attention layer: projections, rotary positions, router, and conversion of a pretrained attention."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxlib_icml.attention.l2a import L2AAux, L2AConfig, Routing, capacity_for, l2a_attention, route
from jaxlib_icml.attention.l2a_cache import L2ACache, cache_slots, decode_attention, fill_cache, init_cache
from jaxlib_icml.nn import Kernel, RopeScaling, apply_rotary, dot_general, fan_in_normal, logical_axes, rotary_angles
from kernels_pallas.dispatch import Implementation
from kernels_pallas.sliding_window_attention import sliding_window_attention

__all__ = ["L2AAttention", "L2ARouter", "from_attention_params"]

_HIDDEN = 64
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}


class L2ARouter(nnx.Module):
    """Logit z of every token for global attention: z = u · RMSNorm(x) + b, or width → 64 → 1 with SiLU.

    Starts at z = logit(init_rate) for every token. Computes in float32 whatever the dtype of x. The normalisation has
    no scale of its own, which u would absorb.

    Args:
      width: features of a token.
      config: its `router` and `init_rate` are used.
      rngs: source of keys, stream `params`.

    >>> float(L2ARouter(8, L2AConfig(window=4, init_rate=0.5), rngs=nnx.Rngs(0))(jnp.ones((1, 3, 8)))[0, 2])
    0.0
    """

    def __init__(self, width: int, config: L2AConfig, *, rngs: nnx.Rngs):
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        size = width
        if config.router == "mlp":
            size = _HIDDEN
            hidden = fan_in_normal()(rngs.params(), (width, size), jnp.float32)
            self.hidden = Kernel(hidden, "embed", None, use_bias=True)
        self.out = Kernel(jnp.zeros((size, 1)), "embed" if size == width else None, None, use_bias=True)
        self.out.bias[...] = jnp.full(1, math.log(config.init_rate / (1 - config.init_rate)))

    def __call__(self, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq"]:
        """Logits of tokens, float32."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        if hasattr(self, "hidden"):
            x = jax.nn.silu(_affine(self.hidden, x))
        return _affine(self.out, x)[..., 0]


def _affine(layer: Kernel, x: Array) -> Array:
    # The default precision of TPUs and GPUs would round the inputs of this product to 8 or 10 bits.
    return jnp.dot(x, layer.kernel[...], precision=jax.lax.Precision.HIGHEST) + layer.bias[...]


class L2AAttention(nnx.Module):
    """Causal self-attention to a sliding window, and for the tokens that its router chooses to everything before.

    Kernels keep their head axes, (width, heads, head_dim) and (heads, head_dim, width). A layer with `pruned` set
    (an attribute that may be changed at any time) is plain sliding-window attention and ignores its router.

    "Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484).

    >>> layer = L2AAttention(16, 2, L2AConfig(window=4), rngs=nnx.Rngs(0))
    >>> y, aux = layer(jnp.ones((1, 8, 16)))
    >>> y.shape, aux.n_routed.tolist()
    ((1, 8, 16), [8])
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        config: L2AConfig,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: str | None = None,
        norm_epsilon: float = 1e-6,
        qkv_bias: bool = False,
        out_bias: bool = False,
        pruned: bool = False,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        """Create the layer.

        Args:
          width: features of a token.
          num_heads: query heads.
          config: window and routing.
          num_kv_heads: key heads, a divisor of `num_heads`; None: as many.
          head_dim: size of a head; None: width / num_heads.
          rope_theta: base of the rotary wavelengths; None: no rotary positions.
          rope_scaling: how the rotary frequencies are lowered for a longer context.
          qk_norm: RMS-normalise queries and keys, each head by itself or all heads together; None: not.
          norm_epsilon: added to the mean squares of `qk_norm`.
          qkv_bias: add biases to queries, keys and values.
          out_bias: add a bias to the output.
          pruned: sliding-window attention only.
          dtype: compute dtype; None: that of inputs and parameters. The router computes in float32.
          rngs: source of keys, stream `params`.

        Raises:
          ValueError: sizes that do not fit one another.
        """
        if num_heads < 1 or (head_dim is None and width % num_heads):
            raise ValueError(f"num_heads must be at least 1 and divide width = {width}, got {num_heads}")
        head_dim = width // num_heads if head_dim is None else head_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim < 1 or (rope_theta is not None and head_dim % 2):
            raise ValueError(f"head_dim must be at least 1, and even for rotary positions, got {head_dim}")
        self.config, self.pruned, self.dtype = config, pruned, dtype
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim

        def projection(num: int, axis: str) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                width,
                (num, head_dim),
                use_bias=qkv_bias,
                dtype=dtype,
                kernel_init=fan_in_normal(),
                kernel_metadata=logical_axes("embed", axis, "head_dim"),
                bias_metadata=logical_axes(axis, "head_dim"),
                dot_general=dot_general,
                rngs=rngs,
            )

        self.query = projection(num_heads, "heads")
        self.key = projection(num_kv_heads, "kv_heads")
        self.value = projection(num_kv_heads, "kv_heads")
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim),
            width,
            axis=(-2, -1),
            use_bias=out_bias,
            dtype=dtype,
            kernel_init=fan_in_normal(),
            kernel_metadata=logical_axes("heads", "head_dim", "embed"),
            bias_metadata=logical_axes("embed"),
            dot_general=dot_general,
            rngs=rngs,
        )
        if qk_norm is not None:
            sizes = {"head": (head_dim,) * 2, "all": (num_heads * head_dim, num_kv_heads * head_dim)}
            if qk_norm not in sizes:
                raise ValueError(f"qk_norm must be None, 'head' or 'all', got {qk_norm!r}")
            axis = "head_dim" if qk_norm == "head" else None
            self.query_norm, self.key_norm = (
                nnx.RMSNorm(
                    size,
                    epsilon=norm_epsilon,
                    dtype=dtype,
                    use_fast_variance=False,
                    scale_metadata=logical_axes(axis),
                    rngs=rngs,
                )
                for size in sizes[qk_norm]
            )
        self.router = L2ARouter(width, config, rngs=rngs)

    def route(
        self,
        x: Float[Array, "batch seq width"],
        *,
        temperature: float | Float[Array, ""] = 0.0,
        rngs: nnx.Rngs | Key[Array, ""] | None = None,
    ) -> Routing:
        """Which tokens ask for global attention, before capacity and pruning; see `jaxlib_icml.attention.route`."""
        noisy = isinstance(temperature, jax.core.Tracer) or temperature > 0
        key = rngs.routing() if isinstance(rngs, nnx.Rngs) and noisy else rngs
        key = None if isinstance(key, nnx.Rngs) else key
        return route(self.router(x), key=key, temperature=temperature, threshold=self.config.threshold)

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        positions: Int[Array, "batch seq"] | None = None,
        *,
        train: bool = False,
        temperature: float | Float[Array, ""] | None = None,
        rngs: nnx.Rngs | Key[Array, ""] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        capacity: int | None = None,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "batch seq width"], L2AAux]:
        """Attend.

        Args:
          x: (batch, seq, width) normalised inputs.
          positions: (batch, seq) rotary positions; None: 0, 1, ...
          train: explore, and allow overflow="topk".
          temperature: τ of the routing's noise; None: 1 in training, else 0.
          rngs: a random key for the noise, or a source with a stream `routing`; needed where τ is not 0.
          segment_ids: (batch, seq) documents of packed rows; 0 is padding.
          capacity: most tokens of a row that attend globally; None: `capacity_for`.
          implementation: that of the attention operations, see `kernels_pallas`.

        Returns:
          (batch, seq, width), and what the routing did (all 0 for a pruned layer).

        Raises:
          ValueError: arguments that do not fit, noise without a key, overflow="topk" outside of training.
        """
        y, aux, _ = self._forward(
            x,
            positions,
            train=train,
            temperature=(1.0 if train else 0.0) if temperature is None else temperature,
            rngs=rngs,
            segment_ids=segment_ids,
            capacity=capacity,
            implementation=implementation,
        )
        return y, aux

    def init_cache(self, batch: int, seq: int, *, extra: int = 0) -> L2ACache:
        """An empty cache for sequences of up to `seq` tokens, of one window only where the layer is pruned.

        Args:
          batch: number of sequences.
          seq: tokens of the longest.
          extra: last tokens that may be taken back, see `cache_slots`.

        Returns:
          The cache, in the compute dtype.
        """
        slots = cache_slots(seq, self.config.window, pruned=self.pruned, sinks=self.config.sinks, extra=extra)
        dtype = self.key.kernel.dtype if self.dtype is None else self.dtype
        return init_cache(batch, slots, self.num_kv_heads, self.head_dim, dtype)

    def prefill(
        self,
        x: Float[Array, "batch seq width"],
        cache: L2ACache,
        lengths: Int[Array, " batch"] | None = None,
        *,
        capacity: int | None = None,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "batch seq width"], L2AAux, L2ACache]:
        """Attend among the tokens of prompts and put them into an empty cache.

        Args:
          x: (batch, seq, width) normalised inputs, prompts from the left.
          cache: an empty cache.
          lengths: (batch,) tokens of each prompt, the rest being padding; None: all.
          capacity: as for `__call__`.
          implementation: as for `__call__`.

        Returns:
          (batch, seq, width), what the routing did, the cache.
        """
        segments = None if lengths is None else (jnp.arange(x.shape[1]) < lengths[:, None]).astype(jnp.int32)
        y, aux, (k, v) = self._forward(x, None, segment_ids=segments, capacity=capacity, implementation=implementation)
        return y, aux, fill_cache(cache, k, v, lengths, sinks=self.config.sinks)

    def decode(
        self, x: Float[Array, "batch new width"], cache: L2ACache
    ) -> tuple[Float[Array, "batch new width"], L2AAux, L2ACache]:
        """Attend from the next tokens of every sequence, usually one, at the positions that follow the cache's.

        Args:
          x: (batch, new, width) normalised inputs.
          cache: keys and values of the tokens before; of the size that `init_cache` gives it.

        Returns:
          (batch, new, width), what the routing did, the cache with the new tokens.
        """
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1])
        q, k, v = self._project(x, positions)
        routing = None if self.pruned else self.route(x)
        config = self.config
        out, cache = decode_attention(
            q,
            k,
            v,
            cache,
            routing,
            window=config.window,
            sinks=config.sinks,
            combine=config.combine,
            estimator=config.estimator,
        )
        aux = _nothing_routed(x.shape[0])
        if routing is not None:
            n_routed = jnp.sum(routing.mask, axis=1, dtype=jnp.int32)
            aux = L2AAux(n_routed, aux.n_overflow, jnp.mean(routing.mask), jnp.mean(routing.prob))
        return self.out(out), aux, cache

    def _project(self, x: Array, positions: Array | None) -> tuple[Array, Array, Array]:
        if x.ndim != 3:
            raise ValueError(f"x must be a (batch, seq, width) array, got shape {x.shape}")
        q, k, v = self.query(x), self.key(x), self.value(x)
        if hasattr(self, "query_norm"):
            q, k = _normalise(self.query_norm, q), _normalise(self.key_norm, k)
        if self.rope_theta is not None:
            if positions is None:
                positions = jnp.arange(x.shape[1])[None]
            rotary = rotary_angles(positions, self.head_dim, self.rope_theta, self.rope_scaling)
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        return q, k, v

    def _forward(
        self,
        x: Array,
        positions: Array | None,
        *,
        train: bool = False,
        temperature: float | Array = 0.0,
        rngs: nnx.Rngs | Array | None = None,
        segment_ids: Array | None,
        capacity: int | None,
        implementation: Implementation,
    ) -> tuple[Array, L2AAux, tuple[Array, Array]]:
        config = self.config
        q, k, v = self._project(x, positions)
        if self.pruned:
            out = sliding_window_attention(
                q,
                k,
                v,
                window=config.window,
                sinks=config.sinks,
                segment_ids=segment_ids,
                implementation=implementation,
            )
            return self.out(out), _nothing_routed(x.shape[0]), (k, v)
        out, aux = l2a_attention(
            q,
            k,
            v,
            self.route(x, temperature=temperature, rngs=rngs),
            window=config.window,
            capacity=capacity_for(x.shape[1], config) if capacity is None else capacity,
            segment_ids=segment_ids,
            combine=config.combine,
            estimator=config.estimator,
            overflow=config.overflow,
            train=train,
            sinks=config.sinks,
            implementation=implementation,
        )
        return self.out(out), aux, (k, v)


def _nothing_routed(batch: int) -> L2AAux:
    zeros = jnp.zeros(batch, jnp.int32)
    return L2AAux(zeros, zeros, jnp.zeros(()), jnp.zeros(()))


def _normalise(norm: nnx.RMSNorm, x: Array) -> Array:
    """Over the last axis, or over heads and head_dim together, whichever the scale fits."""
    if norm.num_features == x.shape[-1]:
        return norm(x)
    return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def from_attention_params(
    params: nnx.Module | nnx.State | Mapping[str, Any],
    config: L2AConfig,
    *,
    rope_theta: float | None = 10000.0,
    rope_scaling: RopeScaling | None = None,
    norm_epsilon: float = 1e-6,
    dtype: Any = None,
    rngs: nnx.Rngs | None = None,
) -> L2AAttention:
    """An L2A layer with the projections of a pretrained attention.

    Args:
      params: A Flax attention module, its state, or a dictionary of arrays: `query`, `key`, `value` (or `q`, `k`, `v`)
        with `kernel` (width, heads, head_dim) and perhaps `bias` (heads, head_dim); `out` (or `o`) with `kernel`
        (heads, head_dim, width) and perhaps `bias` (width,); perhaps `query_norm` and `key_norm`, RMS norms with
        `scale` (head_dim,) or (heads * head_dim,).
      config: Window and routing.
      rope_theta: Base of the rotary wavelengths; None: no rotary positions, as in Flax's own attention.
      rope_scaling: How the rotary frequencies are lowered for a longer context.
      norm_epsilon: Added to the mean squares of queries' and keys' norms.
      dtype: Compute dtype; None: that of inputs and parameters.
      rngs: Source of keys for the router, stream `params`; None: `nnx.Rngs(0)`.

    Returns:
      The layer; its arrays are those given.

    Raises:
      ValueError: parameters that are missing, do not fit, or have no place in this layer.

    >>> plain = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> layer = from_attention_params(plain, L2AConfig(window=4), rope_theta=None)
    >>> bool((layer.query.kernel[...] == plain.query.kernel[...]).all())
    True
    """
    arrays = _named_arrays(params)
    needed = [f"{name}.kernel" for name in _PROJECTIONS.values()]
    for name in needed:
        if name not in arrays or arrays[name].ndim != 3:
            shape = arrays[name].shape if name in arrays else "nothing"
            raise ValueError(f"params must have {name} of three axes, got {shape}; all: {', '.join(sorted(arrays))}")
    width, heads, head_dim = arrays["query.kernel"].shape
    scale = arrays.get("query_norm.scale")
    qk_norm: str | None = None
    if scale is not None:
        qk_norm = "head" if scale.shape == (head_dim,) else "all"
    layer = L2AAttention(
        width,
        heads,
        config,
        num_kv_heads=arrays["key.kernel"].shape[1],
        head_dim=head_dim,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qk_norm=qk_norm,
        norm_epsilon=norm_epsilon,
        qkv_bias="query.bias" in arrays,
        out_bias="out.bias" in arrays,
        dtype=dtype,
        rngs=nnx.Rngs(0) if rngs is None else rngs,
    )
    own = {
        ".".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        if path[0] != "router"
    }
    if own.keys() != arrays.keys():
        raise ValueError(
            f"params must have exactly {', '.join(sorted(own))}; missing {sorted(own.keys() - arrays.keys())}, without "
            f"a place {sorted(arrays.keys() - own.keys())}"
        )
    for name, variable in own.items():
        if variable.shape != arrays[name].shape:
            raise ValueError(f"params: {name} must have shape {variable.shape}, got {arrays[name].shape}")
        part, leaf = name.split(".")
        getattr(getattr(layer, part), leaf).set_value(arrays[name])
    return layer


def _named_arrays(params: Any) -> dict[str, Array]:
    """Arrays by the layer's own names, "query.kernel"."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    arrays = {}
    for part, leaves in params.items():
        if not isinstance(leaves, Mapping):
            raise ValueError(f"params[{part!r}] must hold arrays by name, got {type(leaves).__name__}")
        for leaf, array in leaves.items():
            arrays[f"{_PROJECTIONS.get(part, part)}.{leaf}"] = jnp.asarray(array)
    return arrays
