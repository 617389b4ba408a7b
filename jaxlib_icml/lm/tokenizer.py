"""Tokenizers: plain bytes, and byte-level byte-pair encoding trained on the corpus at hand.

Both are lossless for every text, know exactly one special id (the document boundary ``eos_id``) and never
read it from text: a document that contains "<|endoftext|>" is that document, not a command.
"""

import collections
import functools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "load_tokenizer"]

_INFO_FILE = "tokenizer_info.json"
_MODEL_FILE = "tokenizer.json"
_MAX_FILE_BYTES = 1 << 28
_NUM_BYTES = 256

# How text is cut before pairs are merged; a token never crosses a cut. Suited to source code: the end of a
# line (closing punctuation, line breaks, the next line's indentation) is one piece, as is a word with the one
# sign before it (" self", "_name", ".join"); digits come in groups of at most three, so that long tables do
# not fill the vocabulary.
_PIECES = "|".join(
    (
        r" ?[^\s\p{L}\p{N}]*(?:\r?\n)+[ \t]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline and generation need of a tokenizer; ids are ``0 .. vocab_size - 1``."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, ``eos_id`` included."""
        ...

    @property
    def eos_id(self) -> int:
        """The document boundary: precedes the first token of a document and follows its last."""
        ...

    @property
    def start_id(self) -> int:
        """What precedes the first token of a document; ``eos_id`` unless the model has a token of its own for it."""
        ...

    @property
    def starts_prompts(self) -> bool:
        """Whether the model saw ``start_id`` in front of every text, so that prompts need it too."""
        ...

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Ids of the text, without ``eos_id``."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts, in parallel where the implementation can."""
        ...

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that the ids stand for; ``eos_id`` stands for none."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        ...

    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """Byte length of each id, 0 for ``eos_id``: what bits per byte divides by."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files that `load_tokenizer` reads, creating the folder."""
        ...


class ByteTokenizer:
    """The 256 byte values and a document boundary: 257 ids, nothing to train.

    Example:
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("né").tolist()
      [110, 195, 169]
      >>> tokenizer.decode([110, 195, 169, tokenizer.eos_id])
      'né'
    """

    @property
    def vocab_size(self) -> int:
        """257."""
        return _NUM_BYTES + 1

    @property
    def eos_id(self) -> int:
        """256."""
        return _NUM_BYTES

    @property
    def start_id(self) -> int:
        """``eos_id``."""
        return self.eos_id

    @property
    def starts_prompts(self) -> bool:
        """True."""
        return True

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """UTF-8 bytes of the text."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The bytes, without document boundaries."""
        checked = _check_ids(ids, self.vocab_size)
        return checked[checked != self.eos_id].astype(np.uint8).tobytes()

    def decode(self, ids: ArrayLike) -> str:
        """The text, with U+FFFD for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """One for every byte, zero for the boundary."""
        lengths = np.ones(self.vocab_size, np.int32)
        lengths[self.eos_id] = 0
        return lengths

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer_info.json``."""
        _write_info(folder, {"kind": "byte", "vocab_size": self.vocab_size, "eos_id": self.eos_id})


class BPETokenizer:
    """Byte-level byte-pair encoding (the `tokenizers` library), trained on the documents it will read.

    The last id is the document boundary; it is not part of the library's vocabulary, so no text can produce
    it.

    Args:
      model_json: a ``tokenizer.json`` of a byte-level BPE without normaliser, added tokens, truncation or
        padding.

    Raises:
      ValueError: if the JSON is not such a tokenizer, hence might lose or reinterpret text.
      ImportError: without the extra ``jaxlib-icml[lm]``.

    Example:
      >>> tokenizer = BPETokenizer.train(["def add(a, b):\\n    return a + b\\n"] * 3, vocab_size=280)
      >>> tokenizer.decode(tokenizer.encode("return b 🙂"))
      'return b 🙂'
    """

    def __init__(self, model_json: str) -> None:
        library = _tokenizers()
        vocab = _check_model(model_json)
        try:
            self._model = library.Tokenizer.from_str(model_json)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{_MODEL_FILE}: not a usable tokenizer: {error}") from error
        byte_of = {sign: value for value, sign in enumerate(byte_alphabet())}
        self._pieces = [bytes(byte_of[sign] for sign in token) for token in vocab] + [b""]

    @classmethod
    def train(
        cls,
        documents: Sequence[str],
        vocab_size: int,
        *,
        max_training_bytes: int | None = 32_000_000,
        min_frequency: int = 2,
        seed: int = 0,
    ) -> "BPETokenizer":
        """Learns merges from documents; the same documents and arguments give the same tokenizer.

        Args:
          documents: texts, the training part of a corpus.
          vocab_size: ids wanted, at least 257 (bytes and the document boundary). Small corpora run out of
            repeated pairs earlier: read the attribute ``vocab_size`` of the result.
          max_training_bytes: learn from a random subset of whole documents of about this many bytes (never
            fewer than one); None uses all. Ten megabytes take a few seconds.
          min_frequency: pairs seen less often are not merged.
          seed: chooses the subset.

        Returns:
          The trained tokenizer.

        Raises:
          ValueError: too small a vocabulary, no text, or a number out of range.
        """
        if vocab_size < _NUM_BYTES + 1:
            raise ValueError(f"vocab_size must be at least {_NUM_BYTES + 1} (all bytes and eos), got {vocab_size}")
        if min_frequency < 1:
            raise ValueError(f"min_frequency must be at least 1, got {min_frequency}")
        if max_training_bytes is not None and max_training_bytes < 1:
            raise ValueError(f"max_training_bytes must be positive or None, got {max_training_bytes}")
        if not any(documents):
            raise ValueError("documents is empty: a tokenizer needs text to learn from")
        library = _tokenizers()
        model = library.Tokenizer(library.models.BPE())
        model.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.Split(library.Regex(_PIECES), behavior="isolated"),
                library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        model.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=min_frequency,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        sample = _sample(documents, max_training_bytes, seed)
        model.train_from_iterator(sample, trainer, length=len(sample))
        return cls(model.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of ids: bytes, merges and the document boundary."""
        return len(self._pieces)

    @property
    def eos_id(self) -> int:
        """The last id."""
        return len(self._pieces) - 1

    @property
    def start_id(self) -> int:
        """``eos_id``."""
        return self.eos_id

    @property
    def starts_prompts(self) -> bool:
        """True."""
        return True

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Ids of the text, without ``eos_id``."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text; the library uses all cores."""
        for text in texts:
            _utf8(text)
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that the ids stand for."""
        return b"".join([self._pieces[index] for index in _check_ids(ids, self.vocab_size).tolist()])

    def decode(self, ids: ArrayLike) -> str:
        """The text, with U+FFFD where a character was cut."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """Byte length of each id, 0 for ``eos_id``."""
        return np.array([len(piece) for piece in self._pieces], np.int32)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json`` (readable by the `tokenizers` library) and ``tokenizer_info.json``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, _MODEL_FILE).write_text(self._model.to_str(), encoding="utf-8")
        _write_info(folder, {"kind": "bpe", "vocab_size": self.vocab_size, "eos_id": self.eos_id})


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Reads what ``save`` wrote; the files are checked, not trusted.

    Args:
      folder: the folder given to ``save``.

    Returns:
      The tokenizer, with the same ids.

    Raises:
      ValueError: a file is missing, too large, not JSON, of an unknown kind, or does not fit the others.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> ByteTokenizer().save(folder)
      >>> load_tokenizer(folder).vocab_size
      257
    """
    info = _parse_json(_read(Path(folder, _INFO_FILE)), str(Path(folder, _INFO_FILE)))
    kind = info.get("kind")
    tokenizer: Tokenizer
    if kind == "byte":
        tokenizer = ByteTokenizer()
    elif kind == "bpe":
        tokenizer = BPETokenizer(_read(Path(folder, _MODEL_FILE)))
    elif kind == "hub":
        from jaxlib_icml.lm.hub_tokenizer import HubTokenizer

        stop_ids = info.get("stop_ids")
        if not isinstance(stop_ids, list) or not all(type(index) is int for index in stop_ids):
            raise ValueError(f"{Path(folder, _INFO_FILE)}: stop_ids must be a list of ids, got {str(stop_ids)[:80]}")
        tokenizer = HubTokenizer.from_folder(folder, stop_ids=stop_ids)
    else:
        raise ValueError(f"{Path(folder, _INFO_FILE)}: kind must be 'byte', 'bpe' or 'hub', got {kind!r}")
    for name in ("vocab_size", "eos_id"):
        if info.get(name) != getattr(tokenizer, name):
            raise ValueError(
                f"{Path(folder, _INFO_FILE)}: {name} is {info.get(name)!r} but the tokenizer "
                f"has {getattr(tokenizer, name)}"
            )
    return tokenizer


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError("byte-pair encoding needs the package tokenizers: pip install 'jaxlib-icml[lm]'") from error
    return tokenizers


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable sign by which byte-level BPE files write each byte value (the convention of GPT-2).

    Printable Latin-1 signs stand for themselves; the other bytes take the code points from 256 on, in order.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return tuple(chr(value if value in printable else next(others)) for value in range(_NUM_BYTES))


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds half a surrogate pair at character {error.start}") from error


def _check_ids(ids: ArrayLike, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got shape {array.shape}")
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"ids must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"ids must lie in [0, {vocab_size}), got values from {low} to {high}")
    return array


def _sample(documents: Sequence[str], max_bytes: int | None, seed: int) -> list[str]:
    if max_bytes is None:
        return list(documents)
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    total = 0
    for index in order:
        if total >= max_bytes:
            break
        chosen.append(index)
        total += len(_utf8(documents[index]))
    return [documents[index] for index in sorted(chosen)]


def _check_model(model_json: str) -> list[str]:
    """Tokens by id, after checking that this is a byte-level BPE that neither loses nor reinterprets text."""
    data = _parse_json(model_json, _MODEL_FILE)

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{_MODEL_FILE}: {what}")

    for name in ("normalizer", "post_processor", "truncation", "padding", "added_tokens"):
        require(not data.get(name), f"{name} must be absent: it would change or reinterpret text")
    model = data.get("model")
    require(isinstance(model, dict) and model.get("type") == "BPE", "model must be of type BPE")
    assert isinstance(model, dict)
    for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        require(not model.get(name), f"model.{name} must be absent")

    steps = data.get("pre_tokenizer")
    if isinstance(steps, dict) and steps.get("type") == "Sequence":
        steps = steps.get("pretokenizers")
    steps = [steps] if isinstance(steps, dict) else steps
    require(isinstance(steps, list) and all(isinstance(step, dict) for step in steps), "bad pre_tokenizer")
    assert isinstance(steps, list)
    for step in steps[:-1]:
        require(
            step.get("type") == "Split" and step.get("behavior") == "Isolated",
            "pre_tokenizer may hold isolating Split steps only, before ByteLevel",
        )
    require(
        bool(steps) and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space"),
        "pre_tokenizer must end in ByteLevel without add_prefix_space",
    )

    vocab = model.get("vocab")
    require(isinstance(vocab, dict) and bool(vocab), "model.vocab must be an object")
    assert isinstance(vocab, dict)
    ids = list(vocab.values())
    require(
        all(type(index) is int for index in ids) and sorted(ids) == list(range(len(ids))),
        "model.vocab must number its tokens 0, 1, 2, ... without gaps",
    )
    alphabet = frozenset(byte_alphabet())
    missing = alphabet - vocab.keys()
    require(not missing, f"model.vocab lacks {len(missing)} of the 256 byte tokens")
    require(
        all(token and alphabet.issuperset(token) for token in vocab),
        "model.vocab holds a token not made of bytes",
    )
    return sorted(vocab, key=vocab.__getitem__)


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError(f"{path}: not a regular file")
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size} bytes is too large for a tokenizer file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error


def _parse_json(text: str, where: str, *, unique_keys: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_unique_object if unique_keys else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        repeated = counts.most_common(1)[0][0]
        raise ValueError(f"the key {repeated[:80]!r} appears twice")
    return data


def _write_info(folder: str | os.PathLike[str], info: dict[str, Any]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, _INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
