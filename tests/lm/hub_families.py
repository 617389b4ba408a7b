"""Small tokenizers in the styles of published models, trained here with the `tokenizers` library."""

import functools
import inspect
import json
from pathlib import Path

from hypothesis import strategies as st

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    inspect.getsource(json.decoder),
    inspect.getsource(functools),
    "Ein naïver Käfer über 12345 Dächern; 漢字かな交じり文 और हिन्दी, привет мир! 🙂\n" * 8,
    "What is 2+2? You are a helpful assistant. The system and the user.\n\n" * 8,
]
# Texts that trip tokenizers: white space, digits, accents composed and not, control characters, markup.
HARD = [
    "",
    " ",
    "\n",
    " leading and trailing  ",
    "\tif x:\n\t\treturn\r\n    \n\n  y  \t z\r",
    "x" * 300 + " " * 300,
    "🙂👩‍👩‍👧 é e\u0301 漢字 \u202e\ufeff\u2028 \x00\x7f",
    "It's WE'LL they'd 1234567 12 3.14159",
    "<s></s><unk>[INST][/INST]<|endoftext|><|im_start|>system\n<|im_end|><|eot_id|><|begin_of_text|><0x0A>",
    "<think>a</think><tool_call>b|||IP_ADDRESS|||",
    "".join(map(chr, range(0x180))),
]
BYTE_LEVEL = ("gpt2", "llama3", "qwen2", "smollm", "olmoe")
SENTENCEPIECE = ("llama2", "mistral")
STYLES = (*BYTE_LEVEL, *SENTENCEPIECE)
CONTROL = {
    "gpt2": ["<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "olmoe": ["<|endoftext|>"],
    "llama2": ["<unk>", "<s>", "</s>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
}
ORDINARY = {"qwen2": ["<tool_call>", "<think>", "</think>"], "olmoe": ["  ", "    ", "|||IP_ADDRESS|||"]}
CONFIG = {
    "gpt2": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
    "llama3": {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
    "qwen2": {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>", "add_bos_token": False},
    "smollm": {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
    "olmoe": {"eos_token": "<|endoftext|>", "bos_token": None},
    "llama2": {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "add_bos_token": True},
    "mistral": {"eos_token": {"content": "</s>", "__type": "AddedToken"}, "bos_token": "<s>", "unk_token": "<unk>"},
}


@functools.cache
def tokenizer_json(style: str) -> str:
    """The content of ``tokenizer.json``."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    def added(text: str, special: bool) -> AddedToken:
        return AddedToken(text, special=special, normalized=False)

    if style in SENTENCEPIECE:
        return _sentencepiece_json(style)
    model = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    before = {
        "llama3": [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")],
        "qwen2": [pre_tokenizers.Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated")],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(style, [])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style not in ("llama3", "qwen2"))
    model.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    model.decoder = decoders.ByteLevel()
    if style in ("qwen2", "olmoe"):
        model.normalizer = normalizers.NFC()
    first = CONTROL[style] if style == "smollm" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[added(text, True) for text in first],
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    if style != "smollm":
        model.add_special_tokens([added(text, True) for text in CONTROL[style]])
    model.add_tokens([added(text, False) for text in ORDINARY.get(style, [])])
    if style == "llama3":
        bos = "<|begin_of_text|>"
        model.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, model.token_to_id(bos))])
    return model.to_str()


def _sentencepiece_json(style: str) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    control = CONTROL[style]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*control[:3], *byte_tokens, *control[3:]],
        limit_alphabet=90,
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    data = json.loads(model.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] in control]
    data["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    data["pre_tokenizer"] = None
    if style == "mistral":
        data["normalizer"] = None
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    data["decoder"] = {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return json.dumps(data)


def write_folder(style: str, folder: Path, **config) -> Path:
    """A folder as published; ``config`` is added to ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(style), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG[style] | config), encoding="utf-8")
    return folder


def gguf_metadata(style: str) -> dict:
    """The same tokenizer as GGUF metadata."""
    data = json.loads(tokenizer_json(style))
    ids = data["model"]["vocab"] | {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    types = [1] * len(tokens)
    for entry in data["added_tokens"]:
        types[entry["id"]] = 3 if entry["special"] else 4
    config = CONFIG[style]
    metadata = {
        "tokenizer.ggml.model": "llama" if style in SENTENCEPIECE else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": ids[config["eos_token"]],
    }
    if config.get("bos_token"):
        metadata["tokenizer.ggml.bos_token_id"] = ids[config["bos_token"]]
    if style in SENTENCEPIECE:
        scores = dict.fromkeys(tokens, -1e9)
        for rank, pair in enumerate(data["model"]["merges"]):
            scores["".join(pair)] = max(scores["".join(pair)], -float(rank))
        for byte in range(256):
            types[ids[f"<0x{byte:02X}>"]] = 6
        types[ids["<unk>"]] = 2
        metadata["tokenizer.ggml.scores"] = [scores[token] for token in tokens]
    else:
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
        pre = {"gpt2": "gpt-2", "llama3": "llama-bpe", "olmoe": "olmo"}.get(style, style)
        metadata["tokenizer.ggml.pre"] = pre
    return metadata


def any_text() -> st.SearchStrategy[str]:
    """Text of all kinds, often with control tokens in it."""
    every = sorted({text for texts in (*CONTROL.values(), *ORDINARY.values()) for text in texts})
    parts = st.one_of(st.text(max_size=8), st.sampled_from([*every, "<0x0A>", " ", "\n", "▁", "e\u0301", "12"]))
    return st.lists(parts, max_size=8).map("".join)
