"""From an untrusted ``tokenizer.json`` to an encoder that neither loses text nor takes it for a command.

The encoder of plain text is a copy of the file's model with three changes, which leave the ids of honest text
as they are: control tokens are renamed to strings that no text can spell, merges that would make or use one
(or write a byte token such as "<0x0A>" letter by letter) are gone, and so are truncation, padding and
post-processing.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib_icml.lm.tokenizer import byte_alphabet

__all__ = ["PlainModel", "read_model"]

_MAX_ID = 1 << 21
_MAX_PATTERN = 10_000
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_CONTROL_LIKE = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)
# Bytes that UTF-8 never uses, which a vocabulary may therefore lack.
_NOT_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_LOSSLESS_SPLITS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


@dataclass(frozen=True)
class PlainModel:
    """A checked tokenizer model.

    Attributes:
      pieces: the bytes that each id stands for.
      control: control tokens, which text never produces.
      markup_tokens: what a chat template may write as one token: the control tokens, and all other added
        tokens but runs of white space.
      strips: for markup tokens that swallow white space of the markup around them: (before, after).
      adds_space: whether a space is put in front of a text.
      prefix_at_start_only: whether only the very first stretch of a text gets that space.
      missing_bytes: bytes of UTF-8 that the vocabulary cannot write.
      has_text_tokens: whether added tokens other than control tokens and white space exist.
    """

    pieces: list[bytes]
    control: dict[str, int]
    markup_tokens: dict[str, int]
    strips: dict[str, tuple[bool, bool]]
    adds_space: bool
    prefix_at_start_only: bool
    missing_bytes: frozenset[int]
    has_text_tokens: bool
    _byte_level: bool
    _hidden: frozenset[str]
    _data: dict[str, Any]
    _vocab: dict[str, int]
    _merges: list[tuple[str, str]]
    _text_tokens: dict[str, dict[str, Any]]

    def encoder_json(self, *, strict: bool, start: bool) -> dict[str, Any]:
        """A ``tokenizer.json`` that encodes plain text.

        Args:
          strict: leave out added tokens other than runs of white space.
          start: the text begins here, as opposed to following a control token.

        Returns:
          The content of the file.
        """
        kept = {text: entry for text, entry in self._text_tokens.items() if not strict or text.isspace()}
        hidden = self._hidden | (self._text_tokens.keys() - kept.keys())
        vocab = {f" hidden {index}" if text in hidden else text: index for text, index in self._vocab.items()}
        # The library numbers added tokens itself unless the model knows them.
        vocab |= {text: entry["id"] for text, entry in kept.items()}
        unreachable = set(hidden)
        if not self._byte_level:
            unreachable |= {text for text in self._vocab if _BYTE_TOKEN.fullmatch(text)}
        merges = [
            [left, right]
            for left, right in self._merges
            if left + right not in unreachable and left not in hidden and right not in hidden
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": not self._byte_level,
            "ignore_merges": bool(self._data["model"].get("ignore_merges")),
            "vocab": vocab,
            "merges": merges,
        }
        pre_tokenizer = self._data.get("pre_tokenizer")
        if not start:
            pre_tokenizer = _without_prefix(pre_tokenizer)
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [entry | {"special": False} for entry in kept.values()],
            "normalizer": self._data.get("normalizer"),
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None,
            "decoder": None,
            "model": model,
        }


def read_model(data: dict[str, Any], source: str, named: Sequence[str], ids: Sequence[int]) -> PlainModel:
    """Checks a ``tokenizer.json``.

    Args:
      data: its content.
      source: its name, for errors.
      named: texts that the configuration calls special.
      ids: ids that the configuration calls special.

    Returns:
      The model.

    Raises:
      ValueError: it is not a byte-pair encoding, is malformed, or might lose or reinterpret text.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{source}: {what}")

    model = data.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{source}: model must be an object")
    kind = model.get("type", "BPE" if "merges" in model else None)
    require(kind == "BPE", f"model must be a byte-pair encoding (type 'BPE'), got {str(kind)[:40]!r}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        require(not model.get(name), f"model.{name} must be absent: it would change the text")
    vocab = _vocabulary(model.get("vocab"), source)
    merges = _merges(model.get("merges"), vocab, source)
    added = _added_tokens(data.get("added_tokens"), vocab, source)

    by_id = {index: text for text, index in vocab.items()} | {entry["id"]: text for text, entry in added.items()}
    control_texts = {
        *(text for text, entry in added.items() if entry["special"] or _CONTROL_LIKE.fullmatch(text)),
        *(text for text in named if text in added or (text in vocab and len(text) > 1)),
        *(by_id[index] for index in ids if index in by_id),
    }
    control = {text: added[text]["id"] if text in added else vocab[text] for text in sorted(control_texts)}
    control = dict(sorted(control.items(), key=lambda item: item[1]))
    markup = control | {text: entry["id"] for text, entry in added.items() if not text.isspace()}
    # A token that swallows the white space around it would lose text: only markup may hold it.
    text_tokens = {
        text: entry
        for text, entry in added.items()
        if text not in control and not entry["lstrip"] and not entry["rstrip"]
    }
    hidden = frozenset(markup.keys() - text_tokens.keys())

    steps = _steps(data.get("pre_tokenizer"), "pretokenizers", f"{source}: pre_tokenizer")
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    normalizers = _steps(data.get("normalizer"), "normalizers", f"{source}: normalizer")
    if byte_level:
        require(
            all(step.get("type") == "NFC" for step in normalizers),
            "normalizer may only be NFC for a byte-level model: others change the text",
        )
        _check_byte_level(steps, source)
        alphabet = byte_alphabet()
        clash = next((text for text in hidden if text in alphabet), None)
        require(clash is None, f"the special token {clash!r} is one of the 256 byte tokens")
        missing = frozenset(byte for byte, sign in enumerate(alphabet) if sign not in vocab) - _NOT_UTF8
        adds_space = start_only = False
    else:
        adds_space, start_only = _check_sentencepiece(normalizers, steps, source)
        require(bool(model.get("byte_fallback")), "neither byte-level nor byte_fallback: it would lose characters")
        require(not model.get("ignore_merges"), "ignore_merges is only supported for byte-level models")
        absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
        require(not absent, f"model.vocab lacks {len(absent)} of the 256 byte tokens, among them {absent[:1]}")
        clash = next((text for text in hidden if _BYTE_TOKEN.fullmatch(text)), None)
        require(clash is None, f"the special token {clash!r} is one of the 256 byte tokens")
        missing = frozenset()
    clash = next((text for text in vocab if text.startswith(" hidden ")), None)
    require(clash is None, f"model.vocab holds the token {clash!r}")

    pieces = [b""] * (max(by_id) + 1)
    for text, index in vocab.items():
        pieces[index] = _signed_bytes(text) if byte_level and text not in added else _token_bytes(text, byte_level)
    for text, entry in added.items():
        pieces[entry["id"]] = _token_bytes(text, byte_level)
    for index in control.values():
        pieces[index] = b""
    return PlainModel(
        pieces=pieces,
        control=control,
        markup_tokens=markup,
        strips={text: (added[text]["lstrip"], added[text]["rstrip"]) for text in markup if text in added},
        adds_space=adds_space,
        prefix_at_start_only=start_only,
        missing_bytes=missing,
        has_text_tokens=any(not text.isspace() for text in text_tokens),
        _byte_level=byte_level,
        _hidden=hidden,
        _data=data,
        _vocab=vocab,
        _merges=merges,
        _text_tokens=text_tokens,
    )


def _vocabulary(vocab: Any, source: str) -> dict[str, int]:
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{source}: model.vocab must be an object that maps tokens to ids")
    for text, index in vocab.items():
        _check_entry(text, index, f"{source}: model.vocab")
    if len(set(vocab.values())) != len(vocab):
        seen: dict[int, str] = {}
        for text, index in vocab.items():
            if index in seen:
                raise ValueError(f"{source}: model.vocab gives id {index} to both {seen[index]!r} and {text!r}")
            seen[index] = text
    return vocab


def _check_entry(text: Any, index: Any, where: str) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: a token must be a non-empty string, got {str(text)[:40]!r}")
    if type(index) is not int or not 0 <= index < _MAX_ID:
        raise ValueError(f"{where}: the id of {text[:40]!r} must lie in [0, {_MAX_ID}), got {str(index)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the token with id {index} holds half a surrogate pair") from error


def _merges(merges: Any, vocab: dict[str, int], source: str) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise ValueError(f"{source}: model.merges must be a list")
    pairs: list[tuple[str, str]] = []
    for position, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not str:
            raise ValueError(f"{source}: model.merges[{position}] must be a pair of tokens, got {str(merge)[:80]!r}")
        left, right = parts
        if left not in vocab or right not in vocab or left + right not in vocab:
            text = next(text for text in (left, right, left + right) if text not in vocab)
            raise ValueError(f"{source}: model.merges[{position}] needs {text[:80]!r}, which is not in model.vocab")
        pairs.append((left, right))
    return pairs


def _added_tokens(added: Any, vocab: dict[str, int], source: str) -> dict[str, dict[str, Any]]:
    entries = [] if added is None else added
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{source}: added_tokens must be a list of objects")
    by_id = {index: text for text, index in vocab.items()}
    tokens: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        where = f"{source}: added_tokens[{position}]"
        text, index = entry.get("content"), entry.get("id")
        _check_entry(text, index, where)
        if text in tokens or vocab.get(text, index) != index or by_id.get(index, text) != text:
            other = tokens[text]["id"] if text in tokens else vocab.get(text, index)
            raise ValueError(
                f"{where}: {text[:40]!r} with id {index} contradicts {by_id.get(index, text)[:40]!r} with id {other}"
            )
        flags = {name: entry.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
        flags["normalized"] = entry.get("normalized", not flags["special"])
        for name, flag in flags.items():
            if type(flag) is not bool:
                raise ValueError(f"{where}: {name} must be true or false, got {str(flag)[:40]!r}")
        tokens[text] = {"id": index, "content": text, **flags}
        by_id[index] = text
    return tokens


def _steps(step: Any, key: str, where: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, nested sequences flattened."""
    if step is None:
        return []
    if not isinstance(step, dict):
        raise ValueError(f"{where} must be an object")
    if step.get("type") != "Sequence":
        return [step]
    children = step.get(key)
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise ValueError(f"{where}: {key} must be a list of objects")
    if any(child.get("type") == "Sequence" for child in children):
        raise ValueError(f"{where}: sequences within a sequence are not supported")
    return children


def _check_split(step: dict[str, Any], source: str) -> None:
    kind = step.get("type")
    pattern = step.get("pattern", "")
    text = next(iter(pattern.values()), "") if isinstance(pattern, dict) else pattern
    lossless = {
        "Split": step.get("behavior") in _LOSSLESS_SPLITS,
        "Punctuation": step.get("behavior", "Isolated") in _LOSSLESS_SPLITS,
        "Digits": True,
    }
    if not lossless.get(str(kind), False):
        raise ValueError(
            f"{source}: pre_tokenizer may cut text by Split, Digits or Punctuation, without removing any, "
            f"got {str(kind)[:40]!r} with behavior {str(step.get('behavior'))[:40]!r}"
        )
    if not isinstance(text, str) or len(text) > _MAX_PATTERN:
        raise ValueError(f"{source}: pre_tokenizer: a pattern must be a string of at most {_MAX_PATTERN} characters")


def _check_byte_level(steps: list[dict[str, Any]], source: str) -> None:
    for step in steps[:-1]:
        _check_split(step, source)
    if steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True) is not False:
        raise ValueError(f"{source}: pre_tokenizer must end in ByteLevel with add_prefix_space false")


def _check_sentencepiece(
    normalizers: list[dict[str, Any]], steps: list[dict[str, Any]], source: str
) -> tuple[bool, bool]:
    """Whether a space is put in front of texts, and whether of a whole text only."""
    prepends = False
    for position, step in enumerate(normalizers):
        if step.get("type") == "Prepend" and step.get("prepend") == "▁" and position == 0:
            prepends = True
        elif not (
            step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁"
        ):
            raise ValueError(
                f"{source}: normalizer may only put '▁' in front and for spaces, got {str(step.get('type'))[:40]!r}"
            )
    scheme = "never"
    for step in steps:
        if step.get("type") != "Metaspace":
            _check_split(step, source)
            continue
        if step.get("replacement", "▁") != "▁":
            raise ValueError(f"{source}: pre_tokenizer: Metaspace must replace spaces by '▁'")
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if scheme not in ("always", "first", "never"):
            raise ValueError(f"{source}: pre_tokenizer: unknown prepend_scheme {str(scheme)[:40]!r}")
    return prepends or scheme != "never", scheme == "first" and not prepends


def _without_prefix(pre_tokenizer: Any) -> Any:
    if pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
        return pre_tokenizer | {"pretokenizers": [_without_prefix(step) for step in steps]}
    if pre_tokenizer.get("type") != "Metaspace":
        return pre_tokenizer
    kept = {name: value for name, value in pre_tokenizer.items() if name != "add_prefix_space"}
    return kept | {"prepend_scheme": "never"}


@functools.cache
def _sign_table() -> dict[int, int]:
    """From the signs of bytes to characters of the same number, and from other such characters to none."""
    return dict.fromkeys(range(256), 0xFFFF) | {ord(sign): byte for byte, sign in enumerate(byte_alphabet())}


def _signed_bytes(text: str) -> bytes:
    """The bytes of a token that is written in signs; a token with other characters is written as it is."""
    try:
        return text.translate(_sign_table()).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _token_bytes(text: str, byte_level: bool) -> bytes:
    if byte_level:
        return text.encode()
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
