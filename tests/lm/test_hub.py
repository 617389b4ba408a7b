"""Checkpoints written and read back, GGUF files of every family, and files that lie; without `transformers`."""

import dataclasses
import json
import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxlib_icml.lm import LMConfig, Transformer, preset
from jaxlib_icml.lm.families import config_from_hub, config_to_hub
from jaxlib_icml.lm.hub import (
    as_hub_tokenizer,
    export_model,
    is_pretrained,
    load_pretrained,
    pretrained_config,
)
from jaxlib_icml.lm.safetensors import open_checkpoint, write_checkpoint
from jaxlib_icml.lm.tokenizer import BPETokenizer, ByteTokenizer
from jaxlib_icml.training.mesh import MeshConfig, make_mesh

gguf = pytest.importorskip("gguf")

SMALL = LMConfig(vocab_size=260, context_length=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=48)
MOE = dataclasses.replace(SMALL, num_experts=4, expert_width=24, mlp_width=None)
GPT2 = dataclasses.replace(
    SMALL,
    num_kv_heads=4,
    norm="layernorm",
    positions="learned",
    activation="gelu",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
FAMILIES = {
    "llama": SMALL,
    "mistral": dataclasses.replace(SMALL, sliding_window=8),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True, tie_embeddings=True),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, head_dim=16),
    "gpt2": GPT2,
    "mixtral": MOE,
    "qwen3_moe": dataclasses.replace(MOE, qk_norm=True, moe_gate="softmax"),
    "olmoe": dataclasses.replace(MOE, qk_norm=True, qk_norm_scope="all"),
}


def build(config, seed=0):
    """A model whose every parameter is random, norms and biases too."""
    graphdef, state = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 1000))

    def shake(path, x):
        biases = "expert_bias" in jax.tree_util.keystr(path)
        return x if biases else x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)

    return graphdef, jax.tree_util.tree_map_with_path(shake, state)


def assert_same(a, b):
    for (path, x), (_, y) in zip(*(jax.tree_util.tree_flatten_with_path(s)[0] for s in (a, b)), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_bit_by_bit(family, tmp_path):
    config = FAMILIES[family]
    _, state = build(config)
    assert export_model(tmp_path, config, state, ByteTokenizer()) == family
    assert is_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float32")
    assert (model.family, config_to_hub(model.config)) == (family, config_to_hub(config))
    assert_same(model.state, state)
    assert model.tokenizer.encode("né").tolist() == list("né".encode())
    assert (model.tokenizer.start_id, model.tokenizer.starts_prompts) == (256, True)


def test_the_default_model_of_icml_train_has_a_family():
    assert config_to_hub(preset("tiny-moe"))["model_type"] == "qwen3_moe"
    assert config_to_hub(preset("tiny-dense"))["model_type"] == "qwen3"


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_stacked_layers_are_written_and_read_alike(family, tmp_path):
    config = FAMILIES[family]
    _, state = build(config)
    export_model(tmp_path / "a", config, state, ByteTokenizer())
    stacked = load_pretrained(tmp_path / "a", dtype="float32", scan_layers=True)
    assert stacked.config.scan_layers
    export_model(tmp_path / "b", stacked.config, stacked.state, ByteTokenizer())
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_half_precision_is_rounded_once(tmp_path):
    config = FAMILIES["llama"]
    _, state = build(config)
    export_model(tmp_path, config, state, ByteTokenizer(), dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    assert_same(load_pretrained(tmp_path, param_dtype=jnp.bfloat16).state, rounded)
    assert_same(load_pretrained(tmp_path).state, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_parameters_go_straight_to_their_places_on_a_mesh(tmp_path):
    config = FAMILIES["qwen3_moe"]
    _, state = build(config)
    export_model(tmp_path, config, state, ByteTokenizer())
    mesh = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])
    model = load_pretrained(tmp_path, mesh=mesh)
    assert_same(model.state, state)
    gate = model.state["layers"][0]["moe"]["experts"]["gate"]["kernel"][...]
    assert isinstance(gate.sharding, NamedSharding)
    assert {shard.data.shape for shard in gate.addressable_shards} == {(4, 32, 12)}


def test_memory_holds_the_model_and_one_tensor_more(tmp_path):
    config = dataclasses.replace(SMALL, width=128, num_layers=6, mlp_width=512, vocab_size=2000)
    _, state = build(config)
    export_model(tmp_path, config, state, ByteTokenizer())
    sizes = [x.nbytes for x in jax.tree.leaves(state)]
    tracemalloc.start()
    model = load_pretrained(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_same(model.state, state)
    assert peak < sum(sizes) + max(sizes) + 3_000_000


def test_a_trained_tokenizer_keeps_its_ids(tmp_path):
    ours = BPETokenizer.train(["def add(a, b):\n    return a + b\n"] * 3, vocab_size=280)
    hub = as_hub_tokenizer(ours)
    text = "def sub(a): return a <|endoftext|> é"
    assert hub.encode(text).tolist() == ours.encode(text).tolist()
    assert (hub.eos_id, hub.start_id, hub.vocab_size) == (ours.eos_id, ours.eos_id, ours.vocab_size)
    np.testing.assert_array_equal(hub.token_bytes(), ours.token_bytes())
    assert as_hub_tokenizer(hub) is hub


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"activation": "gelu"}, "activation"),
        ({"norm": "layernorm"}, "activation|positions|qkv_bias"),
        ({"out_bias": True}, "out_bias"),
        ({"num_experts": 4, "shared_expert_width": 8}, "shared_expert_width"),
        ({"num_experts": 4, "moe_gate": "sigmoid"}, "moe_gate"),
        ({"qk_norm": True, "sliding_window": 9}, "sliding_window"),
    ],
)
def test_architectures_that_no_family_has_are_refused_by_field(changes, field, tmp_path):
    config = dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match=f"^({field}): no family"):
        export_model(tmp_path / "new", config, nnx.State({}), ByteTokenizer())
    assert not (tmp_path / "new").exists()


def test_selection_biases_and_checkpoints_in_place_are_refused(tmp_path):
    config = FAMILIES["mixtral"]
    _, state = build(config)
    export_model(tmp_path, config, state, ByteTokenizer())
    before = (tmp_path / "model.safetensors").read_bytes()
    _, other = build(config, seed=5)
    with pytest.raises(ValueError, match="is not empty; overwrite=True"):
        export_model(tmp_path, config, other, ByteTokenizer())
    assert (tmp_path / "model.safetensors").read_bytes() == before
    export_model(tmp_path, config, other, ByteTokenizer(), overwrite=True)
    assert_same(load_pretrained(tmp_path).state, other)
    leftovers = ("chat_template.jinja", "special_tokens_map.json")
    for name in leftovers:
        (tmp_path / name).write_text("{}")
    export_model(tmp_path, config, other, ByteTokenizer(), overwrite=True)
    assert not any((tmp_path / name).exists() for name in leftovers)
    bias = state["layers"][0]["moe"]["expert_bias"]
    bias[...] = bias[...].at[0].set(1.0)
    with pytest.raises(ValueError, match="selection biases"):
        export_model(tmp_path / "new", config, state, ByteTokenizer())
    with pytest.raises(ValueError, match="dtype: must be one of"):
        export_model(tmp_path / "new", config, state, ByteTokenizer(), dtype="int8")


def test_folders_of_other_things_are_never_overwritten(tmp_path):
    config = FAMILIES["llama"]
    _, state = build(config)
    for name, content in (("run/checkpoints/0/x", ""), ("run/config.json", "{}"), ("notes/config.json", '{"a": 1}')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for name in ("run", "notes"):
        before = sorted(tmp_path.joinpath(name).rglob("*"))
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=r"is not empty|holds something else than a checkpoint"):
                export_model(tmp_path / name, config, state, ByteTokenizer(), overwrite=overwrite)
        assert sorted(tmp_path.joinpath(name).rglob("*")) == before


@pytest.fixture
def folder(tmp_path):
    config = FAMILIES["qwen2"]
    export_model(tmp_path, config, build(config)[1], ByteTokenizer())
    return tmp_path


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; there are llama, mistral"),
        ({"hidden_size": "absent"}, "lacks hidden_size"),
        ({"hidden_size": "32"}, "hidden_size must be of type int, got '32'"),
        ({"hidden_size": True}, "hidden_size must be of type int, got True"),
        ({"num_attention_heads": 0}, "num_heads: must be at least 1"),
        ({"hidden_size": -32}, "width: must be at least 1"),
        ({"rms_norm_eps": float("nan")}, "norm_epsilon: must be positive"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported, only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: lacks factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_factor: must be at least 1"),
        ({"num_hidden_layers": 3}, r"lacks 12 tensors, such as model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"has 12 tensors that qwen2 does not, such as model.layers.1"),
        ({"intermediate_size": 40}, r"tensor model.layers.0.mlp.down_proj.weight must have shape \(32, 40\)"),
        ({"vocab_size": 100}, "the tokenizer has 257 ids, the model only 100"),
        ({"model_type": []}, r"model_type \[\] is not supported"),
        ({"rope_theta": 10**400}, "rope_theta is too large"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000, more than any tensor"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, more than any tensor"),
        ({"intermediate_size": 10**9}, "mlp_width is 1000000000, more than any tensor"),
        ({"hidden_size": 10**30}, "width: must be at least 1 and below 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized safetensors are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1}}, "rope_attention_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "rope_factor: must be"),
    ],
)
def test_configurations_that_lie_are_refused_by_name(folder, changes, message):
    rewrite_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_tensors_that_lie_are_refused_by_name(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}
    name = "model.layers.1.mlp.down_proj.weight"

    def reload(value):
        write_checkpoint(folder, {**tensors, name: value}.items(), overwrite=True)
        return load_pretrained(folder)

    with pytest.raises(ValueError, match=f"tensor {name} has dtype int32, not floating point"):
        reload(tensors[name].astype(np.int32))
    with pytest.raises(ValueError, match=rf"tensor {name} must have shape \(32, 48\), got \(48, 32\)"):
        reload(tensors[name].T.copy())
    reload(tensors[name].astype(np.float16))
    with pytest.raises(ValueError, match=f"tensor {name} holds values too large for float32"):
        reload(np.full(tensors[name].shape, 1e300))
    with pytest.raises(ValueError, match=f"tensor {name} has dtype float8_e4m3fn, not floating point of 16 bits"):
        reload(tensors[name].astype(jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="param_dtype: must be a floating-point dtype"):
        load_pretrained(folder, param_dtype=np.int32)
    reload(tensors[name])
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(ValueError, match=r"model\.safetensors.*(NaN|finite)"):
        load_pretrained(folder)
    load_pretrained(folder, check_finite=False)


def test_paths_that_hold_no_model_say_so(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_pretrained(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no GGUF file, and no config\.json"):
        load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be hf://owner/name"):
        load_pretrained("hf://name")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object, got list"):
        load_pretrained(tmp_path)


def test_context_can_be_cut_but_not_stretched(folder):
    assert load_pretrained(folder, context_length=16).config.context_length == 16
    with pytest.raises(ValueError, match="context_length: must be between 1 and 64, got 65"):
        load_pretrained(folder, context_length=65)
    assert pretrained_config(folder) == dataclasses.replace(load_pretrained(folder).config, dtype="auto")


def test_a_shorter_context_keeps_the_rotary_scaling():
    values = config_to_hub(dataclasses.replace(SMALL, rope_scaling="yarn", rope_factor=4.0))
    config = config_from_hub(values)
    assert config.resolved_rope_scaling.original_context == 16
    assert dataclasses.replace(config, context_length=32).resolved_rope_scaling.original_context == 16


def test_what_a_file_leaves_out_is_what_transformers_assumes():
    values = config_to_hub(dataclasses.replace(SMALL, rope_scaling="yarn", rope_factor=4.0))
    del values["rope_scaling"]["original_max_position_embeddings"]
    assert config_from_hub(values).rope_original_context == 64
    sparse = config_to_hub(FAMILIES["mixtral"])
    del sparse["rope_theta"], sparse["rms_norm_eps"]
    config = config_from_hub(sparse)
    assert (config.rope_theta, config.norm_epsilon) == (1e6, 1e-5)
    windowed = config_to_hub(FAMILIES["mistral"])
    del windowed["sliding_window"]
    assert config_from_hub(windowed).sliding_window == 4096
    assert config_from_hub({**windowed, "sliding_window": None}).sliding_window is None


def test_learned_positions_can_be_cut(tmp_path):
    _, state = build(GPT2)
    export_model(tmp_path, GPT2, state, ByteTokenizer())
    model = load_pretrained(tmp_path, context_length=16)
    np.testing.assert_array_equal(
        model.state["position_embed"]["embedding"][...], state["position_embed"]["embedding"][...][:16]
    )


def test_links_and_special_files_are_refused(folder, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("secret")
    link = folder / "chat_template.jinja"
    link.symlink_to(secret)
    with pytest.raises(ValueError, match=r"chat_template\.jinja: is a link out of its folder"):
        load_pretrained(folder)
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(ValueError, match="not a regular file"):
        load_pretrained(folder)
    link.unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"no config\.json|not a regular file|link out of"):
        load_pretrained(folder)


def test_the_ids_that_end_generation_are_exported(folder, tmp_path_factory):
    (folder / "generation_config.json").write_text('{"eos_token_id": [256]}')
    model = load_pretrained(folder)
    again = tmp_path_factory.mktemp("again")
    export_model(again, model.config, model.state, model.tokenizer)
    assert load_pretrained(again).tokenizer.stop_ids == model.tokenizer.stop_ids


# GGUF files, written from our own parameters by the definition of the format.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mixtral": "llama"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "olmoe": "olmoe"}


def interleaved(kernel):
    """(width, heads, dim) with halves (i, i + dim/2) to rows for pairs (2i, 2i + 1)."""
    first, second = np.split(np.asarray(kernel), 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(kernel.shape)


def write_gguf(path, family, config, state, rope_freqs=None):
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.width,
        "feed_forward_length": config.resolved_expert_width if config.num_experts else config.resolved_mlp_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.resolved_num_kv_heads,
        "attention.key_length": config.resolved_head_dim,
    }
    if config.num_experts:
        numbers |= {"expert_count": config.num_experts, "expert_used_count": config.num_active_experts}
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_epsilon)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
    as_tokens = [*gguf_bytes(), "he", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(as_tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)

    def add(name, array):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))

    add("token_embd.weight", state["embed"]["embedding"][...])
    add("output_norm.weight", state["final_norm"]["scale"][...])
    if not config.tie_embeddings:
        add("output.weight", np.asarray(state["head"]["kernel"][...]).T)
    if rope_freqs is not None:
        add("rope_freqs.weight", rope_freqs)
    for i in range(config.num_layers):
        layer, block = state["layers"][i], f"blk.{i}."
        attention = layer["attention"]
        add(block + "attn_norm.weight", layer["attention_norm"]["scale"][...])
        add(block + "ffn_norm.weight", layer["mlp_norm"]["scale"][...])
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            kernel = np.asarray(attention[ours]["kernel"][...])
            if architecture == "llama" and theirs != "v":
                kernel = interleaved(kernel)
            add(f"{block}attn_{theirs}.weight", kernel.reshape(config.width, -1).T)
            if config.qkv_bias:
                add(f"{block}attn_{theirs}.bias", np.asarray(attention[ours]["bias"][...]).ravel())
        add(block + "attn_output.weight", np.asarray(attention["out"]["kernel"][...]).reshape(-1, config.width).T)
        if config.qk_norm:
            add(block + "attn_q_norm.weight", attention["query_norm"]["scale"][...])
            add(block + "attn_k_norm.weight", attention["key_norm"]["scale"][...])
        if config.num_experts:
            add(block + "ffn_gate_inp.weight", np.asarray(layer["moe"]["router"]["kernel"][...]).T)
        for matrix in ("gate", "up", "down"):
            if config.num_experts:
                kernel = np.asarray(layer["moe"]["experts"][matrix]["kernel"][...])
                add(f"{block}ffn_{matrix}_exps.weight", kernel.swapaxes(1, 2))
            else:
                add(f"{block}ffn_{matrix}.weight", np.asarray(layer["mlp"][matrix]["kernel"][...]).T)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_bytes():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("scan", [False, True])
def test_gguf_files_of_every_family(family, scan, tmp_path):
    config = FAMILIES[family]
    if family in ("qwen3_moe", "mixtral"):
        config = dataclasses.replace(config, moe_gate="softmax_renorm")
    if family == "olmoe":
        config = dataclasses.replace(config, moe_gate="softmax")
    graphdef, state = build(config)
    write_gguf(tmp_path / "model.gguf", family, config, state)
    assert is_pretrained(tmp_path / "model.gguf")
    model = load_pretrained(tmp_path / "model.gguf", dtype="float32", scan_layers=scan)
    assert config_to_hub(model.config) == config_to_hub(config)
    assert model.family == family
    assert model.tokenizer.encode("hé he").tolist() == [*"hé ".encode(), 256]
    if not scan:
        assert_same(model.state, state)
        return
    tokens = jnp.arange(9)[None]
    logits = [
        jax.jit(lambda s, g=g: nnx.merge(g, s).logits(nnx.merge(g, s)(tokens).hidden))(s)
        for g, s in ((graphdef, state), (model.graphdef, model.state))
    ]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


def test_the_rotary_scaling_of_llama_3_in_a_gguf_file(tmp_path):
    config = dataclasses.replace(SMALL, rope_theta=500000.0, rope_scaling="llama3", rope_factor=8.0)
    config = dataclasses.replace(config, rope_original_context=8192)
    _, state = build(config)
    plain = 500000.0 ** (-np.arange(4) / 4)
    divisors = plain / config.resolved_rope_scaling.frequencies(plain, 0.0)
    write_gguf(tmp_path / "a.gguf", "llama", config, state, rope_freqs=divisors)
    assert config_to_hub(load_pretrained(tmp_path).config) == config_to_hub(config)
    (tmp_path / "b").mkdir()
    write_gguf(tmp_path / "b" / "b.gguf", "llama", config, state, rope_freqs=divisors + np.array([0, 0.5, 0, 0]))
    with pytest.raises(ValueError, match=r"b\.gguf: rope_freqs\.weight is not the rotary scaling of Llama 3\.1"):
        load_pretrained(tmp_path / "b")
    write_gguf(tmp_path / "b.gguf", "llama", config, state)
    with pytest.raises(ValueError, match="has 2 GGUF files; name one of them"):
        load_pretrained(tmp_path)
