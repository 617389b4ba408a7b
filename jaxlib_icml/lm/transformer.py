"""The decoder-only transformer that the language-model methods share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlib_icml.attention.l2a import L2AAux
from jaxlib_icml.lm.attention import Attention, Exploration, Rotary, residual_norm
from jaxlib_icml.lm.cache import KVCache, LayerCache
from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.hooks import Edit, Tap, stacked_edits
from jaxlib_icml.moe import RoutingStats, SparseMoE, update_expert_bias
from jaxlib_icml.nn import FeedForward, Kernel, contract, logical_axes, rotary_angles
from kernels_pallas.flash.reference import segment_starts

_REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class LMOutput(NamedTuple):
    """Final hidden states (batch, seq, width) times `logit_scale`, the experts' routing statistics stacked over layers,
    the cache, the captured activations by name (`jaxlib_icml.lm.HOOK_POINTS`), and L2A's routing stacked over layers
    (None without L2A or with a cache)."""

    hidden: Float[Array, "batch seq width"]
    routing: RoutingStats | None
    cache: KVCache | None
    activations: dict[str, Array]
    l2a: L2AAux | None


class Block(nnx.Module):
    """Pre-norm block: x + s Attention(norm x), then x + s FeedForward(norm x), with s = `residual_scale`."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs, layer: int = 0):
        self.residual_scale = config.residual_scale
        self.attention_norm = residual_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs, layer=layer)
        self.mlp_norm = residual_norm(config, rngs)
        if config.num_experts:
            self.moe = SparseMoE(
                config.width,
                config.resolved_expert_width,
                config.num_experts,
                config.num_active_experts,
                gate=config.moe_gate,
                activation=config.activation,
                shared_expert_width=config.shared_expert_width,
                router_delta_width=config.moe_router_delta,
                dtype=config.compute_dtype,
                rngs=rngs,
            )
        else:
            self.mlp = FeedForward(
                config.width,
                config.resolved_mlp_width,
                activation=config.activation,
                use_bias=config.mlp_bias,
                dtype=config.compute_dtype,
                rngs=rngs,
            )

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        rotary: Rotary | None,
        segment_ids: Int[Array, "batch seq"] | None,
        cache: LayerCache | None,
        lengths: Int[Array, " batch"] | None,
        prefill: bool,
        tap: Tap | None = None,
        exploration: Exploration | None = None,
    ) -> tuple[Float[Array, "batch seq width"], LayerCache | None, RoutingStats | None, L2AAux | None]:
        if tap is not None:
            x = tap("residual", x)
        attended, cache, l2a = self.attention(
            self.attention_norm(x),
            rotary,
            segment_ids=segment_ids,
            cache=cache,
            lengths=lengths,
            prefill=prefill,
            tap=tap,
            exploration=exploration,
        )
        attended = _scaled(attended, self.residual_scale)
        if tap is not None:
            attended = tap("attention_output", attended)
        x = x + attended
        if hasattr(self, "moe"):
            token_mask = None if segment_ids is None else segment_ids > 0
            added, stats = self.moe(self.mlp_norm(x), token_mask=token_mask)
        else:
            added, stats = self.mlp(self.mlp_norm(x)), None
        added = _scaled(added, self.residual_scale)
        if tap is not None:
            added = tap("mlp_output", added)
        return x + added, cache, stats, l2a


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1.0 else x * factor


class Transformer(nnx.Module):
    """Decoder-only language model, dense or mixture-of-experts.

    Args:
      config: sizes and options.
      rngs: `nnx.Rngs` with a `params` stream.

    >>> model = Transformer(LMConfig(num_layers=1, width=32, num_heads=2), rngs=nnx.Rngs(0))
    >>> model.logits(model(jnp.zeros((1, 3), jnp.int32)).hidden).shape
    (1, 3, 257)
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            dtype=config.compute_dtype,
            embedding_init=nnx.initializers.normal(config.init_std),
            embedding_metadata=logical_axes("vocab", "embed"),
            rngs=rngs,
        )
        if config.positions == "learned":
            self.position_embed = nnx.Embed(
                config.context_length,
                config.width,
                dtype=config.compute_dtype,
                embedding_init=nnx.initializers.normal(config.init_std),
                embedding_metadata=logical_axes(None, "embed"),
                rngs=rngs,
            )
        if config.scan_layers:

            @nnx.split_rngs(splits=config.num_layers)
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stacked(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs)

            self.layers: Any = stacked(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs=rngs, layer=i) for i in range(config.num_layers)])
        self.final_norm = residual_norm(config, rngs)
        if not config.tie_embeddings:
            init = nnx.initializers.normal(config.init_std)
            self.head = Kernel(init(rngs.params(), (config.width, config.vocab_size)), "embed", "vocab")

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        prefill: bool = False,
        prompt_lengths: Int[Array, " batch"] | None = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
        exploration: Exploration | None = None,
    ) -> LMOutput:
        """Hidden states of every token.

        Args:
          tokens: (batch, seq) int32 token ids.
          segment_ids: (batch, seq) int32 documents of packed rows (0: padding); attention stays inside a document.
          cache: keys and values of the tokens before these; the result holds the extended one.
          prefill: the cache is empty (a faster path).
          prompt_lengths: (batch,) tokens of each row when `prefill` is given right-padded prompts; None: all.
          capture: names of activations to return (`jaxlib_icml.lm.HOOK_POINTS`), as edited.
          edits: changes of activations, by name; data, so that other values do not compile anew.
          exploration: training with L2A: noise on its decisions, with one key for all layers.

        Returns:
          `LMOutput`; `hidden` goes through `logits` or `output_kernel`.

        Raises:
          ValueError: more tokens than the context length, both `segment_ids` and `cache`, `prompt_lengths` without
            `prefill`, or hooks that do not fit.
        """
        seq = tokens.shape[1]
        if seq > self.config.context_length:
            raise ValueError(f"tokens: {seq} per row, more than context_length {self.config.context_length}")
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids: not supported together with a cache")
        if prompt_lengths is not None and (cache is None or not prefill):
            raise ValueError("prompt_lengths: only with a cache and prefill=True")
        positions = jnp.arange(seq)
        lengths = after = None
        if cache is not None:
            lengths, after = cache.lengths, cache.lengths + seq
            if prefill:
                lengths = after = after if prompt_lengths is None else prompt_lengths
            else:
                positions = lengths[:, None] + positions
        x, rotary = self.embed(tokens), None
        if self.config.positions == "learned":
            x = x + self.position_embed(positions if segment_ids is None else positions - segment_starts(segment_ids))
        else:
            # Rotary attention only sees differences of positions, so packed documents need no restart.
            rotary = rotary_angles(
                positions, self.config.resolved_head_dim, self.config.rope_theta, self.config.resolved_rope_scaling
            )
        if self.config.attention != "l2a" and "routing_probability" in {*capture, *(edits or {})}:
            raise ValueError("capture, edits: routing_probability needs attention = l2a")
        hooks = (tuple(capture), stacked_edits(edits or {}, capture, self.config.num_layers))
        if exploration is not None:
            keys = jax.random.split(exploration.key, self.config.num_layers)
            exploration = Exploration(keys, jnp.broadcast_to(exploration.temperature, keys.shape))
        x, layer_caches, routing, activations, l2a = self._run_layers(
            x, rotary, segment_ids, cache, lengths, prefill, *hooks, exploration
        )
        new_cache = None if after is None else KVCache(layer_caches, after)
        hidden = _scaled(self.final_norm(x), self.config.logit_scale)
        return LMOutput(hidden, routing, new_cache, activations, l2a)

    def _run_layers(
        self,
        x: Array,
        rotary: Rotary | None,
        segment_ids: Array | None,
        cache: KVCache | None,
        lengths: Array | None,
        prefill: bool,
        capture: tuple[str, ...],
        edits: dict[str, Edit],
        exploration: Exploration | None,
    ) -> tuple[Array, tuple[Any, ...], RoutingStats | None, dict[str, Array], L2AAux | None]:
        hooked = bool(capture or edits)

        def run(
            graphdef: Any,
            state: nnx.State,
            x: Array,
            layer_cache: LayerCache | None,
            edits: Any,
            exploration: Exploration | None,
        ) -> Any:
            block = nnx.merge(graphdef, state)
            tap = Tap(capture, edits) if hooked else None
            x, layer_cache, stats, l2a = block(x, rotary, segment_ids, layer_cache, lengths, prefill, tap, exploration)
            return x, layer_cache, stats, {} if tap is None else tap.captured, l2a

        if self.config.remat != "none":
            run = jax.checkpoint(run, policy=_REMAT_POLICIES[self.config.remat], static_argnums=(0,))

        if self.config.scan_layers:
            graphdef, state = nnx.split(self.layers)

            def step(x: Array, inputs: tuple[nnx.State, LayerCache | None, Any, Exploration | None]) -> Any:
                x, *outputs = run(graphdef, inputs[0], x, *inputs[1:])
                return x, tuple(outputs)

            stacked_cache = None if cache is None else cache.layers[0]
            inputs = (state, stacked_cache, edits, exploration)
            x, (layer_cache, routing, captured, l2a) = jax.lax.scan(step, x, inputs)
            return x, () if layer_cache is None else (layer_cache,), routing, captured, l2a

        caches, stats, layers, routed = [], [], [], []
        for i, block in enumerate(self.layers):
            graphdef, state = nnx.split(block)
            of_layer = jax.tree.map(lambda array, i=i: array[i], (edits, exploration))
            layer_cache = None if cache is None else cache.layers[i]
            x, layer_cache, layer_stats, captured, l2a = run(graphdef, state, x, layer_cache, *of_layer)
            caches.append(layer_cache)
            stats.append(layer_stats)
            layers.append(captured)
            routed.append(l2a)
        stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
        # Statistics that no layer has are None, which is a tree without leaves.
        routing, activations, l2a = (jax.tree.map(stack, *of_layers) for of_layers in (stats, layers, routed))
        return x, tuple(caches), routing, activations, l2a

    def update_expert_biases(self, load: Float[Array, "layers experts"]) -> None:
        """Move the selection biases of all layers against the measured load (only for `moe_balance="bias"`).

        Args:
          load: (layers, experts) share of the tokens that chose each expert, from `LMOutput.routing`.
        """
        config = self.config
        if config.moe_balance != "bias" or not config.num_experts:
            return
        target = config.num_active_experts / config.num_experts
        if config.scan_layers:
            bias = self.layers.moe.expert_bias
            bias[...] = update_expert_bias(bias[...], load, target, config.expert_bias_rate)
            return
        for block, layer_load in zip(self.layers, load, strict=True):
            bias = block.moe.expert_bias
            bias[...] = update_expert_bias(bias[...], layer_load, target, config.expert_bias_rate)

    def output_kernel(self) -> Float[Array, "width vocab"]:
        """The (width, vocab) output matrix in the compute dtype: the head's, or the tied embedding's transpose."""
        kernel = self.embed.embedding[...].T if self.config.tie_embeddings else self.head.kernel[...]
        return kernel.astype(self.config.compute_dtype)

    def logits(self, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch vocab"]:
        """Float32 logits of hidden states (training uses the chunked loss instead)."""
        return contract(hidden, self.output_kernel()).astype(jnp.float32)


def abstract_transformer(config: LMConfig) -> Transformer:
    """A model without arrays: its variables hold `jax.ShapeDtypeStruct`s.

    Only one layer is traced (tracing all of them takes seconds for deep models); the others are copies.

    Args:
      config: sizes and options.

    Returns:
      The model; `nnx.split` gives the graph and the abstract state.

    >>> nnx.split(abstract_transformer(LMConfig()))[1]["embed"]["embedding"].shape
    (257, 128)
    """
    first = config if config.scan_layers else dataclasses.replace(config, num_layers=1, pruned_layers=())
    model = nnx.eval_shape(lambda: Transformer(first, rngs=nnx.Rngs(0)))
    if not config.scan_layers:
        model.config = config
        model.layers = nnx.List([nnx.clone(model.layers[0]) for _ in range(config.num_layers)])
        for layer in config.pruned_layers:
            model.layers[layer].attention.pruned = True
    return model


def split_model(model: Transformer) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The pure view of a model: `(graphdef, params, rest)`.

    Args:
      model: a transformer.

    Returns:
      The static graph, the trainable parameters, and everything else (the experts' selection biases).

    >>> model = Transformer(LMConfig(num_layers=1, width=32, num_heads=2), rngs=nnx.Rngs(0))
    >>> graphdef, params, rest = split_model(model)
    """
    parts: Any = nnx.split(model, nnx.Param, ...)
    return parts
