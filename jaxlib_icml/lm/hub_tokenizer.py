"""The tokenizers of published language models, read from files that nobody vouches for.

`HubTokenizer` runs the byte-pair encodings of Hugging Face's ``tokenizer.json`` in both of their styles:

- byte-level (GPT-2, Llama 3, Qwen, SmolLM, OLMoE): every token stands for bytes of the text;
- SentencePiece (Llama 2, Mistral, Mixtral): "▁" stands for a space, characters outside the vocabulary are
  written as bytes, and most models see one space more at the start of a text.

Text is never read as a command. Control tokens (beginning and end of text, turns of a chat) are taken out of
the encoder altogether: their ids come from `HubTokenizer.special_id` and from the markup of a chat template,
whatever a text says and whatever merges a file contains.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from jaxlib_icml.lm.hub_files import TokenizerFiles, read_folder, read_gguf
from jaxlib_icml.lm.hub_model import PlainModel, read_model
from jaxlib_icml.lm.tokenizer import _check_ids, _tokenizers, _utf8, _write_info

__all__ = ["HubTokenizer", "Piece"]

# What published models write at the end of a turn or a text; those that a tokenizer has end generation.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|eot|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Piece(NamedTuple):
    """A stretch of text and how far it is trusted.

    Attributes:
      text: the characters.
      kind: "markup" may hold control tokens; "text" is read as `HubTokenizer.encode` reads it; "quoted" is read
        without any added token but runs of white space, not even those like "<tool_call>" that files do not
        call special.
    """

    text: str
    kind: Literal["markup", "text", "quoted"]


class HubTokenizer:
    """A published model's tokenizer; satisfies `jaxlib_icml.lm.tokenizer.Tokenizer`.

    ``encode`` gives the ids of ``transformers``' ``encode(text, add_special_tokens=False,
    split_special_tokens=True)``. Qwen and OLMoE compose characters first (NFC); SentencePiece styles put a space
    in front of a text, do not tell "▁" from a space and, in the newer "Metaspace" layout, do not tell a text that
    starts with a space from the same text without. All else decodes to the bytes that were encoded.

    Args:
      files: what `read_folder` or `read_gguf` found; use `from_folder` and `from_gguf`.

    Raises:
      ValueError: the model is not a byte-pair encoding, might lose text, or its parts contradict one another.
      ImportError: without the extra ``jaxlib-icml[lm]``.

    Example:
      >>> tokens = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 324)), "he"]
      >>> tokenizer = HubTokenizer.from_gguf({
      ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 257,
      ...     "tokenizer.ggml.tokens": [*tokens, "<|end|>"], "tokenizer.ggml.merges": ["h e"],
      ...     "tokenizer.ggml.token_type": [1] * 257 + [3]})
      >>> len(tokenizer.encode("the<|end|>")), tokenizer.special_id("<|end|>")
      (9, 257)
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        named = [files.names[name] for name in _NAMES[:3] if name in files.names]
        by_id = [index for index in (*files.eos_ids, files.bos_id) if index is not None]
        self._model: PlainModel = read_model(files.data, files.source, [*named, *files.control_tokens], by_id)
        control = self._model.control
        self._encoders: dict[tuple[bool, bool], Any] = {}
        self._markup = _alternatives(self._model.markup_tokens)
        # A broken file is reported when it is read, not at the first text.
        self._encoder(strict=False, start=True)

        self._bos_id = files.bos_id
        if "bos_token" in files.names:
            self._bos_id = self._named_id("bos_token")
        eos = [self._named_id("eos_token")] if "eos_token" in files.names else []
        ends = dict.fromkeys([*eos, *files.eos_ids])
        if not ends:
            raise ValueError(
                f"{files.source}: no end-of-text token: neither eos_token in tokenizer_config.json nor eos_token_id"
            )
        for index in (*ends, *([] if self._bos_id is None else [self._bos_id])):
            if index not in control.values():
                raise ValueError(f"{files.source}: id {index} is given as a special token, but no such token exists")
        self._eos_id = next(iter(ends))
        self._stop_ids = tuple(dict.fromkeys([*ends, *(control[text] for text in _ENDS if text in control)]))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], *, stop_ids: Sequence[int] | None = None) -> "HubTokenizer":
        """Reads a published model's folder.

        Args:
          folder: holds ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``) and, where present,
            ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json``, ``config.json``
            and ``chat_template.jinja``.
          stop_ids: the ids that end generation, instead of those that the files name.

        Returns:
          The tokenizer.

        Raises:
          ValueError: a file is missing, malformed or unsafe; the message names it.
        """
        tokenizer = cls(read_folder(folder))
        if stop_ids is not None:
            if not set(stop_ids) <= set(tokenizer._model.control.values()):
                raise ValueError(f"{os.fspath(folder)}: stop_ids must be ids of special tokens, got {stop_ids!r}")
            tokenizer._stop_ids = tuple(stop_ids)
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "HubTokenizer":
        """Reads the tokenizer in a GGUF file's metadata.

        Args:
          metadata: the keys ``tokenizer.ggml.*`` and ``tokenizer.chat_template`` with Python or NumPy values.

        Returns:
          The tokenizer.

        Raises:
          ValueError: a key is missing or malformed, or a kind of tokenizer is not known; the message names it.
        """
        return cls(read_gguf(metadata))

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, special tokens included; a model's embedding may have more rows."""
        return len(self._model.pieces)

    @property
    def eos_id(self) -> int:
        """The document boundary: the configuration's ``eos_token``."""
        return self._eos_id

    @property
    def bos_id(self) -> int | None:
        """The beginning of a text, for models that have one; `encode` never adds it."""
        return self._bos_id

    @property
    def adds_bos(self) -> bool:
        """Whether the model was trained with `bos_id` in front of every text."""
        return self._files.adds_bos and self._bos_id is not None

    @property
    def start_id(self) -> int:
        """`bos_id` where the model wants it in front of every text, else `eos_id`."""
        return self._eos_id if self._bos_id is None or not self._files.adds_bos else self._bos_id

    @property
    def starts_prompts(self) -> bool:
        """`adds_bos`."""
        return self.adds_bos

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """All ids that end a turn or a text, `eos_id` first."""
        return self._stop_ids

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template, untrusted: see `jaxlib_icml.lm.chat.render_chat`."""
        return self._files.chat_template

    @property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens, which no text can produce."""
        return dict(self._model.control)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Texts of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, as far as known."""
        names = dict(self._files.names)
        texts = {index: text for text, index in self._model.control.items()}
        names.setdefault("eos_token", texts[self._eos_id])
        if self._bos_id is not None:
            names.setdefault("bos_token", texts[self._bos_id])
        return names

    def special_id(self, text: str) -> int:
        """The id of a control token or another added token.

        Args:
          text: for example "<|im_end|>".

        Returns:
          The id.

        Raises:
          ValueError: there is no such token.
        """
        index = self._model.markup_tokens.get(text)
        if index is None:
            known = ", ".join(list(self._model.markup_tokens)[:20])
            raise ValueError(f"text {text[:80]!r} is not a special token; special tokens are {known}")
        return index

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Ids of the text; special tokens, of which none are added, are read as plain text.

        Args:
          text: any text.

        Returns:
          The ids.

        Raises:
          ValueError: half a surrogate pair, or a byte that the vocabulary lacks.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts; the library uses all cores."""
        return self._encode(list(texts), strict=False, start=True)

    def encode_pieces(self, pieces: Iterable[Piece]) -> Int32[np.ndarray, " tokens"]:
        """Ids of a text put together from markup and foreign text.

        Only markup is searched for control tokens. What lies between two of them is encoded as one stretch, as
        the models saw it in training, by an encoder that has no control tokens.

        Args:
          pieces: stretches of the text in order.

        Returns:
          The ids.

        Raises:
          ValueError: as for `encode`.
        """
        stretches: list[list[Piece]] = [[]]
        tokens: list[int] = []  # tokens[i] stands between stretches[i] and stretches[i + 1]
        for piece in pieces:
            if piece.kind != "markup":
                stretches[-1].append(piece)
                continue
            position = 0
            while match := self._markup.search(piece.text, position):
                before, after = self._model.strips.get(match[0], (False, False))
                text = piece.text[position : match.start()]
                stretches[-1].append(Piece(text.rstrip() if before else text, "text"))
                tokens.append(self._model.markup_tokens[match[0]])
                stretches.append([])
                position = match.end()
                while after and piece.text[position : position + 1].isspace():
                    position += 1
            stretches[-1].append(Piece(piece.text[position:], "text"))

        texts = ["".join(piece.text for piece in stretch) for stretch in stretches]
        ids: list[ArrayLike] = [[] for _ in texts]
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, stretch in enumerate(stretches):
            if texts[i]:
                strict = any(piece.kind == "quoted" and piece.text for piece in stretch)
                groups.setdefault((strict, i == 0), []).append(i)
        for (strict, start), members in groups.items():
            rows = self._encode([texts[i] for i in members], strict=strict, start=start)
            for i, row in zip(members, rows, strict=True):
                ids[i] = row
        parts = [ids[0]]
        for token, following in zip(tokens, ids[1:], strict=True):
            parts += [[token], following]
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that the ids stand for, token by token; control tokens stand for none.

        The space in front of a SentencePiece text is kept: the bytes of a concatenation are the concatenated
        bytes.
        """
        pieces = self._model.pieces
        return b"".join([pieces[index] for index in _check_ids(ids, self.vocab_size).tolist()])

    def decode(self, ids: ArrayLike) -> str:
        """The text, with U+FFFD where a character was cut; the space that `encode` put in front is taken off."""
        data = self.decode_bytes(ids)
        if self._model.adds_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """Byte length of each id, 0 for control tokens and for ids that no token has."""
        return np.array([len(piece) for piece in self._model.pieces], np.int32)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``tokenizer_info.json``.

        `load_tokenizer`, `from_folder` and ``transformers.AutoTokenizer`` read them.

        Args:
          folder: created if absent; files of these names are replaced.
        """
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        data = self._files.data | {"truncation": None, "padding": None}
        (root / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.adds_bos,
            **self.named_tokens,
        }
        if self._files.control_tokens:
            config["additional_special_tokens"] = list(self._files.control_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (root / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        info = {"kind": "hub", "vocab_size": self.vocab_size, "eos_id": self.eos_id, "stop_ids": list(self.stop_ids)}
        _write_info(root, info)

    def _named_id(self, name: str) -> int:
        text = self._files.names[name]
        if text not in self._model.control:
            raise ValueError(f"{self._files.source}: {name} is {text[:80]!r}, which the tokenizer does not have")
        return self._model.control[text]

    def _encode(self, texts: list[str], *, strict: bool, start: bool) -> list[np.ndarray]:
        for text in texts:
            _utf8(text)
        encoder = self._encoder(strict=strict, start=start)
        with _library_errors(f"{self._files.source}: the tokenizer fails on this text"):
            encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        if self._model.missing_bytes:
            for text, row in zip(texts, ids, strict=True):
                self._check_complete(encoder, text, row)
        return ids

    def _check_complete(self, encoder: Any, text: str, ids: np.ndarray) -> None:
        """The library drops bytes that the vocabulary lacks without a word."""
        data = text.encode()
        missing = self._model.missing_bytes
        if len(data.translate(None, bytes(missing))) == len(data):
            return
        if encoder.normalizer is not None:
            data = encoder.normalizer.normalize_str(text).encode()
        if self.decode_bytes(ids) != data:
            lost = missing.intersection(data)
            character = next(c for c in data.decode() if lost.intersection(c.encode()))
            raise ValueError(
                f"text holds {character!r} (U+{ord(character):04X}), which this tokenizer's vocabulary cannot write: "
                f"{self._files.source} lacks byte 0x{min(lost):02X}"
            )

    def _encoder(self, *, strict: bool, start: bool) -> Any:
        start = start or not self._model.prefix_at_start_only
        strict = strict and self._model.has_text_tokens
        encoder = self._encoders.get((strict, start))
        if encoder is None:
            library = _tokenizers()
            content = json.dumps(self._model.encoder_json(strict=strict, start=start), ensure_ascii=False)
            with _library_errors(f"{self._files.source}: not a usable tokenizer"):
                encoder = library.Tokenizer.from_str(content)
            self._encoders[strict, start] = encoder
        return encoder


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """The library raises plain Exception, and where its regular expressions give up, something outside that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {str(error)[:200]}") from error


def _alternatives(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """Finds the leftmost, then longest, of the tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
