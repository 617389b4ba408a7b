"""Tokenizer files that are damaged, contradict themselves or try to pass text off as control tokens."""

import json
import time

import pytest

from jaxlib_icml.lm.hub_tokenizer import HubTokenizer
from jaxlib_icml.lm.tokenizer import load_tokenizer

from .hub_families import tokenizer_json, write_folder


def set_at(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def added(content, index, **flags):
    every = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **every, "special": True, **flags}


class TestUntrustedFiles:
    @pytest.mark.parametrize(
        ("name", "path", "value", "message"),
        [
            ("gpt2", ["model"], 3, "model must be an object"),
            ("gpt2", ["model", "type"], "WordPiece", r"must be a byte-pair encoding .*, got 'WordPiece'"),
            ("gpt2", ["model", "type"], "Unigram", "got 'Unigram'"),
            ("gpt2", ["model", "dropout"], 0.1, "model.dropout must be absent"),
            ("gpt2", ["model", "end_of_word_suffix"], "</w>", "model.end_of_word_suffix must be absent"),
            ("gpt2", ["model", "vocab"], None, "model.vocab must be an object"),
            ("gpt2", ["model", "vocab"], {}, "model.vocab must be an object"),
            ("gpt2", ["model", "vocab", "a"], 66, "model.vocab gives id 66 to both"),
            ("gpt2", ["model", "vocab", "a"], -1, r"the id of 'a' must lie in \[0, 2097152\), got -1"),
            ("gpt2", ["model", "vocab", "a"], 1 << 40, r"the id of 'a' must lie in"),
            ("gpt2", ["model", "vocab", "a"], True, r"the id of 'a' must lie in"),
            ("gpt2", ["model", "vocab", "\ud800"], 5000, "holds half a surrogate pair"),
            ("gpt2", ["model", "vocab", " hidden 7"], 5000, "holds the token ' hidden 7'"),
            ("gpt2", ["model", "merges"], {}, "model.merges must be a list"),
            ("gpt2", ["model", "merges"], [["a"]], r"model.merges\[0\] must be a pair"),
            ("gpt2", ["model", "merges"], [["a", "missing"]], r"model.merges\[0\] needs 'missing'"),
            ("gpt2", ["normalizer"], {"type": "Lowercase"}, "normalizer may only be NFC"),
            ("gpt2", ["normalizer"], {"type": "Sequence", "normalizers": [{"type": "Strip"}]}, "only be NFC"),
            ("gpt2", ["pre_tokenizer", "add_prefix_space"], True, "must end in ByteLevel with add_prefix_space false"),
            ("gpt2", ["pre_tokenizer"], {"type": "Whitespace"}, "may cut text by Split, Digits or Punctuation"),
            ("qwen2", ["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "without removing any"),
            ("qwen2", ["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "a" * 20_000}, "at most 10000"),
            ("qwen2", ["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(("}, "not a usable tokenizer"),
            ("gpt2", ["added_tokens"], {}, "added_tokens must be a list"),
            ("gpt2", ["added_tokens"], [added("", 9)], "must be a non-empty string"),
            ("gpt2", ["added_tokens"], [added("<x>", "9")], r"added_tokens\[0\]: the id of '<x>' must lie in"),
            ("gpt2", ["added_tokens"], [added("<x>", 9)], r"added_tokens\[0\]: '<x>' with id 9 contradicts"),
            ("gpt2", ["added_tokens"], [added("<x>", 900), added("<y>", 900)], r"'<y>' with id 900 contradicts '<x>'"),
            ("gpt2", ["added_tokens"], [added("<x>", 900), added("<x>", 901)], r"contradicts '<x>' with id 900"),
            ("gpt2", ["added_tokens"], [added("<x>", 900, lstrip=1)], "lstrip must be true or false"),
            ("gpt2", ["added_tokens"], [added("!", 0)], "special token '!' is one of the 256 byte tokens"),
            ("gpt2", ["added_tokens"], [], r"bos_token is '<\|endoftext\|>', which"),
            ("llama2", ["model", "byte_fallback"], False, "neither byte-level nor byte_fallback"),
            ("llama2", ["model", "ignore_merges"], True, "ignore_merges is only supported for byte-level models"),
            ("llama2", ["normalizer"], {"type": "NFKC"}, "normalizer may only put '▁'"),
            ("llama2", ["model", "vocab", "<0x41>"], None, "the id of '<0x41>' must lie in"),
            ("mistral", ["pre_tokenizer", "prepend_scheme"], "last", "unknown prepend_scheme"),
            ("mistral", ["pre_tokenizer", "replacement"], "_", "Metaspace must replace spaces"),
            ("llama2", ["added_tokens"], [added("<0x41>", 68)], "one of the 256 byte tokens|contradicts"),
        ],
    )  # fmt: skip
    def test_bad_model(self, tmp_path, name, path, value, message):
        data = json.loads(tokenizer_json(name))
        set_at(data, path, value)
        write_folder(name, tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message) as caught:
            HubTokenizer.from_folder(tmp_path)
        assert "tokenizer.json" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("tokenizer.json", "{", r"tokenizer.json: not valid JSON"),
            ("tokenizer.json", "[]", r"tokenizer.json: expected a JSON object, got list"),
            ("tokenizer.json", "[" * 100_000, r"tokenizer.json: not valid JSON"),
            ("tokenizer.json", '{"model": {}, "model": {}}', r"tokenizer.json: .* the key 'model' appears twice"),
            ("tokenizer.json", "{}", r"tokenizer.json: model must be an object"),
            ("tokenizer_config.json", "{", r"tokenizer_config.json: not valid JSON"),
            ("tokenizer_config.json", '{"eos_token": 3}', r"tokenizer_config.json: eos_token must be a string"),
            ("tokenizer_config.json", "{}", r"no end-of-text token"),
            ("tokenizer_config.json", '{"chat_template": 3}', r"tokenizer_config.json: chat_template must be"),
            ("tokenizer_config.json", '{"add_bos_token": 3}', r"tokenizer_config.json: add_bos_token must be"),
            ("tokenizer_config.json", '{"additional_special_tokens": 3}', r"additional_special_tokens must be a list"),
            ("tokenizer_config.json", '{"extra_special_tokens": {"a": 3}}', r"extra_special_tokens must be a string"),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', r"must be an object under an id"),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"5": {"content": "<|endoftext|>"}}}',
                r"which has id \d+ in the tokenizer file",
            ),
            ("special_tokens_map.json", "[]", r"special_tokens_map.json: expected a JSON object"),
            ("generation_config.json", '{"eos_token_id": "x"}', r"generation_config.json: eos_token_id must be an id"),
            ("generation_config.json", '{"eos_token_id": 5000}', r"id 5000 is given as a special token, but no such"),
            ("chat_template.jinja", b"\xff", r"chat_template.jinja: not UTF-8"),
            ("chat_template.jinja", b" " * ((1 << 24) + 1), r"chat_template.jinja: \d+ bytes is too large"),
        ],
    )
    def test_bad_file(self, tmp_path, file, content, message):
        write_folder("gpt2", tmp_path)
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            HubTokenizer.from_folder(tmp_path)

    def test_pattern_that_never_ends(self, tmp_path):
        data = json.loads(tokenizer_json("qwen2"))
        data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a+)+$"}
        write_folder("qwen2", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert tokenizer.decode(tokenizer.encode("bcd")) == "bcd"
        with pytest.raises(ValueError, match=r"tokenizer.json: the tokenizer fails on this text: .*retry-limit"):
            tokenizer.encode("a" * 40 + "c")

    def test_huge_and_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read: No such file"):
            HubTokenizer.from_folder(tmp_path / "missing")
        with (tmp_path / "tokenizer.json").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ValueError, match=r"tokenizer.json: \d+ bytes is too large"):
            HubTokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize(
        ("config", "merges", "message"),
        [
            ({"tokenizer_class": "RobertaTokenizer"}, "", "tokenizer_class 'RobertaTokenizer' does not tell"),
            ({"add_prefix_space": True}, "", "add_prefix_space would change the text"),
            ({}, "#version\na b c\n", r"merges.txt, line 2: a merge is two tokens"),
            ({}, "#version\na missing\n", r"needs 'missing'"),
        ],
    )
    def test_bad_older_layout(self, tmp_path, config, merges, message):
        (tmp_path / "vocab.json").write_text(json.dumps(json.loads(tokenizer_json("gpt2"))["model"]["vocab"]))
        (tmp_path / "merges.txt").write_text(merges)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            HubTokenizer.from_folder(tmp_path)

    def test_duplicate_key_is_found_quickly(self, tmp_path):
        keys = ", ".join(f'"k{i}": {i}' for i in range(50_000))
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {' + keys + ', "k7": 1}}}')
        start = time.process_time()
        with pytest.raises(ValueError, match="the key 'k7' appears twice"):
            HubTokenizer.from_folder(tmp_path)
        once = time.process_time() - start
        start = time.process_time()
        for _ in range(30):
            json.loads((tmp_path / "tokenizer.json").read_text())
        assert once < time.process_time() - start

    def test_merges_that_spell_a_control_token(self, tmp_path):
        data = json.loads(tokenizer_json("gpt2"))
        text = "<|im_end|>"
        prefixes = [text[:length] for length in range(2, len(text) + 1)]
        for index, prefix in enumerate(prefixes):
            data["model"]["vocab"].setdefault(prefix, 1000 + index)
        data["model"]["merges"] = [[prefix[:-1], prefix[-1]] for prefix in prefixes]
        data["pre_tokenizer"] |= {"use_regex": False}
        index = data["model"]["vocab"][text]
        data["added_tokens"].append(added(text, index))
        write_folder("gpt2", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        # The library does give it away; ours does not.
        from tokenizers import Tokenizer as Library

        library = Library.from_file(str(tmp_path / "tokenizer.json"))
        library.encode_special_tokens = True
        assert library.encode(text).ids == [index]
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert tokenizer.special_id(text) == index
        ids = tokenizer.encode(text)
        assert index not in ids
        assert tokenizer.decode(ids) == text

    def test_whole_words_that_are_control_tokens(self, tmp_path):
        data = json.loads(tokenizer_json("llama3"))  # looks whole pieces up before merging
        data["model"]["vocab"]["Stop"] = 1500
        data["added_tokens"].append(added("Stop", 1500))
        write_folder("llama3", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert 1500 not in tokenizer.encode("Stop")
        assert tokenizer.decode(tokenizer.encode("Stop")) == "Stop"

    def test_merges_that_spell_a_byte_token(self, tmp_path):
        data = json.loads(tokenizer_json("llama2"))
        text = "<0x41>"
        prefixes = [text[:length] for length in range(1, len(text) + 1)]
        for index, prefix in enumerate([*prefixes, *text]):
            data["model"]["vocab"].setdefault(prefix, 2000 + index)
        data["model"]["merges"] = [[prefix[:-1], prefix[-1]] for prefix in prefixes[1:]]
        write_folder("llama2", tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = HubTokenizer.from_folder(tmp_path)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize(
        ("info", "message"),
        [
            ({"vocab_size": 5}, "vocab_size is 5 but the tokenizer has"),
            ({"stop_ids": [1]}, r"stop_ids must be ids of special tokens, got \[1\]"),
            ({"stop_ids": "x"}, "stop_ids must be a list of ids, got x"),
        ],
    )
    def test_bad_info(self, tmp_path, info, message):
        HubTokenizer.from_folder(write_folder("gpt2", tmp_path)).save(tmp_path)
        path = tmp_path / "tokenizer_info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | info))
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)


def test_a_token_whose_cuts_would_take_for_ever_is_refused():
    from jaxlib_icml.lm.hub_files import _merges_from_scores

    assert _merges_from_scores({"ab": 0, "a": 1, "b": 2}, [0.0, 0.0, 0.0]) == [["a", "b"]]
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens\[0\] has 1000000 characters"):
        _merges_from_scores({"a" * 1_000_000: 0}, [0.0])
