"""Tokenizers lose nothing, interpret nothing, and merge as byte-pair encoding is defined."""

import hashlib
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.lm.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer

DOCUMENTS = [inspect.getsource(module) for module in (inspect, json, re.Scanner, subprocess.Popen, st.integers)]
VOCAB_SIZE = 600
HARD = [
    "",
    "\n",
    "\tif x:\n\t\treturn\r\n    \n\n  y  \t z\r",
    "x" * 1000 + " " * 1000,
    "🙂👩‍👩‍👧 é é 漢字 \u202e\ufeff\u2028 \x00\x7f",
    "<|endoftext|></s><pad>[UNK]",
    "0x1234567890 1e-10 3.14159",
    "".join(map(chr, range(0x180))),
]


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(DOCUMENTS, VOCAB_SIZE)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request) -> Tokenizer:
    return ByteTokenizer() if request.param == "byte" else request.getfixturevalue("bpe")


def check_lossless(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ((ids >= 0) & (ids < tokenizer.vocab_size) & (ids != tokenizer.eos_id)).all()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


class TestBoth:
    @pytest.mark.parametrize("text", HARD)
    def test_hard_texts(self, tokenizer, text):
        check_lossless(tokenizer, text)

    def test_any_text(self, tokenizer):
        @settings(max_examples=150, deadline=None)
        @given(st.one_of(st.text(), st.text(" \t\r\n_.(:x1é", max_size=40)))
        def check(text):
            check_lossless(tokenizer, text)

        check()

    def test_batch_is_the_single_encoding(self, tokenizer):
        texts = HARD + DOCUMENTS
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert tokenizer.encode_batch([]) == []

    def test_boundary_stands_for_no_bytes(self, tokenizer):
        eos = tokenizer.eos_id
        ids = [eos, *tokenizer.encode("one").tolist(), eos, *tokenizer.encode("two").tolist(), eos]
        assert tokenizer.decode(ids) == "onetwo"
        assert tokenizer.decode([]) == ""
        assert eos == tokenizer.vocab_size - 1
        assert tokenizer.token_bytes()[eos] == 0
        assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
        assert (np.delete(tokenizer.token_bytes(), eos) >= 1).all()

    def test_cut_characters_are_replaced(self, tokenizer):
        ids = tokenizer.encode("\U0010fffd")  # four bytes that no merge joins
        assert len(ids) == 4
        assert tokenizer.decode(ids[:2]) == "�"
        assert tokenizer.decode_bytes(ids[:2]) == b"\xf4\x8f"

    def test_save_and_load(self, tokenizer, tmp_path):
        tokenizer.save(tmp_path / "run" / "tokenizer")
        loaded = load_tokenizer(tmp_path / "run" / "tokenizer")
        assert type(loaded) is type(tokenizer)
        assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
        np.testing.assert_array_equal(loaded.token_bytes(), tokenizer.token_bytes())
        for text in HARD + DOCUMENTS[:2]:
            np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))

    def test_protocol(self, tokenizer):
        assert isinstance(tokenizer, Tokenizer)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([-1], "must lie in"),
            ([0, 10_000], "must lie in .* got values from 0 to 10000"),
            ([[1, 2]], r"one dimension, got shape \(1, 2\)"),
            ([0.5], "must be integers, got float64"),
        ],
    )
    def test_bad_ids(self, tokenizer, ids, message):
        with pytest.raises(ValueError, match=message):
            tokenizer.decode(ids)

    def test_half_a_surrogate_pair(self, tokenizer):
        with pytest.raises(ValueError, match="half a surrogate pair at character 2"):
            tokenizer.encode("ab\ud800")


def pieces_of_ascii(text: str) -> list[str]:
    """The documented cuts, written for ASCII with the standard `re`."""
    end_of_line = r" ?[^\sA-Za-z0-9]*(?:\r?\n)+[ \t]*"
    word = r"[^\r\nA-Za-z0-9]?[A-Za-z]+"
    rest = r"[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    return re.findall(f"{end_of_line}|{word}|{rest}", text)


def merge_by_definition(piece: bytes, ranks: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """Byte-pair encoding: the earliest learned pair is merged, leftmost first, until none is left."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def bytes_of_sign() -> dict[str, bytes]:
    """The byte-to-sign table, read off the library rather than from our own; UTF-8 lacks C0, C1, F5 to FF."""
    from tokenizers.pre_tokenizers import ByteLevel

    level = ByteLevel(add_prefix_space=False, use_regex=False)
    table = {level.pre_tokenize_str(chr(value))[0][0]: bytes([value]) for value in range(128)}
    three_bytes = [*range(0x800, 0xD800, 0x800), 0xE000, 0xF000]
    for value in (*range(0x80, 0x800), *three_bytes, *range(0x10000, 0x110000, 0x30000)):
        signs = level.pre_tokenize_str(chr(value))[0][0]
        table.update({sign: bytes([byte]) for sign, byte in zip(signs, chr(value).encode(), strict=True)})
    return table


class TestBPE:
    def test_merges_as_defined(self, bpe, tmp_path):
        bpe.save(tmp_path)
        model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
        sign = bytes_of_sign()

        def raw(token: str) -> bytes:
            return b"".join(sign[letter] for letter in token)

        ranks = {(raw(left), raw(right)): rank for rank, (left, right) in enumerate(model["merges"])}
        ids = {raw(token): index for token, index in model["vocab"].items() if sign.keys() >= set(token)}
        assert len(ids) >= bpe.vocab_size - 1 - 13
        text = DOCUMENTS[1] + "\n0x1234567890:\n\n\t  return  _x.join(y)   \r\n+= '<|eos|>'"
        assert text.isascii()
        pieces = pieces_of_ascii(text)
        assert "".join(pieces) == text
        expected = [ids[token] for piece in pieces for token in merge_by_definition(piece.encode(), ranks)]
        assert bpe.encode(text).tolist() == expected

    def test_cuts(self):
        assert pieces_of_ascii("def f(self):\n    x = 12345\n") == [
            *("def", " f", "(self", "):\n    ", "x", " =", " ", "123", "45", "\n"),
        ]

    def test_first_merge_is_the_most_frequent_pair(self):
        # "ab" occurs 4 times, every other adjacent pair at most twice.
        tokenizer = BPETokenizer.train(["ab", "abc", "abd", "xab"], 258)
        assert [tokenizer.decode([256])] == ["ab"]
        assert tokenizer.vocab_size == 258

    def test_does_what_it_is_for(self, bpe):
        text = DOCUMENTS[0]
        assert len(bpe.encode(text)) < 0.5 * len(ByteTokenizer().encode(text))
        assert len(bpe.encode("\n        return")) <= 3

    def test_vocabulary_larger_than_the_text_supports(self):
        tokenizer = BPETokenizer.train(["aaaa"], 10_000)
        assert 257 <= tokenizer.vocab_size < 300
        check_lossless(tokenizer, "aaaa é")

    def test_sample_is_bounded_seeded_and_whole_documents(self):
        documents = [chr(ord("a") + i) * 2 + f" {chr(ord('a') + i)}{chr(ord('a') + i)}" for i in range(26)]

        def learned(**options):
            tokenizer = BPETokenizer.train(documents, 400, min_frequency=1, **options)
            return {tokenizer.decode([index]) for index in range(256, tokenizer.eos_id)}

        everything = learned(max_training_bytes=None)
        some = learned(max_training_bytes=25)  # five documents of five bytes
        assert len({word.strip()[0] for word in everything}) == 26
        assert len({word.strip()[0] for word in some}) == 5
        assert some == learned(max_training_bytes=25)
        assert some != learned(max_training_bytes=25, seed=1)

    def test_training_is_the_same_on_one_thread_in_another_process(self, bpe, tmp_path):
        (tmp_path / "documents.json").write_text(json.dumps(DOCUMENTS))
        script = (
            "import json, sys; from jaxlib_icml.lm.tokenizer import BPETokenizer; "
            "documents = json.load(open(sys.argv[1])); "
            f"BPETokenizer.train(documents, {VOCAB_SIZE}).save(sys.argv[2])"
        )
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "documents.json"), str(tmp_path / "other")],
            check=True,
            cwd=Path(__file__).parents[2],
            env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
        )
        bpe.save(tmp_path / "this")
        this, other = (
            hashlib.sha256((tmp_path / name / "tokenizer.json").read_bytes()).hexdigest() for name in ("this", "other")
        )
        assert this == other

    @pytest.mark.parametrize(
        ("documents", "options", "message"),
        [
            ([], {}, "documents is empty"),
            (["", ""], {}, "documents is empty"),
            (["a"], {"vocab_size": 256}, "vocab_size must be at least 257 .* got 256"),
            (["a"], {"min_frequency": 0}, "min_frequency must be at least 1, got 0"),
            (["a"], {"max_training_bytes": 0}, "max_training_bytes must be positive or None, got 0"),
            (["\udfff"], {}, "half a surrogate pair"),
        ],
    )
    def test_bad_training_input(self, documents, options, message):
        with pytest.raises(ValueError, match=message):
            BPETokenizer.train(documents, **{"vocab_size": 300, **options})

    def test_missing_package_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"):
            BPETokenizer.train(["text"], 300)


def set_at(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


class TestUntrustedFiles:
    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (["normalizer"], {"type": "Lowercase"}, "normalizer must be absent"),
            (["truncation"], {"max_length": 3}, "truncation must be absent"),
            (["padding"], {"strategy": "BatchLongest"}, "padding must be absent"),
            (["added_tokens"], [{"id": 0, "content": "<|endoftext|>"}], "added_tokens must be absent"),
            (["model", "type"], "WordPiece", "model must be of type BPE"),
            (["model"], 3, "model must be of type BPE"),
            (["model", "dropout"], 0.1, "model.dropout must be absent"),
            (["model", "vocab", "a"], 999_999, "without gaps"),
            (["model", "vocab", "a"], "0", "without gaps"),
            (["model", "vocab"], {"a": 0}, "lacks 255 of the 256 byte tokens"),
            (["model", "vocab", "漢"], VOCAB_SIZE - 1, "a token not made of bytes"),
            (["model", "merges"], [["a", "missing"]], "not a usable tokenizer"),
            (["pre_tokenizer"], None, "bad pre_tokenizer"),
            (["pre_tokenizer"], {"type": "Whitespace"}, "must end in ByteLevel"),
            (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "isolating Split"),
            (["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True, "without add_prefix_space"),
        ],
    )
    def test_model_that_would_change_text(self, bpe, tmp_path, path, value, message):
        bpe.save(tmp_path)
        data = json.loads((tmp_path / "tokenizer.json").read_text())
        set_at(data, path, value)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("info", "message"),
        [
            ("{", "not valid JSON"),
            ("[]", "expected a JSON object, got list"),
            ('{"kind": "word"}', "kind must be 'byte', 'bpe' or 'hub', got 'word'"),
            (
                '{"kind": "byte", "vocab_size": 300, "eos_id": 256}',
                "vocab_size is 300 but the tokenizer has 257",
            ),
            ('{"kind": "byte", "vocab_size": 257, "eos_id": 0}', "eos_id is 0 but the tokenizer has 256"),
            ('{"kind": "bpe", "vocab_size": 257, "eos_id": 256}', "tokenizer.json: cannot be read"),
        ],
    )
    def test_bad_info(self, tmp_path, info, message):
        (tmp_path / "tokenizer_info.json").write_text(info)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer_info.json: cannot be read: No such file"):
            load_tokenizer(tmp_path / "missing")

    def test_not_text(self, tmp_path):
        (tmp_path / "tokenizer_info.json").write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match="not UTF-8 text"):
            load_tokenizer(tmp_path)
