"""The one configuration of the language model, and its presets."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxlib_icml.attention.l2a import L2AConfig
from jaxlib_icml.nn import RopeScaling


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """Architecture of a decoder-only transformer; every field is a flag of `icml train` (`--model.width 256`).

    Raises:
      ValueError: sizes that do not fit one another; the message names the field.
    """

    vocab_size: int = 257
    """Number of token ids. `icml train` takes it from the tokenizer."""
    context_length: int = 256
    """Longest sequence in tokens, in training and in generation."""
    width: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks (attention + feed-forward)."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention); None: as many as query heads."""
    head_dim: int | None = None
    """Size of one head; None: width / num_heads."""
    mlp_width: int | None = None
    """Hidden width of the dense feed-forward; None: 8/3 width (swiglu, rounded up to 32) or 4 width (gelu)."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward non-linearity."""
    qk_norm: bool = False
    """RMS-normalise queries and keys before the rotary embedding."""
    qk_norm_scope: Literal["head", "all"] = "head"
    """What shares one normalisation of queries or keys: each head, or all heads together (OLMoE)."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections."""
    out_bias: bool = False
    """Add a bias to the attention's output projection."""
    mlp_bias: bool = False
    """Add biases to the dense feed-forward."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary embeddings of queries and keys, or a learned embedding per position (GPT-2)."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How rotary frequencies are lowered for a context longer than the pretraining's (`jaxlib_icml.nn.RopeScaling`)."""
    rope_factor: float = 1.0
    """By how much the context was extended."""
    rope_original_context: int | None = None
    """Context length of the pretraining (llama3, yarn); None: context_length / rope_factor."""
    rope_low_frequency_factor: float = 1.0
    """llama3: wavelengths above original context / this are scaled fully."""
    rope_high_frequency_factor: float = 4.0
    """llama3: wavelengths below original context / this are not scaled."""
    rope_beta_fast: float = 32.0
    """yarn: frequencies with more turns than this within the original context are not scaled."""
    rope_beta_slow: float = 1.0
    """yarn: frequencies with fewer turns than this are scaled fully."""
    rope_attention_factor: float | None = None
    """yarn: factor on queries and keys; None: 1 + 0.1 ln(rope_factor)."""
    sliding_window: int | None = None
    """Every token sees this many tokens, itself included; None: all before it."""
    attention: Literal["full", "l2a"] = "full"
    """full: every token sees all before it (or sliding_window). l2a: a router per layer decides which tokens do."""
    l2a: L2AConfig = dataclasses.field(default_factory=lambda: L2AConfig(window=256))
    """Routing of attention = l2a."""
    pruned_layers: tuple[int, ...] = ()
    """Layers of attention = l2a that have lost their global attention and keep a cache of one window."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation of the residual stream."""
    norm_epsilon: float = 1e-6
    """Added to the mean square or the variance in every normalisation."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head."""
    num_experts: int = 0
    """Experts per mixture-of-experts layer; 0: dense feed-forward."""
    num_active_experts: int = 2
    """Experts per token."""
    expert_width: int | None = None
    """Hidden width of one expert; None: mlp_width / num_active_experts, so that active sizes agree."""
    shared_expert_width: int = 0
    """Hidden width of an expert that every token uses; 0: none."""
    moe_gate: Literal["sigmoid", "softmax", "softmax_renorm", "cosine"] = "softmax_renorm"
    """How router scores become the weights of the chosen experts."""
    moe_router_delta: int = 0
    """Hidden width of a learned correction of the cosine gate's logits; 0: none."""
    moe_balance: Literal["loss", "bias"] = "loss"
    """Balance experts with an auxiliary loss, or only with selection biases that see the load."""
    aux_loss_weight: float = 0.01
    """Weight of the load-balancing loss (moe_balance = loss)."""
    router_z_loss_weight: float = 0.001
    """Weight of the mean squared log-partition of the router (moe_balance = loss)."""
    expert_bias_rate: float = 0.01
    """Step of the selection biases (moe_balance = bias)."""
    residual_scale: float = 1.0
    """Factor on what attention and the feed-forward add to the residual stream (1/depth in depth-aware rules)."""
    attention_scale: float | None = None
    """Factor on attention's logits; None: 1/sqrt(head_dim)."""
    logit_scale: float = 1.0
    """Factor on the output logits."""
    init_std: float = 0.02
    """Standard deviation of embeddings and head; hidden matrices use 1/sqrt(fan-in)."""
    scan_layers: bool = False
    """Stack the layers' parameters and scan over them: one compiled block however deep the model."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes: nothing, whole blocks, or all but the matrix products."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Dtype of activations and matrix products; parameters stay float32. auto: bfloat16 on TPUs and GPUs."""
    loss_chunk: int = 1024
    """Tokens whose float32 logits exist at one time in the loss."""

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "context_length",
            "width",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_width",
            "num_active_experts",
            "expert_width",
            "loss_chunk",
            "rope_original_context",
            "sliding_window",
        ):
            value = getattr(self, field)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{field}: must be at least 1 and below 2^31, got {value if value < 1 else 'more'}")
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} heads do not divide width {self.width}")
        if self.resolved_head_dim % 2:
            raise ValueError(f"head_dim: must be even for rotary embeddings, got {self.resolved_head_dim}")
        if self.num_heads % self.resolved_num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        for field in ("rope_theta", "norm_epsilon", "residual_scale", "attention_scale", "logit_scale"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{field}: must be positive, got {value}")
        if self.rope_scaling != "none" and not 1 <= self.rope_factor < math.inf:
            raise ValueError(f"rope_factor: must be at least 1, got {self.rope_factor}")
        if self.rope_attention_factor is not None and not 0 < self.rope_attention_factor < math.inf:
            raise ValueError(f"rope_attention_factor: must be positive, got {self.rope_attention_factor}")
        if self.dtype not in ("auto", "float32", "bfloat16") and type(self) is LMConfig:
            raise ValueError(f"dtype: must be auto, float32 or bfloat16, got {self.dtype!r}")
        if not math.inf > self.rope_high_frequency_factor > self.rope_low_frequency_factor > 0:
            raise ValueError(
                "rope_high_frequency_factor: must exceed rope_low_frequency_factor, which must be positive, got "
                f"{self.rope_high_frequency_factor} and {self.rope_low_frequency_factor}"
            )
        if not math.inf > self.rope_beta_fast > self.rope_beta_slow > 0:
            raise ValueError(
                "rope_beta_fast: must exceed rope_beta_slow, which must be positive, got "
                f"{self.rope_beta_fast} and {self.rope_beta_slow}"
            )
        if self.attention == "l2a" and self.sliding_window is not None:
            raise ValueError("sliding_window: attention = l2a has a window of its own, l2a.window")
        if self.pruned_layers and (self.attention != "l2a" or self.scan_layers):
            raise ValueError("pruned_layers: needs attention = l2a, and layers that are not scanned")
        if not all(0 <= layer < self.num_layers for layer in self.pruned_layers):
            raise ValueError(f"pruned_layers: must be layers below {self.num_layers}, got {self.pruned_layers}")
        if self.num_experts and self.mlp_bias:
            raise ValueError("mlp_bias: experts have no biases")
        if self.moe_router_delta < 0 or (self.moe_router_delta and self.moe_gate != "cosine"):
            raise ValueError(
                f"moe_router_delta: must be 0, or positive for the cosine gate, got {self.moe_router_delta}"
            )
        if self.num_experts < 0:
            raise ValueError(f"num_experts: must be 0 (dense) or positive, got {self.num_experts}")
        if self.num_experts and self.num_active_experts > self.num_experts:
            raise ValueError(
                f"num_active_experts: {self.num_active_experts} per token of only {self.num_experts} experts"
            )

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or width / num_heads."""
        return self.head_dim or self.width // self.num_heads

    @property
    def resolved_num_kv_heads(self) -> int:
        """`num_kv_heads`, or num_heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def resolved_rope_scaling(self) -> RopeScaling | None:
        """The `rope_*` fields as one object; None without scaling."""
        if self.rope_scaling == "none":
            return None
        return RopeScaling(
            kind=self.rope_scaling,
            factor=self.rope_factor,
            original_context=self.rope_original_context or max(1, int(self.context_length / self.rope_factor)),
            low_frequency_factor=self.rope_low_frequency_factor,
            high_frequency_factor=self.rope_high_frequency_factor,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            attention_factor=self.rope_attention_factor,
        )

    @property
    def resolved_mlp_width(self) -> int:
        """`mlp_width`, or the activation's usual multiple of the width."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.activation == "gelu" else -(-8 * self.width // 3 // 32) * 32

    @property
    def resolved_expert_width(self) -> int:
        """`expert_width`, or an equal share of the dense width for each active expert."""
        return self.expert_width or max(1, self.resolved_mlp_width // self.num_active_experts)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations on the default backend."""
        name = self.dtype
        if name == "auto":
            name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return jnp.dtype(name)


PRESETS: dict[str, LMConfig] = {
    "tiny-moe": LMConfig(width=128, num_layers=4, num_heads=4, num_experts=8, qk_norm=True, expert_width=192),
    "tiny-dense": LMConfig(width=128, num_layers=4, num_heads=4, qk_norm=True),
    "gpt2-small": LMConfig(
        vocab_size=50257,
        context_length=1024,
        width=768,
        num_layers=12,
        num_heads=12,
        activation="gelu",
        tie_embeddings=True,
        dtype="auto",
    ),
    "llama-60m": LMConfig(
        vocab_size=32000,
        context_length=1024,
        width=512,
        num_layers=8,
        num_heads=8,
        mlp_width=1376,
        dtype="auto",
    ),
    "qwen3-0.6b": LMConfig(
        vocab_size=151936,
        context_length=32768,
        width=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=3072,
        qk_norm=True,
        rope_theta=1e6,
        tie_embeddings=True,
        scan_layers=True,
        remat="full",
        dtype="auto",
    ),
}


def preset(name: str) -> LMConfig:
    """The preset of that name.

    Args:
      name: a key of `PRESETS`.

    Returns:
      The configuration.

    Raises:
      ValueError: there is no such preset.

    >>> preset("qwen3-0.6b").num_kv_heads
    8
    """
    if name not in PRESETS:
        raise ValueError(f"preset: unknown {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
