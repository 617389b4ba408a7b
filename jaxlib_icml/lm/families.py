"""What the checkpoints of other people's model families mean in terms of `LMConfig` and our parameters.

One function per direction for configurations (Hugging Face `config.json`, GGUF metadata), and one table of rows per
family for tensors: which tensors of the file make which parameter, and how. Everything a family has and we do not is
refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlib_icml.lm.config import LMConfig

__all__ = [
    "FAMILIES",
    "Row",
    "config_from_gguf",
    "config_from_hub",
    "config_to_hub",
    "family_of",
    "gguf_rows",
    "hub_rows",
]

Rotated = Literal["no", "query", "key"]


class Row(NamedTuple):
    """One parameter of ours and the tensors that it comes from.

    Attributes:
      path: path in the parameter tree, with the number of the layer, such as ("layers", 3, "mlp", "up", "kernel").
      names: names in the file: one, or one per expert.
      transposed: the file has (out, in) where we have (in, out).
      part: (i, n): the i-th of n equal parts along the file's last axis.
      rotated: rows are permuted for interleaved rotary pairs (GGUF files of the llama family).
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    rotated: Rotated = "no"


class _Family(NamedTuple):
    """What sets a family apart in `config.json`."""

    architecture: str
    fixed: dict[str, Any]
    """Fields of `LMConfig` that all its models have."""
    epsilon: float = 1e-6
    """`rms_norm_eps` of files that do not say it, as in transformers."""
    theta: float = 10000.0
    """`rope_theta` of such files."""


FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", {}),
    "mistral": _Family("MistralForCausalLM", {}),
    "qwen2": _Family("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": _Family("Qwen3ForCausalLM", {"qk_norm": True}),
    "gpt2": _Family(
        "GPT2LMHeadModel",
        {"norm": "layernorm", "positions": "learned", "activation": "gelu"}
        | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    ),
    "mixtral": _Family("MixtralForCausalLM", {"moe_gate": "softmax_renorm"}, epsilon=1e-5, theta=1e6),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", {"qk_norm": True}),
    "olmoe": _Family("OlmoeForCausalLM", {"qk_norm": True, "qk_norm_scope": "all"}, epsilon=1e-5),
}
"""Families by the `model_type` of `config.json`."""

_MOE = ("mixtral", "qwen3_moe", "olmoe")


class _Fields:
    """Checked access to a JSON object or to GGUF metadata."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where

    def __call__(self, key: str, kind: type, default: Any = ...) -> Any:
        value: Any = self._values.get(key)
        if value is None:
            if default is ...:
                raise ValueError(f"{self._where}: lacks {key}")
            return default
        valid = isinstance(value, (float, int) if kind is float else kind)
        if not valid or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self._where}: {key} must be of type {kind.__name__}, got {value!r}")
        try:
            return kind(value)
        except OverflowError:
            raise ValueError(f"{self._where}: {key} is too large") from None

    def has(self, key: str) -> bool:
        """Whether the file says anything about it, be it null."""
        return key in self._values

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Refuse what we do not have."""
        value = self._values.get(key, default)
        simple = value is None or isinstance(value, (bool, int, float, str, list))
        if not simple or value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ValueError(f"{self._where}: {key} = {value!r} is not supported, only {choices}")


def family_of(values: Mapping[str, Any], where: str) -> str:
    """The family that a `config.json` names.

    Args:
      values: the parsed file.
      where: its name, for messages.

    Returns:
      A key of `FAMILIES`.

    Raises:
      ValueError: another `model_type`.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{where}: model_type {kind!r} is not supported; there are {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise ValueError(f"{where}: quantization_config: quantized safetensors are not supported")
    return kind


def config_from_hub(values: Mapping[str, Any], where: str = "config.json") -> LMConfig:
    """The architecture that a Hugging Face `config.json` describes.

    Args:
      values: the parsed file.
      where: its name, for messages.

    Returns:
      The configuration; its `dtype` is "auto".

    Raises:
      ValueError: a field is missing, of the wrong type, or asks for something that we do not have.

    >>> config_from_hub({"model_type": "gpt2", "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4,
    ...                  "n_positions": 64}).mlp_width
    128
    """
    family = family_of(values, where)
    get = _Fields(values, where)
    try:
        if family == "gpt2":
            return _gpt2_config(get)
        config = LMConfig(
            vocab_size=get("vocab_size", int),
            context_length=get("max_position_embeddings", int),
            width=get("hidden_size", int),
            num_layers=get("num_hidden_layers", int),
            num_heads=get("num_attention_heads", int),
            num_kv_heads=get("num_key_value_heads", int, None),
            head_dim=get("head_dim", int, None),
            norm_epsilon=get("rms_norm_eps", float, FAMILIES[family].epsilon),
            tie_embeddings=get("tie_word_embeddings", bool, False),
            sliding_window=_sliding_window(get, family),
            dtype="auto",
            **FAMILIES[family].fixed,
            **_biases(get, family),
            **_experts(get, family),
            **_rope_from_hub(values, FAMILIES[family].theta, where),
        )
        get.require("hidden_act", ("silu",), "silu")
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
    return config


def _gpt2_config(get: _Fields) -> LMConfig:
    get.require("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    get.require("scale_attn_weights", (True,), True)
    get.require("scale_attn_by_inverse_layer_idx", (False,), False)
    get.require("add_cross_attention", (False,), False)
    width = get("n_embd", int)
    return LMConfig(
        vocab_size=get("vocab_size", int),
        context_length=get("n_positions", int),
        width=width,
        num_layers=get("n_layer", int),
        num_heads=get("n_head", int),
        mlp_width=get("n_inner", int, 4 * width),
        norm_epsilon=get("layer_norm_epsilon", float, 1e-5),
        tie_embeddings=get("tie_word_embeddings", bool, True),
        dtype="auto",
        **FAMILIES["gpt2"].fixed,
    )


def _sliding_window(get: _Fields, family: str) -> int | None:
    window: int | None = get("sliding_window", int, None)
    if family in ("mistral", "mixtral"):
        return 4096 if family == "mistral" and not get.has("sliding_window") else window
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        get.require("use_sliding_window", (False,), False)
    return None


def _biases(get: _Fields, family: str) -> dict[str, Any]:
    if family not in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        return {}
    bias = get("attention_bias", bool, False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": get("mlp_bias", bool, False)}


def _experts(get: _Fields, family: str) -> dict[str, Any]:
    width = get("intermediate_size", int)
    if family not in _MOE:
        return {"mlp_width": width}
    found = {"num_active_experts": get("num_experts_per_tok", int), "moe_balance": "loss"}
    # Written under either name, depending on the version of transformers.
    found["num_experts"] = get("num_experts", int, None) or get("num_local_experts", int)
    if family == "mixtral":
        return {**found, "expert_width": width}
    gate = "softmax_renorm" if get("norm_topk_prob", bool, False) else "softmax"
    found["moe_gate"] = gate
    if family == "olmoe":
        get.require("clip_qkv", (None,), None)
        return {**found, "expert_width": width}
    get.require("decoder_sparse_step", (1,), 1)
    get.require("mlp_only_layers", ([], None), None)
    return {**found, "expert_width": get("moe_intermediate_size", int)}


def _rope_from_hub(values: Mapping[str, Any], theta: float, where: str) -> dict[str, Any]:
    """From `rope_theta` and `rope_scaling`, or from the `rope_parameters` of newer files."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{where}: rope_scaling must be an object, got {scaling!r}")
    get = _Fields(scaling, f"{where}: rope_scaling")
    theta = get("rope_theta", float, _Fields(values, where)("rope_theta", float, theta))
    get.require("partial_rotary_factor", (1, 1.0), 1.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"{where}: rope_scaling type {kind!r} is not supported, only linear, llama3 and yarn")
    found = {"rope_theta": theta, "rope_scaling": kind, "rope_factor": get("factor", float)}
    if kind != "linear":
        whole = _Fields(values, where)("max_position_embeddings", int)
        found["rope_original_context"] = get("original_max_position_embeddings", int, whole)
    if kind == "llama3":
        found["rope_low_frequency_factor"] = get("low_freq_factor", float)
        found["rope_high_frequency_factor"] = get("high_freq_factor", float)
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            get.require(key, (None, 0), None)
        get.require("truncate", (True,), True)
        found["rope_beta_fast"] = get("beta_fast", float, 32.0)
        found["rope_beta_slow"] = get("beta_slow", float, 1.0)
        found["rope_attention_factor"] = get("attention_factor", float, None)
    return found


def config_to_hub(config: LMConfig) -> dict[str, Any]:
    """The `config.json` of a model, for the family that has all its features.

    Args:
      config: the architecture.

    Returns:
      JSON-able values; `model_type` names the family.

    Raises:
      ValueError: no family has this architecture; the message names the field.

    >>> config_to_hub(LMConfig(qk_norm=True, num_experts=8))["model_type"]
    'qwen3_moe'
    """
    if config.attention != "full":
        raise ValueError(f"attention: no family has {config.attention}")
    family = _choose_family(config)
    common = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if family == "gpt2":
        return {
            **common,
            "n_embd": config.width,
            "n_positions": config.context_length,
            "n_ctx": config.context_length,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.resolved_mlp_width,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu_new",
        }
    values = {
        **common,
        "hidden_size": config.width,
        "max_position_embeddings": config.context_length,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.resolved_num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.resolved_expert_width if family in _MOE else config.resolved_mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
    }
    scaling = config.resolved_rope_scaling
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_context
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope["attention_factor"] = scaling.amplitude
        values["rope_scaling"] = rope
    if family in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        values["attention_bias"] = config.qkv_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if family in _MOE:
        values["num_experts_per_tok"] = config.num_active_experts
        values["num_local_experts" if family == "mixtral" else "num_experts"] = config.num_experts
    if family in ("qwen3_moe", "olmoe"):
        values["norm_topk_prob"] = config.moe_gate == "softmax_renorm"
    if family == "qwen3_moe":
        values |= {"moe_intermediate_size": config.resolved_expert_width, "decoder_sparse_step": 1}
        values["mlp_only_layers"] = []
    return values


def _choose_family(config: LMConfig) -> str:
    if config.norm == "layernorm" or config.positions == "learned":
        family = "gpt2"
    elif config.num_experts:
        family = "mixtral" if not config.qk_norm else "olmoe" if config.qk_norm_scope == "all" else "qwen3_moe"
    elif config.qk_norm:
        family = "qwen3"
    elif config.qkv_bias and not config.out_bias:
        family = "qwen2"
    else:
        family = "llama" if config.sliding_window is None else "mistral"

    fixed = FAMILIES[family].fixed
    windowed = family in ("mistral", "mixtral")
    biased = family in ("llama", "qwen3", "qwen3_moe", "olmoe")
    # What the family has of every feature that its tensors or its `config.json` do not spell out.
    wanted = {
        "activation": fixed.get("activation", "swiglu"),
        "residual_scale": 1.0,
        "attention_scale": None,
        "logit_scale": 1.0,
        "norm": fixed.get("norm", "rmsnorm"),
        "positions": fixed.get("positions", "rotary"),
        "qk_norm": fixed.get("qk_norm", False),
        "qkv_bias": fixed.get("qkv_bias", config.qkv_bias if biased else False),
        "out_bias": fixed.get("out_bias", config.qkv_bias if biased else False),
        "mlp_bias": fixed.get("mlp_bias", config.mlp_bias if family == "llama" else False),
        "sliding_window": config.sliding_window if windowed else None,
        "shared_expert_width": 0,
    }
    if config.qk_norm:
        wanted["qk_norm_scope"] = fixed.get("qk_norm_scope", "head")
    if family == "gpt2":
        wanted |= {"num_experts": 0, "resolved_num_kv_heads": config.num_heads, "rope_scaling": "none"}
        wanted["resolved_head_dim"] = config.width // config.num_heads
    if family in _MOE:
        soft = fixed.get("moe_gate", config.moe_gate)
        wanted["moe_gate"] = soft if soft in ("softmax", "softmax_renorm") else "softmax_renorm"
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"{field}: no family of checkpoints has {getattr(config, field)!r} here ({family} has {value!r})"
            )
    return family


def hub_rows(family: str, config: LMConfig) -> Iterator[Row]:
    """Where every parameter of a model is in a Hugging Face checkpoint.

    Args:
      family: a key of `FAMILIES`.
      config: the architecture.

    Yields:
      Rows, the layers' with `path` ("layers", i, ...).
    """
    if family == "gpt2":
        yield from _gpt2_rows(config)
        return
    yield Row(("embed", "embedding"), ("model.embed_tokens.weight",))
    for i in range(config.num_layers):
        yield from _llama_rows(family, config, i)
    yield Row(("final_norm", "scale"), ("model.norm.weight",))
    if not config.tie_embeddings:
        yield Row(("head", "kernel"), ("lm_head.weight",), transposed=True)


def _llama_rows(family: str, config: LMConfig, i: int) -> Iterator[Row]:
    def row(path: str, name: str, **options: Any) -> Row:
        return Row(("layers", i, *path.split(".")), (f"model.layers.{i}.{name}",), **options)

    def linear(path: str, name: str, bias: bool) -> Iterator[Row]:
        yield row(f"{path}.kernel", f"{name}.weight", transposed=True)
        if bias:
            yield row(f"{path}.bias", f"{name}.bias")

    yield row("attention_norm.scale", "input_layernorm.weight")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        yield from linear(f"attention.{ours}", f"self_attn.{theirs}_proj", config.qkv_bias)
    yield from linear("attention.out", "self_attn.o_proj", config.out_bias)
    if config.qk_norm:
        yield row("attention.query_norm.scale", "self_attn.q_norm.weight")
        yield row("attention.key_norm.scale", "self_attn.k_norm.weight")
    yield row("mlp_norm.scale", "post_attention_layernorm.weight")
    if not config.num_experts:
        for matrix in ("gate", "up", "down"):
            yield from linear(f"mlp.{matrix}", f"mlp.{matrix}_proj", config.mlp_bias)
        return
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    yield row("moe.router.kernel", f"{block}.gate.weight", transposed=True)
    for matrix, letter in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        name = letter if family == "mixtral" else f"{matrix}_proj"
        names = tuple(f"model.layers.{i}.{block}.experts.{e}.{name}.weight" for e in range(config.num_experts))
        yield Row(("layers", i, "moe", "experts", matrix, "kernel"), names, transposed=True)


def _gpt2_rows(config: LMConfig) -> Iterator[Row]:
    # GPT-2 stores matrices as (in, out), and queries, keys and values side by side.
    yield Row(("embed", "embedding"), ("transformer.wte.weight",))
    yield Row(("position_embed", "embedding"), ("transformer.wpe.weight",))
    for i in range(config.num_layers):
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield Row(("layers", i, ours, "scale"), (f"transformer.h.{i}.{theirs}.weight",))
            yield Row(("layers", i, ours, "bias"), (f"transformer.h.{i}.{theirs}.bias",))
        for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
            for part, name in enumerate(("query", "key", "value")):
                source = (f"transformer.h.{i}.attn.c_attn.{theirs}",)
                yield Row(("layers", i, "attention", name, ours), source, part=(part, 3))
            yield Row(("layers", i, "attention", "out", ours), (f"transformer.h.{i}.attn.c_proj.{theirs}",))
            yield Row(("layers", i, "mlp", "up", ours), (f"transformer.h.{i}.mlp.c_fc.{theirs}",))
            yield Row(("layers", i, "mlp", "down", ours), (f"transformer.h.{i}.mlp.c_proj.{theirs}",))
    yield Row(("final_norm", "scale"), ("transformer.ln_f.weight",))
    yield Row(("final_norm", "bias"), ("transformer.ln_f.bias",))
    if not config.tie_embeddings:
        yield Row(("head", "kernel"), ("lm_head.weight",), transposed=True)


_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "olmoe": "olmoe"}
_GGUF_NAMES: dict[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str = "GGUF"
) -> tuple[str, LMConfig]:
    """The family and architecture that a GGUF file describes.

    Args:
      metadata: its key/value pairs.
      shapes: the shapes of its tensors; they tell the size of the vocabulary, an output head and biases.
      where: the file's name, for messages.

    Returns:
      A key of `FAMILIES`, and the configuration; its `dtype` is "auto".

    Raises:
      ValueError: a key is missing, of the wrong type, or asks for something that we do not have.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _GGUF_FAMILIES:
        known = ", ".join(_GGUF_FAMILIES)
        raise ValueError(f"{where}: general.architecture {architecture!r} is not supported; there are {known}")
    family = _GGUF_FAMILIES[architecture]
    get = _Fields({key.removeprefix(f"{architecture}."): _decimal(value) for key, value in metadata.items()}, where)
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{where}: lacks tensor token_embd.weight")
    heads, width = get("attention.head_count", int), get("embedding_length", int)
    experts = get("expert_count", int, 0)
    if family == "llama" and experts:
        family = "mixtral"
    scaling = get("rope.scaling.type", str, "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ValueError(f"{where}: rope.scaling.type {scaling!r} is not supported, only none, linear and yarn")
    get.require("rope.dimension_count", (None, get("attention.key_length", int, width // max(heads, 1))), None)
    feed_forward = get("expert_feed_forward_length", int, None) or get("feed_forward_length", int)
    features: dict[str, Any] = {
        **FAMILIES[family].fixed,
        "expert_width" if experts else "mlp_width": feed_forward,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "out_bias": "blk.0.attn_output.bias" in shapes,
    }
    if family == "olmoe":
        features["moe_gate"] = "softmax"
    try:
        config = LMConfig(
            vocab_size=shapes["token_embd.weight"][0],
            context_length=get("context_length", int),
            width=width,
            num_layers=get("block_count", int),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", int, None),
            head_dim=get("attention.key_length", int, None),
            norm_epsilon=get("attention.layer_norm_rms_epsilon", float, 1e-6),
            rope_theta=get("rope.freq_base", float, 10000.0),
            rope_scaling=scaling,
            rope_factor=get("rope.scaling.factor", float, 1.0),
            rope_original_context=get(
                "rope.scaling.original_context_length", int, None if scaling == "none" else get("context_length", int)
            ),
            tie_embeddings="output.weight" not in shapes,
            dtype="auto",
            num_experts=experts,
            num_active_experts=get("expert_used_count", int, 2),
            **features,
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
    return family, config


def _decimal(value: Any) -> Any:
    """The decimal number that somebody rounded to float32: 1e-6, not 9.99999997e-7."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def gguf_rows(family: str, config: LMConfig) -> Iterator[Row]:
    """Where every parameter of a model is in a GGUF file (matrices are (out, in), experts are stacked).

    Args:
      family: a key of `FAMILIES`.
      config: the architecture.

    Yields:
      Rows; queries and keys of the llama family are stored for interleaved rotary pairs.
    """
    for row in hub_rows(family, config):
        name = row.names[0]
        if name in _GGUF_TOP:
            yield row._replace(names=(_GGUF_TOP[name],))
            continue
        _, _, layer, rest = name.split(".", 3)
        if row.path[2:4] == ("moe", "experts"):
            yield row._replace(names=(f"blk.{layer}.ffn_{row.path[4]}_exps.weight",))
            continue
        stem, kind = rest.rsplit(".", 1)
        rotated: Rotated = "no"
        if family in ("llama", "mixtral") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            rotated = "query" if stem == "self_attn.q_proj" else "key"
        yield row._replace(names=(f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}",), rotated=rotated)
