"""Thousands of damaged headers: each is refused with a ValueError or describes bytes that are there."""

import json
import re
import tracemalloc

import jaxtyping
import numpy as np
import pytest

from jaxlib_icml.lm.safetensors import DTYPES, SafetensorsFile
from jaxlib_icml.lm.safetensors.checkpoint import parse_index
from jaxlib_icml.lm.safetensors.file import parse_header
from tests.lm.untrusted import watchdog

NUM_HEADERS = 10_000
NUM_FILES = 500
NUM_INDEXES = 3_000
DATA_BYTES = 40
SEEDS = [
    {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [24, 40]},
    },
    {
        "s": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
        "e": {"dtype": "I64", "shape": [0, 4], "data_offsets": [8, 8]},
        "é": {"dtype": "U8", "shape": [32], "data_offsets": [8, 40]},
    },
    {f"x{i}": {"data_offsets": [4 * i, 4 * i + 4], "dtype": "I32", "shape": [1]} for i in range(10)},
]
NUMBERS = ["-1", "0", "1", "4", "8", "40", "41", "2147483648", "4294967296", "9223372036854775807", "1e2", "1.0", "-0"]
NUMBERS += [
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "9" * 5000,
    "NaN",
    "null",
    "true",
    "[]",
]
PIECES = [
    '"shape":[1]',
    '"dtype":"F32"',
    '"a.weight":{}',
    '"\\u0061"',
    "[[[[",
    "]",
    "}",
    "{",
    ",",
    ":",
    '"',
    "\\",
    "\0",
]
PIECES += [
    "[" * 30_000,
    '{"a":' * 5_000,
    "[]," * 10_000,
    "0," * 20_000,
    '"k":"v",' * 2_000,
    " " * 1_000,
    "\ud7ff",
    "🙂",
]


@pytest.fixture(autouse=True)
def _unchecked_annotations(monkeypatch):
    """Checking annotations would take most of the time and memory that is measured here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def mutate(text, rng):
    """One kind of damage to the bytes of a header."""
    where = int(rng.integers(len(text) + 1))
    numbers = [match.span() for match in re.finditer(rb"[0-9]+", text)]
    match int(rng.integers(12)):
        case 0:  # a bit
            where = min(where, len(text) - 1)
            return text[:where] + bytes([text[where] ^ (1 << int(rng.integers(8)))]) + text[where + 1 :]
        case 1:  # the end missing
            return text[:where]
        case 2:  # a piece missing
            return text[:where] + text[where + int(rng.integers(1, 12)) :]
        case 3 | 4 if numbers:  # a number
            start, stop = numbers[rng.integers(len(numbers))]
            return text[:start] + NUMBERS[rng.integers(len(NUMBERS))].encode() + text[stop:]
        case 5 if len(numbers) > 1:  # two numbers swapped
            (a, b), (c, d) = sorted(numbers[i] for i in rng.choice(len(numbers), 2, replace=False))
            return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]
        case 6:  # a piece twice: keys, entries, brackets
            stop = where + int(rng.integers(1, 80))
            return text[:stop] + text[where:stop] + text[stop:]
        case 7:  # an entry copied whole
            entries = text[1:-1]
            return b"{" + entries + b"," + entries + b"}"
        case 8:  # random bytes
            return text[:where] + rng.bytes(int(rng.integers(1, 9))) + text[where:]
        case 9:  # white space before a string, or in the middle of it
            quote = [i for i, sign in enumerate(text) if sign == ord('"')] or [0]
            where = quote[rng.integers(len(quote))]
            return text[:where] + b"\t" * (where % 2) + b" \n\r"[: where % 3] + text[where:]
        case _:
            piece = PIECES[rng.integers(len(PIECES))].encode()
            return text[:where] + piece + text[where:]


def damaged(count, seed, seeds=SEEDS):
    """Pairs of a damaged header and the bytes of data after it."""
    rng = np.random.default_rng(seed)
    texts = [json.dumps(header, ensure_ascii=False).encode() for header in seeds]
    for _ in range(count):
        text = texts[rng.integers(len(texts))]
        for _ in range(int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1]))):
            text = mutate(text, rng) or b"{"
        yield text, DATA_BYTES if rng.random() < 0.9 else int(rng.integers(0, 100))


def strict_json(text, **kwargs):
    def pairs(items):
        assert len(dict(items)) == len(items)
        return dict(items)

    return json.loads(text, object_pairs_hook=pairs, **kwargs)


def check_believed(header, tensors, metadata, num_bytes):
    """What was believed is what the JSON says, and covers the data exactly."""
    said = strict_json(header.decode())
    assert said.pop("__metadata__", {}) == metadata
    assert list(said) == list(tensors)
    start = 8 + len(header)
    covered = np.zeros(num_bytes, int)
    for name, info in tensors.items():
        assert said[name] == {
            "dtype": next(code for code, dtype in DTYPES.items() if dtype == info.dtype),
            "shape": list(info.shape),
            "data_offsets": [info.start - start, info.stop - start],
        }
        assert info.stop - info.start == info.dtype.itemsize * np.prod(info.shape, dtype=object)
        covered[info.start - start : info.stop - start] += 1
    np.testing.assert_array_equal(covered, 1)


def attempt(parse, *args):
    """What `parse` returns, or how it complains."""
    try:
        return parse(*args, "f"), None
    except ValueError as error:
        return None, str(error)


def attempt_measured(parse, *args):
    """`attempt`, and the most memory it had at one time."""
    tracemalloc.start()
    result, message = attempt(parse, *args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, message, peak


def test_damaged_headers():
    believed, messages = 0, set()
    with watchdog(120):
        for header, num_bytes in damaged(NUM_HEADERS, seed=0):
            result, message = attempt(parse_header, header, 8 + len(header) + num_bytes)
            if result is None:
                messages.add(message)
            else:
                believed += 1
                check_believed(header, *result, num_bytes)
    # Some damage is none (a name, white space), most is: both branches are tried.
    assert believed > NUM_HEADERS / 50
    assert len(messages) > NUM_HEADERS / 10
    assert all(message.startswith("f: ") for message in messages)


def test_damaged_headers_take_no_memory_of_their_own():
    with watchdog(60):
        for header, num_bytes in damaged(1_500, seed=5):
            # Whatever a header says of terabytes.
            peak = attempt_measured(parse_header, header, 8 + len(header) + num_bytes)[-1]
            assert peak < 16 * len(header) + 20_000
            peak = attempt_measured(parse_index, header)[-1]
            assert peak < 16 * len(header) + 20_000


@pytest.mark.peer
def test_what_is_believed_the_library_believes():
    library = pytest.importorskip("safetensors")
    believed = 0
    for header, num_bytes in damaged(NUM_HEADERS // 4, seed=1):
        try:
            tensors, _ = parse_header(header, 8 + len(header) + num_bytes, "f")
        except ValueError:
            continue
        believed += 1
        content = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
        assert {name for name, _ in library.deserialize(content)} == set(tensors)
    assert believed > 50


def test_damaged_files(tmp_path):
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(2)
    believed, messages = 0, set()
    with watchdog(60):
        for header, num_bytes in damaged(NUM_FILES, seed=3):
            length = len(header)
            data = rng.bytes(num_bytes)
            match int(rng.integers(8)):
                case 0:
                    length = int(rng.integers(0, 2 * length))
                case 1:
                    length = int(rng.integers(0, 1 << 63)) >> int(rng.integers(0, 63))
            content = length.to_bytes(8, "little") + header + data
            path.write_bytes(content[: int(rng.integers(len(content)))] if rng.random() < 0.05 else content)
            try:
                file = SafetensorsFile(path)
            except ValueError as error:
                messages.add(str(error))
                continue
            believed += 1
            for name, info in file.tensors.items():
                assert file.read(name).tobytes() == content[info.start : info.stop]
    assert believed > 10
    assert len(messages) > 50
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_undamaged_headers():
    for seed in SEEDS:
        header = json.dumps(seed).encode()
        check_believed(header, *parse_header(header, 8 + len(header) + DATA_BYTES, "f"), DATA_BYTES)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"shape":[' + b"0," * 500_000,
        b'{"a":' + b"[]," * 500_000,
        b'{"__metadata__":{' + b'"":"",' * 200_000,
        b'{"' + "🙂".encode() + b"a" * 1_000_000 + b'":{}}',
        b'{"a":{"dtype":"' + b"\\u0041" * 200_000 + b'"}}',
        b"{" + b" " * 1_000_000,
        b'{"a":{"shape":[' + b"9" * 1_000_000 + b"]}}",
    ],
    ids=["zeros", "lists", "pairs", "wide", "escapes", "spaces", "digits"],
)
def test_memory_stays_near_the_size_of_the_header(header):
    with watchdog(60):
        result, message, peak = attempt_measured(parse_header, header, 8 + len(header))
    assert result is None
    assert peak < 16 * len(header)
    assert message.startswith("f: ")
    assert len(message) < 600


def test_damaged_indexes():
    index = {
        "metadata": {"total_size": 3, "list": [1, {"a": None}]},
        "weight_map": {"x": "a.safetensors", "y": "b.safetensors"},
    }
    believed, messages = 0, set()
    with watchdog(60):
        for text, _ in damaged(NUM_INDEXES, seed=4, seeds=[index]):
            result, message = attempt(parse_index, text)
            if result is None:
                messages.add(message)
            else:
                believed += 1
                assert result == strict_json(text.decode(), parse_int=str)["weight_map"]
                assert all("/" not in shard and shard.endswith(".safetensors") for shard in result.values())
    assert believed > NUM_INDEXES / 50
    assert len(messages) > NUM_INDEXES / 10
    assert all(message.startswith("f: ") for message in messages)
