"""Where the tokenizers of published models are written: Hugging Face folders, GPT-2's two files, GGUF metadata.

Everything is read into one `TokenizerFiles`, whose ``data`` has the shape of a ``tokenizer.json``; whether that
is a tokenizer that keeps text intact is checked by `jaxlib_icml.lm.hub_tokenizer`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib_icml.lm.tokenizer import _parse_json, _read

__all__ = ["TokenizerFiles", "read_folder", "read_gguf"]

_MAX_SMALL_FILE_BYTES = 1 << 24
_MAX_SCORED_CHARACTERS = 256
_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Token types of GGUF: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class TokenizerFiles:
    """What a published tokenizer consists of.

    Attributes:
      data: the content of ``tokenizer.json``.
      source: the file or key to name in errors.
      names: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` as the configuration gives them.
      control_tokens: further texts that the configuration calls special.
      eos_ids: ids that end a text or a turn, the document boundary first; empty if only ``names`` tells.
      bos_id: the beginning, where only an id is given.
      adds_bos: whether the model was trained with ``bos_token`` before every text.
      chat_template: a Jinja template.
    """

    data: dict[str, Any]
    source: str
    names: dict[str, str]
    control_tokens: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    adds_bos: bool = False
    chat_template: str | None = None


def read_folder(folder: str | os.PathLike[str]) -> TokenizerFiles:
    """Reads a folder of a published model.

    Args:
      folder: holds ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``; ``tokenizer_config.json``,
        ``special_tokens_map.json``, ``generation_config.json``, ``config.json`` and ``chat_template.jinja`` are
        used where present.

    Returns:
      Their content.

    Raises:
      ValueError: a file is missing, too large, malformed, or contradicts another; the message names it.
    """
    root = Path(folder)
    config_path = root / "tokenizer_config.json"
    config = _optional_json(config_path)
    names: dict[str, str] = {}
    control: list[str] = []
    for path, content in ((root / "special_tokens_map.json", None), (config_path, config)):
        values = _optional_json(path) if content is None else content
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if values.get(name) is not None:
                names[name] = _token_text(values[name], f"{path}: {name}")
        for name in ("additional_special_tokens", "extra_special_tokens"):  # the older and the newer name
            extra = values.get(name) or []
            if not isinstance(extra, list | dict):
                raise ValueError(f"{path}: {name} must be a list or an object, got {type(extra).__name__}")
            items = extra.values() if isinstance(extra, dict) else extra
            control += [_token_text(item, f"{path}: {name}") for item in items]

    main = root / "tokenizer.json"
    if main.exists() or not (root / "vocab.json").exists():
        data = _parse_unique(main)
    else:
        main = root / "vocab.json"
        data = _two_files(root, config, config_path)
    _add_declared_tokens(data, config, config_path)

    generation = _optional_json(root / "generation_config.json")
    model = _optional_json(root / "config.json")
    eos_ids: list[int] = []
    bos_id: int | None = None
    for where, values in (("generation_config.json", generation), ("config.json", model)):
        eos_ids += _ids(values.get("eos_token_id"), f"{root / where}: eos_token_id")
        bos_id = bos_id if bos_id is not None else next(iter(_ids(values.get("bos_token_id"), f"{root / where}")), None)

    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        adds_bos = _begins_with_token(data.get("post_processor"), names.get("bos_token"))
    if not isinstance(adds_bos, bool):
        raise ValueError(f"{config_path}: add_bos_token must be true or false, got {adds_bos!r}")
    return TokenizerFiles(
        data=data,
        source=str(main),
        names=names,
        control_tokens=tuple(dict.fromkeys(control)),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        # A configuration without bos_token says that there is none, whatever number the model's one repeats.
        bos_id=None if config_path.exists() else bos_id,
        adds_bos=adds_bos,
        chat_template=_chat_template(root, config, config_path),
    )


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Reads the tokenizer in the metadata of a GGUF file.

    Args:
      metadata: keys ``tokenizer.ggml.*`` and ``tokenizer.chat_template`` with Python values (arrays as lists or
        NumPy arrays).

    Returns:
      The content, in the shape of Hugging Face's files.

    Raises:
      ValueError: a key is missing or malformed, or names a tokenizer that is not known; the message names it.
    """

    def array(key: str, kind: type, required: bool) -> list[Any] | None:
        name = f"tokenizer.ggml.{key}"
        values = metadata.get(name)
        if values is None:
            if required:
                raise ValueError(f"{name} is missing")
            return None
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or not all(type(value) is kind for value in values):
            raise ValueError(f"{name} must be an array of {kind.__name__}")
        return list(values)

    def scalar(key: str, kind: type) -> Any:
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        value = metadata.get(name)
        value = value.item() if value is not None and hasattr(value, "item") else value
        if value is not None and type(value) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
        return value

    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' or 'llama' (byte-pair encodings), got {model!r}")
    tokens = array("tokens", str, True)
    assert tokens is not None
    types = array("token_type", int, False) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    used = [(token, index) for index, token in enumerate(tokens) if types[index] != _UNUSED]
    vocab = dict(used)
    if len(vocab) != len(used):
        raise ValueError(f"tokenizer.ggml.tokens: {len(used) - len(vocab)} tokens appear twice")
    added = [
        _added_token(token, index, special=types[index] != _USER_DEFINED)
        for token, index in used
        if types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    data: dict[str, Any] = {"version": "1.0", "added_tokens": added}
    if model == "gpt2":
        merges = array("merges", str, True)
        assert merges is not None
        data |= _byte_level_steps(scalar("pre", str) or "default", "tokenizer.ggml.pre")
        data["model"] |= {
            "vocab": vocab,
            "merges": [_split_merge(merge, f"tokenizer.ggml.merges[{i}]") for i, merge in enumerate(merges)],
        }
    else:
        scores = array("scores", float, True)
        assert scores is not None
        if len(scores) != len(tokens):
            raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
        normal = {token: index for token, index in used if types[index] == _NORMAL}
        prefix = scalar("add_space_prefix", bool)
        data |= _sentencepiece_steps(prepend=prefix is None or prefix)
        data["model"] |= {"vocab": vocab, "merges": _merges_from_scores(normal, scores)}

    def token_id(key: str) -> int | None:
        value = scalar(f"{key}_token_id", int)
        if value is not None and not 0 <= value < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key}_token_id is {value}, but there are {len(tokens)} tokens")
        return value

    ids = {key: token_id(key) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    ends = [index for index in (ids["eos"], ids["eot"], ids["eom"]) if index is not None]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    adds_bos = scalar("add_bos_token", bool)
    return TokenizerFiles(
        data=data,
        source="tokenizer.ggml",
        names={name: tokens[index] for name, key in keys.items() if (index := ids[key]) is not None},
        eos_ids=tuple(dict.fromkeys(ends)),
        adds_bos=model == "llama" if adds_bos is None else adds_bos,
        chat_template=scalar("tokenizer.chat_template", str),
    )


def _byte_level_steps(pre: str, where: str) -> dict[str, Any]:
    """Normaliser, pre-tokenizer and model options for the names llama.cpp gives to pre-tokenizers."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    before: list[dict[str, Any]] = []
    normalizer = None
    if pre in ("llama-bpe", "llama3", "llama-v3"):
        before, level["use_regex"] = [_isolate(_SPLIT_LLAMA3)], False
    elif pre == "qwen2":
        before, level["use_regex"], normalizer = [_isolate(_SPLIT_QWEN2)], False, {"type": "NFC"}
    elif pre == "smollm":
        before = [{"type": "Digits", "individual_digits": True}]
    elif pre == "olmo":
        normalizer = {"type": "NFC"}
    elif pre not in ("gpt-2", "default"):
        raise ValueError(
            f"{where}: the pre-tokenizer {pre!r} is not known; known are 'smollm', 'llama-bpe', 'qwen2', 'gpt-2', "
            "'default', 'olmo'"
        )
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": pre in ("llama-bpe", "llama3", "llama-v3")},
    }


def _sentencepiece_steps(*, prepend: bool) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    first = [{"type": "Prepend", "prepend": "▁"}] if prepend else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {"type": "BPE", "byte_fallback": True, "fuse_unk": True},
    }


def _merges_from_scores(normal: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """SentencePiece merges the neighbours whose union has the best score; as ranked pairs, best first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in normal.items():
        if len(token) > _MAX_SCORED_CHARACTERS:  # all its cuts would be tried
            raise ValueError(f"tokenizer.ggml.tokens[{index}] has {len(token)} characters, far more than a word")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[index], normal[left], normal[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [[left, right] for *_, left, right in ranked]


def _two_files(root: Path, config: dict[str, Any], config_path: Path) -> dict[str, Any]:
    """The older layout: vocabulary and merges, the rest implied by the class of the tokenizer."""
    kind = config.get("tokenizer_class") or "GPT2Tokenizer"
    pre = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}.get(str(kind).removesuffix("Fast"))
    if pre is None:
        raise ValueError(
            f"{config_path}: tokenizer_class {kind!r} does not tell how vocab.json is used; a tokenizer.json would"
        )
    if config.get("add_prefix_space"):
        raise ValueError(f"{config_path}: add_prefix_space would change the text")
    data = _byte_level_steps(pre, str(config_path))
    lines = _read(root / "merges.txt").split("\n")
    merges = [
        _split_merge(line.rstrip("\r"), f"{root / 'merges.txt'}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not (number == 1 and line.startswith("#version"))
    ]
    data["model"] |= {"vocab": _parse_unique(root / "vocab.json"), "merges": merges}
    text = "<|endoftext|>"
    index = data["model"]["vocab"].get(text)
    return data | {"added_tokens": [] if index is None else [_added_token(text, index, special=True)]}


def _add_declared_tokens(data: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Adds what ``tokenizer_config.json`` lists under ``added_tokens_decoder`` and ``tokenizer.json`` does not."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise ValueError(f"{path}: added_tokens_decoder must be an object, got {type(declared).__name__}")
    added = [] if data.get("added_tokens") is None else data["added_tokens"]
    if not isinstance(added, list):
        return  # refused with the rest of that file
    known = {entry.get("content"): entry for entry in added if isinstance(entry, dict)}
    for key, entry in declared.items():
        where = f"{path}: added_tokens_decoder[{key!r}]"
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and isinstance(entry, dict)):
            raise ValueError(f"{where} must be an object under an id")
        text = _token_text(entry, where)
        special = bool(entry.get("special"))
        if text not in known:
            flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            added.append(_added_token(text, int(key), special=special) | flags)
        elif known[text].get("id") != int(key):
            raise ValueError(f"{where} is {text!r}, which has id {known[text].get('id')} in the tokenizer file")
        elif special:
            known[text]["special"] = True
    data["added_tokens"] = added


def _chat_template(root: Path, config: dict[str, Any], config_path: Path) -> str | None:
    path = root / "chat_template.jinja"
    if path.exists():
        return _read_small(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{config_path}: chat_template must be a string or a list with one named 'default'")
    return template


def _begins_with_token(processor: Any, token: str | None) -> bool:
    """Whether a post-processor puts the beginning-of-text token first."""
    if not isinstance(processor, dict) or token is None:
        return False
    if processor.get("type") == "Sequence":
        steps = processor.get("processors")
        return isinstance(steps, list) and any(_begins_with_token(step, token) for step in steps)
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not isinstance(single, list) or not single:
        return False
    first = single[0]
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    return isinstance(special, dict) and special.get("id") == token


def _isolate(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added_token(text: str, index: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **flags, "special": special}


def _split_merge(merge: str, where: str) -> list[str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(f"{where}: a merge is two tokens with a space between, got {merge[:80]!r}")
    return [left, right]


def _token_text(value: Any, where: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a string or an object with 'content', got {type(text).__name__}")
    return text


def _ids(value: Any, where: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        raise ValueError(f"{where} must be an id or a list of ids, got {str(value)[:80]}")
    return values


def _optional_json(path: Path) -> dict[str, Any]:
    return _parse_json(_read_small(path), str(path)) if path.exists() else {}


def _read_small(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file")
    if path.stat().st_size > _MAX_SMALL_FILE_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes is too large, at most {_MAX_SMALL_FILE_BYTES}")
    return _read(path)


def _parse_unique(path: Path) -> dict[str, Any]:
    """A JSON object in which no key is given twice (one of the two ids of a token would be lost silently)."""
    return _parse_json(_read(path), str(path), unique_keys=True)
