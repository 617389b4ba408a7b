"""GGUF files that lie: whatever a header claims, the answer is a ValueError that names what is wrong."""

import importlib.util
import io
import math
import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import jaxlib_icml.lm.gguf as module
from jaxlib_icml.lm.gguf import GGUFFile
from tests.lm.gguf_oracle import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    SCALARS,
    STRING,
    U8,
    U32,
    U64,
    array,
    gguf_bytes,
    one_tensor,
    pair,
    tensor,
    text,
)
from tests.lm.untrusted import watchdog

# The scanner as users run it: checking its annotations at run time would take most of the time, and memory.
_spec = importlib.util.spec_from_file_location("unchecked_gguf", module.__file__)
unchecked = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(unchecked)


def scan(raw: bytes):
    return unchecked._scan(io.BytesIO(raw), len(raw), "file.gguf")


@pytest.fixture
def write(tmp_path):
    def write(raw: bytes, name="model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


def result_or_complaint(function, *args):
    try:
        return function(*args), None
    except ValueError as error:
        return None, str(error)


F = 0  # tensor type F32
HUGE = 2**64 - 1
WEIGHT = tensor("weight", (2, 4), F, 0)
LIES = {
    # what is wrong: (the file, what the message says)
    "empty": (b"", "header: not a GGUF file: it begins with b''"),
    "magic": (b"GGML" + bytes(40), "header: not a GGUF file: it begins with b'GGML'"),
    "only magic": (b"GGUF", "header: 4 bytes claimed at byte 4, where the file has 0 more"),
    "version 1": (gguf_bytes(version=1), "header: version 1; supported are 2 and 3"),
    "version 0": (gguf_bytes(version=0), "header: version 0;"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "header: big-endian"),
    "tensor count": (gguf_bytes(num_tensors=HUGE), f"header: {HUGE} tensors claimed, but the file has only"),
    "key count": (gguf_bytes(num_pairs=2**40), f"header: {2**40} keys claimed, but the file has only"),
    "too many keys": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 200_000) + bytes(3_000_000),
        "header: 200000 keys claimed; at most 131072 are allowed",
    ),
    "one key too many": (gguf_bytes([pair("a", U8, 1)], num_pairs=2), "key number 2 of 2: the name has 0 bytes"),
    "key length": (gguf_bytes([text("k", HUGE) + bytes(20)]), f"key number 1 of 1: the name has {HUGE} bytes"),
    "key past the end": (gguf_bytes([text("k", 60_000)]), "key number 1 of 1: 60000 bytes claimed at byte 32"),
    "empty key": (gguf_bytes([pair("", U8, 1)]), "key number 1 of 1: the name has 0 bytes"),
    "key not UTF-8": (gguf_bytes([pair(b"k\xff", U8, 1)]), "key number 1 of 1: the name is not UTF-8"),
    "key twice": (gguf_bytes([pair("a.b", U8, 1), pair("a.b", I64, 1)]), "key 'a.b': occurs twice"),
    "value type": (gguf_bytes([pair("a.b", 13, bytes(8))]), "key 'a.b': unknown value type 13"),
    "no value": (gguf_bytes([pair("a.b", U64, b"")], alignment=1), "key 'a.b': 8 bytes claimed"),
    "boolean": (gguf_bytes([pair("a.b", BOOL, b"\2")]), "key 'a.b': a boolean is 2; it must be 0 or 1"),
    "booleans": (gguf_bytes([pair("a.b", ARRAY, array(BOOL, [b"\0\xff"], 2))]), "key 'a.b': a boolean is 255"),
    "string length": (gguf_bytes([pair("a.b", STRING, text("x", HUGE))]), f"key 'a.b': {HUGE} bytes claimed"),
    "string not UTF-8": (gguf_bytes([pair("a.b", STRING, text(b"ab\xc3"))]), "key 'a.b': a string is not UTF-8"),
    "array type": (gguf_bytes([pair("a.b", ARRAY, array(99, [b"xx"]))]), "key 'a.b': unknown type 99 of an array's"),
    "array count": (
        gguf_bytes([pair("a.b", ARRAY, array(U8, [], HUGE))]),
        f"key 'a.b': {HUGE} array elements claimed, but the file has only",
    ),
    "array just too long": (
        gguf_bytes([pair("a.b", ARRAY, array(U64, [1], 9))]),
        "key 'a.b': 9 array elements claimed",
    ),
    "string array count": (gguf_bytes([pair("a.b", ARRAY, array(STRING, ["x"], 2**61))]), "key 'a.b': "),
    "string in an array": (
        gguf_bytes([pair("a.b", ARRAY, array(STRING, ["x", text("y", 2**63)]))]),
        f"key 'a.b': {2**63} bytes claimed",
    ),
    "nesting": (
        gguf_bytes([pair("a.b", ARRAY, array(ARRAY, [b""], 1) * 2000 + array(U8, [1]))]),
        "key 'a.b': arrays are nested more than 4 deep",
    ),
    **{
        f"alignment {value}": (
            gguf_bytes([pair("general.alignment", U32, value)]),
            f"key 'general.alignment': must be a power of two, at least 8, got {value}",
        )
        for value in (0, 4, 48, 2**32 - 1)
    },
    **{
        f"alignment of type {kind}": (
            gguf_bytes([pair("general.alignment", kind, value)]),
            f"key 'general.alignment': must be of type uint32 (4), got type {kind}",
        )
        for kind, value in [
            (U64, 64),
            (I32, -32),
            (F32, 32.0),
            (STRING, "3" * 999),
            (ARRAY, array(STRING, ["x"] * 999)),
        ]
    },
    "tensor name length": (
        gguf_bytes((), [text("t", 2**20) + bytes(40)]),
        "tensor number 1 of 1: the name has 1048576",
    ),
    "tensor not UTF-8": (gguf_bytes((), [tensor(b"\xe9", (1,), F, 0)], bytes(4)), "tensor number 1 of 1: the name is"),
    "tensor twice": (gguf_bytes((), [WEIGHT, WEIGHT], bytes(64)), "tensor 'weight': occurs twice"),
    "scalar": (gguf_bytes((), [tensor("weight", (), F, 0)], bytes(4)), "tensor 'weight': 0 dimensions; there may be 1"),
    "dimensions": (gguf_bytes((), [tensor("weight", (1,) * 5, F, 0)], bytes(4)), "tensor 'weight': 5 dimensions"),
    "dimension count": (
        gguf_bytes((), [tensor("weight", (1,), F, 0, dims=2**32 - 1)], bytes(4)),
        "tensor 'weight': 4294967295 dimensions; there may be 1 to 4",
    ),
    "tensor type": (gguf_bytes((), [tensor("weight", (1,), 4, 0)], bytes(4)), "tensor 'weight': unknown tensor type 4"),
    "activation type": (
        gguf_bytes((), [tensor("weight", (256,), 15, 0)], bytes(400)),
        "tensor 'weight': unknown tensor",
    ),
    "block": (
        gguf_bytes((), [tensor("weight", (32, 31), 8, 0)], bytes(4000)),
        "tensor 'weight': shape (32, 31): rows of",
    ),
    "size": (gguf_bytes((), [WEIGHT], bytes(31)), "tensor 'weight': shape (2, 4) of F32 takes bytes 96 to 128 of"),
    "overflow": (
        gguf_bytes((), [tensor("weight", (2**32, 2**32), F, 0)], bytes(32)),
        "tensor 'weight': shape (4294967296, 4294967296) of F32 takes bytes",
    ),
    "overflow of four": (
        gguf_bytes((), [tensor("weight", (2**62, 4, 2**63, 2), F, 0)], bytes(9)),
        "tensor 'weight': sh",
    ),
    "empty but huge": (
        gguf_bytes((), [tensor("weight", (2**60, 2**60, 0), F, 0)], bytes(9)),
        "tensor 'weight': shape (1152921504606846976, 1152921504606846976, 0) is too large",
    ),
    "no room for an empty tensor": (
        gguf_bytes((), [tensor("weight", (0,), F, 32)]),
        "tensor 'weight': shape (0,) of F32",
    ),
    "offset": (gguf_bytes((), [tensor("weight", (1,), F, HUGE - 31)], bytes(8)), "tensor 'weight': shape (1,) of F32"),
    "unaligned": (
        gguf_bytes((), [tensor("weight", (1,), F, 4)], bytes(64)),
        "tensor 'weight': offset 4 is not a multiple of the alignment 32",
    ),
    "aligned otherwise": (
        gguf_bytes([pair("general.alignment", U32, 64)], [tensor("weight", (1,), F, 32)], bytes(640)),
        "tensor 'weight': offset 32 is not a multiple of the alignment 64",
    ),
    "overlap": (
        gguf_bytes((), [tensor("last", (8,), F, 32), tensor("weight", (9,), F, 0)], bytes(96)),
        "tensor 'last': starts at byte 160, inside tensor 'weight'",
    ),
    "same place": (
        gguf_bytes((), [WEIGHT, tensor("copy", (1,), F, 0)], bytes(64)),
        "tensor 'weight': starts at byte 128, inside",
    ),
    "empty inside": (
        gguf_bytes((), [tensor("weight", (16,), F, 0), tensor("none", (0,), F, 32)], bytes(64)),
        "tensor 'none': starts at byte 160, inside tensor 'weight'",
    ),
    "long name": (
        gguf_bytes([pair("k" * 60_000, 77, b"")], alignment=1),
        f"key '{'k' * 80}'...: unknown value type 77",
    ),
    "terminal codes in a name": (gguf_bytes([pair("\x1b[2J", 77, b"")]), r"key '\x1b[2J': unknown value type 77"),
}


class TestLies:
    @pytest.mark.parametrize("lie", LIES)
    def test_is_named(self, lie, write):
        raw, message = LIES[lie]
        path = write(raw)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}") as error:
            GGUFFile(path)
        assert len(str(error.value)) < 400

    @pytest.mark.parametrize(
        "lie", ["tensor count", "array count", "string length", "nesting", "too many keys", "overflow"]
    )
    def test_costs_no_memory(self, lie):
        raw, _ = LIES[lie]
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"file\.gguf"):
            scan(raw)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * min(len(raw), 2**18) + 20_000

    def test_arrays_have_a_limit(self, monkeypatch):
        monkeypatch.setattr(module, "_MAX_ENTRIES", 100)
        scan = module._scan
        for nested, complaint in ((98, None), (99, "file.gguf: key 'b': more than 100 arrays in the file")):
            pairs = [pair("a", ARRAY, array(U8, [])), pair("b", ARRAY, array(ARRAY, [array(U8, [1])] * nested))]
            raw = gguf_bytes(pairs)
            assert result_or_complaint(scan, io.BytesIO(raw), len(raw), "file.gguf")[1] == complaint

    def test_headers_have_a_limit(self, monkeypatch):
        monkeypatch.setattr(unchecked, "_MAX_HEADER_BYTES", 1000)
        scan(gguf_bytes([pair("a", ARRAY, array(STRING, ["x" * 100] * 8))], data=bytes(10_000)))
        with pytest.raises(ValueError, match=r"key 'a': ends at byte 1\d\d\d; headers may have 1000 bytes"):
            scan(gguf_bytes([pair("a", ARRAY, array(STRING, ["x" * 100] * 10))], data=bytes(10_000)))

    def test_every_truncation(self):
        pairs = [pair("general.alignment", U32, 8), pair("a", ARRAY, array(STRING, ["x", "yz"])), pair("b", F64, 1.0)]
        raw = gguf_bytes(pairs, [tensor("u", (2,), F, 0), tensor("v", (1, 3), F, 8)], bytes(20), alignment=8)
        scan(raw)
        for size in range(len(raw)):
            with pytest.raises(ValueError, match=r"^file\.gguf: "):
                scan(raw[:size])

    def test_what_is_not_a_file(self, tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            GGUFFile(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with watchdog(), pytest.raises(ValueError, match="pipe: not a regular file"):
            GGUFFile(tmp_path / "pipe")
        with pytest.raises(FileNotFoundError, match="missing"):
            GGUFFile(tmp_path / "missing")

    def test_unknown_name(self, write):
        file = GGUFFile(write(one_tensor((1,), F, bytes(4))))
        with pytest.raises(ValueError, match=r"model\.gguf: no tensor 'bias' among its 1"):
            file.read("bias")

    def test_a_file_that_changes(self, write):
        raw = one_tensor((4,), F, bytes(16))
        file = GGUFFile(write(raw))
        write(raw[:-1])
        with pytest.raises(ValueError, match=r"model\.gguf: tensor 'weight': the file has changed"):
            file.read("weight")
        with file.path.open("rb") as stream:
            file._identity = module._identity(stream)
        with pytest.raises(ValueError, match=r"model\.gguf: tensor 'weight': the file ends inside it"):
            file.read("weight")

    def test_empty_tensors(self, write):
        infos = [tensor("a", (0, 5), F, 0), tensor("b", (3,), F, 0), tensor("c", (4, 0), 8, 32)]
        file = GGUFFile(write(gguf_bytes((), infos, bytes(32))))
        assert {name: file.read(name).shape for name in file.tensors} == {"a": (0, 5), "b": (3,), "c": (4, 0)}


# ---- Fuzz: valid files, mutated.


def base_files(rng) -> list[bytes]:
    tokens = [f"tok{i}" for i in range(12)]
    small = gguf_bytes(
        [pair("general.architecture", STRING, "llama"), pair("general.alignment", U32, 16), pair("on", BOOL, True)],
        [tensor("a", (3, 2), F, 0), tensor("b.weight", (2, 32), 8, 32), tensor("c", (5,), 1, 112)],
        rng.integers(0, 100, 122, dtype=np.uint8).tobytes(),
        alignment=16,
    )
    arrays = gguf_bytes(
        [
            pair("tokens", ARRAY, array(STRING, tokens)),
            pair("scores", ARRAY, array(F32, [0.5] * 12)),
            pair("nested", ARRAY, array(ARRAY, [array(U8, [1, 2]), array(ARRAY, [array(STRING, ["x"])])])),
            pair("flags", ARRAY, array(BOOL, [True, False])),
        ],
        [tensor("w", (2, 1, 2, 1), F, 0), tensor("z", (0, 7), F, 32)],
        bytes(range(16)) + bytes(48),
        version=2,
    )
    many = [pair(f"k{i}", kind, value) for i, (kind, value) in enumerate(SCALARS)]
    return [small, arrays, gguf_bytes(many, [tensor(f"t{i}", (1,), F, 32 * i) for i in range(6)], bytes(200))]


NUMBERS = [0, 1, 2, 5, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, HUGE - 31, HUGE]


def mutate(rng, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(len(data), 1)))
        span = slice(at, at + int(rng.integers(1, 40)))
        match rng.integers(0, 9):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << int(rng.integers(0, 8))
            case 2:
                data = data[:at]
            case 3:
                data[at : at + 8] = struct.pack("<Q", int(rng.choice(np.array(NUMBERS, np.uint64))))
            case 4:
                data[at : at + 8] = struct.pack("<Q", max(0, len(raw) + int(rng.integers(-40, 40))))
            case 5:
                data[at : at + 4] = struct.pack("<I", int(rng.integers(0, 14)))
            case 6:
                del data[span]
            case 7:
                data[at:at] = data[span] * int(rng.integers(1, 4))
            case 8:
                data[at:at] = struct.pack("<IQ", ARRAY, int(rng.integers(0, 3))) * int(rng.integers(1, 30))
    return bytes(data)


def assert_consistent(raw: bytes, metadata, tensors) -> None:
    end, alignment = 0, metadata.get("general.alignment", 32)
    for name, (shape, kind, start, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        block, size = next((entry.block, entry.block_bytes) for entry in module._FORMATS.values() if entry.name == kind)
        assert name
        assert 1 <= len(shape) <= 4
        assert shape[-1] % block == 0
        assert stop - start == math.prod(shape) // block * size
        assert end <= start <= stop <= len(raw)
        assert start % alignment == 0
        end = stop
    for key, value in metadata.items():
        assert key
        assert isinstance(value, int | float | bool | str | list | np.ndarray)


class TestFuzz:
    def test_mutated_headers(self):
        rng = np.random.default_rng(2026)
        bases = base_files(rng)
        for raw in bases:
            assert_consistent(raw, *scan(raw))
        accepted, complaints = 0, set()
        with watchdog():
            for number in range(15_000):
                raw = mutate(rng, bases[number % len(bases)])
                if traced := number % 4 == 0:
                    tracemalloc.start()
                result, complaint = result_or_complaint(scan, raw)
                if traced:
                    _, peak = tracemalloc.get_traced_memory()
                    tracemalloc.stop()
                    assert peak < 16 * len(raw) + 20_000, raw
                if complaint is None:
                    accepted += 1
                    assert_consistent(raw, *result)
                else:
                    assert complaint.startswith("file.gguf: ")
                    complaints.add(re.sub(r"'[^']*'|\d+", "", complaint)[:60])
        # Both outcomes and most of the checks are reached.
        assert 500 < accepted < 14_500
        assert len(complaints) > 40

    def test_mutated_files_can_be_read_or_say_why_not(self, write):
        pytest.importorskip("gguf")
        rng = np.random.default_rng(7)
        bases = base_files(rng)
        read = refused = 0
        with watchdog():
            for number in range(600):
                raw = bytearray(mutate(rng, bases[number % len(bases)]))
                at, length = len(raw) - int(rng.integers(0, 150)), int(rng.integers(0, 20))
                raw[max(at, 0) : at + length] = b"\xff" * length  # not a number in every float type
                path = write(bytes(raw))
                file, complaint = result_or_complaint(GGUFFile, path)
                if complaint is not None:
                    assert complaint.startswith(f"{path}: ")
                    continue
                for name, (shape, *_) in file.tensors.items():
                    values, complaint = result_or_complaint(file.read, name)
                    if complaint is None:
                        assert values.shape == shape
                        assert np.isfinite(values).all()
                        read += 1
                    else:
                        assert complaint.startswith(f"{path}: tensor ")
                        refused += 1
        assert read > 100
        assert refused > 10
