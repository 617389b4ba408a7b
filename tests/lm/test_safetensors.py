"""Safetensors files: what is read back equals what other programs wrote, and no lie in a header is believed."""

import json
import math
import os

import ml_dtypes
import numpy as np
import pytest

from jaxlib_icml.lm.safetensors import DTYPES, SafetensorsFile, write_checkpoint
from jaxlib_icml.lm.safetensors._scanner import Scanner

SHAPES = [(), (1,), (0,), (3,), (2, 3), (0, 5), (5, 0, 2), (2, 1, 3, 4)]


def is_finite(array):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.isfinite(array.astype(np.float64))


def random_array(dtype, shape, seed=0):
    """Any finite bit patterns of a dtype."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    array = np.array(rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)).view(dtype).reshape(shape)
    if dtype.kind in "iu":
        return array
    return np.where(is_finite(array), array, np.zeros((), dtype)).astype(dtype)


def all_tensors():
    return {
        f"{code}.{i}": random_array(dtype, shape, i) for code, dtype in DTYPES.items() for i, shape in enumerate(SHAPES)
    }


def raw(header, data=b"", length=None):
    """The bytes of a file with this header (a dict, text or bytes)."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def write(path, *args, **kwargs):
    path.write_bytes(raw(*args, **kwargs))
    return path


def assert_same(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes()  # bit for bit, negative zeros included


def test_everything_written_is_read_back(tmp_path):
    tensors = all_tensors()
    [path] = write_checkpoint(tmp_path, tensors.items(), metadata={"note": "été"})
    file = SafetensorsFile(path)
    assert file.path == path
    assert file.metadata == {"format": "pt", "note": "été"}
    assert set(file.tensors) == set(tensors)
    for name, wanted in tensors.items():
        assert_same(file.read(name), wanted)
        assert_same(file.read_finite(name), wanted)
        info = file.tensors[name]
        assert info.stop - info.start == wanted.nbytes
        assert path.read_bytes()[info.start : info.stop] == wanted.tobytes()
        assert info.start % wanted.dtype.itemsize == 0


@pytest.mark.peer
def test_the_library_writes_what_we_read(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = all_tensors()
    path = tmp_path / "x.safetensors"
    path.write_bytes(library.save(tensors, {"a": "b"}))
    file = SafetensorsFile(path)
    assert file.metadata == {"a": "b"}
    assert set(file.tensors) == set(tensors)
    for name, wanted in tensors.items():
        assert_same(file.read(name), wanted)


@pytest.mark.peer
def test_the_library_reads_what_we_write(tmp_path):
    library = pytest.importorskip("safetensors")
    tensors = all_tensors()
    [path] = write_checkpoint(tmp_path, tensors.items())
    found = dict(library.deserialize(path.read_bytes()))
    assert set(found) == set(tensors)
    for name, wanted in tensors.items():
        assert found[name]["dtype"] == name.split(".")[0]
        assert tuple(found[name]["shape"]) == wanted.shape
        assert bytes(found[name]["data"]) == wanted.tobytes()
    with library.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        np.testing.assert_array_equal(opened.get_tensor("F64.4"), tensors["F64.4"])


def test_reading_copies_nothing_and_protects_the_file(tmp_path):
    [path] = write_checkpoint(tmp_path, [("x", np.arange(6, dtype=np.float32))])
    file = SafetensorsFile(path)
    first, second = file.read("x"), file.read("x")
    assert np.shares_memory(first, second)
    assert not first.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    del file
    np.testing.assert_array_equal(second, np.arange(6))  # the map lives as long as its views


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64", "I16"])
def test_misaligned_tensors_are_read(tmp_path, dtype):
    wanted = random_array(DTYPES[dtype], (5, 3))
    header = {"pad": entry("U8", (1,), (0, 1)), "x": entry(dtype, (5, 3), (1, 1 + wanted.nbytes))}
    text = json.dumps(header)
    file = SafetensorsFile(write(tmp_path / "x.safetensors", text + " " * (len(text) % 2), b"\0" + wanted.tobytes()))
    assert file.tensors["x"].start % 2 == 1
    assert_same(file.read("x"), wanted)
    assert_same(file.read_finite("x"), wanted)


def test_order_of_keys_and_white_space_do_not_matter(tmp_path):
    text = ' "x" :\n{ "data_offsets":[0 ,8], "shape"\t:[ 2 ],"dtype":"F32"} , "\\u00e9\\n":'
    text = "{" + text + json.dumps(entry(shape=(), offsets=(8, 12))) + "}  \n "
    file = SafetensorsFile(write(tmp_path / "x.safetensors", text, bytes(12)))
    assert list(file.tensors) == ["x", "é\n"]
    assert file.tensors["x"].shape == (2,)


def test_a_file_without_tensors(tmp_path):
    assert SafetensorsFile(write(tmp_path / "x.safetensors", "{}")).tensors == {}


X = entry()
Y = entry(offsets=(8, 16))
X_TEXT, Y_TEXT = json.dumps(X), json.dumps(Y)
HUGE = "1" + "0" * 400

# What the file says, bytes of data, what the message must say besides the file's name.
LIES = {
    "no-dtype": ({"x": {"shape": [2], "data_offsets": [0, 8]}}, 8, "tensor 'x': dtype missing"),
    "no-fields": ({"x": {}}, 8, "tensor 'x': dtype, shape, data_offsets missing"),
    "unknown-dtype": ({"x": entry("F128")}, 8, "tensor 'x': unknown dtype 'F128'"),
    "dtype-number": ({"x": entry(7)}, 8, "tensor 'x': expected a string"),
    "unknown-field": ({"x": entry(extra=1)}, 8, "tensor 'x': unknown field 'extra'"),
    "shape-number": ('{"x":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}', 8, "tensor 'x': expected '\\['"),
    "shape-negative": ({"x": entry(shape=(-2,))}, 8, "tensor 'x': negative number '-2'"),
    "shape-bool": ({"x": entry(shape=(True, 2))}, 8, "tensor 'x': expected an integer .* found 'true"),
    "shape-null": ({"x": entry(shape=(None,))}, 8, "tensor 'x': expected an integer"),
    "shape-float": ({"x": entry(shape=(2.0,))}, 8, "tensor 'x': expected an integer"),
    "shape-exponent": ('{"x":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', 8, "tensor 'x': expected an int"),
    "shape-text": ({"x": entry(shape=("2",))}, 8, "tensor 'x': expected an integer"),
    "shape-nan": ({"x": entry(shape=(math.nan,))}, 8, "tensor 'x': expected an integer .* found 'NaN"),
    "shape-infinity": ({"x": entry(shape=(math.inf,))}, 8, "tensor 'x': expected an integer .* found 'Infinity"),
    "shape-leading-zero": ('{"x":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', 8, "tensor 'x': expected an int"),
    "shape-huge": ('{"x":{"dtype":"F32","shape":[' + HUGE + "]}}", 8, "tensor 'x': .* is too large"),
    "shape-overflows": ({"x": entry(shape=(2**32, 2**32))}, 8, "tensor 'x': shape .* is too large"),
    "shape-wraps-to-8": ({"x": entry(shape=(2**62 + 2,))}, 8, "tensor 'x': shape .* is too large"),
    "shape-empty-overflows": ({"x": entry(shape=(0, 2**62), offsets=(0, 0))}, 0, "tensor 'x': shape .* is too large"),
    "shape-rank": ({"x": entry(shape=(1,) * 65, offsets=(0, 4))}, 4, "tensor 'x': shape has more than 64 entries"),
    "too-short": ({"x": entry(shape=(3,))}, 8, "tensor 'x': shape \\[3\\] of float32 takes 12 bytes, .* hold 8"),
    "too-long": ({"x": entry(shape=(1,))}, 8, "tensor 'x': shape \\[1\\] of float32 takes 4 bytes, .* hold 8"),
    "scalar-too-long": ({"x": entry(shape=())}, 8, "tensor 'x': shape \\[\\] of float32 takes 4 bytes"),
    "one-offset": ({"x": entry(offsets=(8,))}, 8, "tensor 'x': data_offsets must be \\[start, stop\\]"),
    "three-offsets": ({"x": entry(offsets=(0, 8, 9))}, 8, "tensor 'x': data_offsets has more than 2"),
    "offsets-swapped": ({"x": entry(offsets=(8, 0))}, 8, "tensor 'x': data_offsets .* not in order within 8"),
    "offsets-negative": ({"x": entry(offsets=(-8, 0))}, 8, "tensor 'x': negative number"),
    "offsets-beyond": ({"x": X, "y": Y}, 12, "tensor 'y': data_offsets .* within 12 bytes"),
    "offsets-huge": ({"x": entry(offsets=(0, 2**64))}, 8, "tensor 'x': number '18446744073709551616' is too large"),
    "overlap": ({"x": X, "y": entry(offsets=(4, 12))}, 12, "tensor 'y': overlaps tensor 'x'"),
    "same-bytes": ({"x": X, "y": X}, 8, "tensor 'y': overlaps tensor 'x'"),
    "empty-inside": ({"x": X, "e": entry(shape=(0,), offsets=(4, 4))}, 8, "tensor 'e': overlaps tensor 'x'"),
    "hole": ({"x": X, "y": entry(offsets=(12, 20))}, 20, "tensor 'y': leaves 4 bytes unused after tensor 'x'"),
    "hole-first": ({"x": entry(offsets=(4, 12))}, 12, "tensor 'x': leaves 4 bytes unused after the header"),
    "data-left": ({"x": X}, 9, "1 bytes unused after tensor 'x'"),
    "data-without-tensors": ({}, 3, "3 bytes unused after the header"),
    "tensor-twice": (f'{{"x":{X_TEXT},"x":{Y_TEXT}}}', 16, "header: key 'x' is given twice"),
    "tensor-twice-escaped": (f'{{"x":{X_TEXT},"\\u0078":1}}', 8, "header: key 'x' is given twice"),
    "field-twice": ('{"x":{"shape":[2],"shape":[2]}}', 8, "tensor 'x': key 'shape' is given twice"),
    "metadata-number": ({"__metadata__": {"a": 1}, "x": X}, 8, "__metadata__: expected a string"),
    "metadata-list": ({"__metadata__": [], "x": X}, 8, "__metadata__: expected '{'"),
    "metadata-nested": ({"__metadata__": {"a": {}}, "x": X}, 8, "__metadata__: expected a string"),
    "metadata-twice": ('{"__metadata__":{},"__metadata__":{}}', 0, "key '__metadata__' is given twice"),
    "metadata-key-twice": ('{"__metadata__":{"a":"b","a":"b"}}', 0, "__metadata__: key 'a' is given twice"),
    "tensor-list": ({"x": [1]}, 8, "tensor 'x': expected '{'"),
    "tensor-null": ({"x": None}, 8, "tensor 'x': expected '{'"),
    "list": ("[]", 0, "does not begin with '{'"),
    "space-first": (" {}", 0, "does not begin with '{'"),
    "nothing": ("", 0, "does not begin with '{'"),
    "byte-order-mark": ("\ufeff{}", 0, "does not begin with '{'"),
    "cut-off": ('{"x":{"dtype":"F32","sha', 0, "tensor 'x': bad string: Unterminated"),
    "cut-off-early": ("{", 0, "header: expected a string at character 1, found the end"),
    "two-objects": ("{}{}", 0, "header: expected the end"),
    "trailing-comma": (f'{{"x":{X_TEXT},}}', 8, "header: expected a string"),
    "no-comma": (f'{{"x":{X_TEXT} "y":1}}', 8, "header: expected ',' or '}'"),
    "single-quotes": ("{'x':1}", 0, "header: expected a string"),
    "control-sign": ('{"x\n":1}', 0, "bad string: Invalid control character"),
    "half-a-pair": ('{"\\ud800":1}', 0, "half a surrogate pair"),
    "not-utf8": (b'{"\xff":1}', 0, "header is not UTF-8 at byte 2"),
    "overlong-utf8": (b'{"\xc0\x80":1}', 0, "header is not UTF-8 at byte 2"),
    "nested": ("{" + '"a":{' * 100_000, 0, "tensor 'a': unknown field 'a'"),
    "nested-lists": ('{"x":' + "[" * 100_000, 0, "tensor 'x': expected '{'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_the_header_is_refused_by_name(tmp_path, lie):
    header, num_bytes, message = LIES[lie]
    path = write(tmp_path / "model.safetensors", header, bytes(num_bytes))
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 700


def test_the_lies_are_lies_because_of_one_thing(tmp_path):
    header = {"__metadata__": {"a": "b"}, "x": X, "e": entry(shape=(0,), offsets=(8, 8)), "y": Y}
    assert set(SafetensorsFile(write(tmp_path / "x", header, bytes(16))).tensors) == {"x", "e", "y"}
    assert (
        SafetensorsFile(write(tmp_path / "y", {"x": entry(shape=(1,) * 64, offsets=(0, 4))}, bytes(4))).read("x").ndim
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"\0" * 7, "7 bytes are too few"),
        (b"\0" * 8, "does not begin with"),
        (raw("{}", length=3), "header of 3 bytes in a file of 10"),
        (raw("{}", length=100_000_001), "more than the 100000000 allowed"),
        (raw("{}", length=2**64 - 1), "more than the 100000000 allowed"),
        (raw({"x": X}, bytes(8))[:-1], "tensor 'x': data_offsets"),
        (raw({"x": X})[:-5], "header of 61 bytes in a file of 64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="missing: no such file"):
        SafetensorsFile(tmp_path / "missing")
    with pytest.raises(ValueError, match="not a file"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: not a file"):  # and nobody waits for a writer
        SafetensorsFile(tmp_path / "pipe")


def test_a_file_that_shrinks_is_noticed(tmp_path):
    [path] = write_checkpoint(tmp_path, [("x", np.zeros(100_000))])
    file = SafetensorsFile(path)
    size = path.stat().st_size
    os.truncate(path, 4096)
    with pytest.raises(ValueError, match=f"was {size} bytes long when opened, now has 4096"):
        file.read("x")


def test_a_file_that_is_replaced_stays_readable(tmp_path):
    [path] = write_checkpoint(tmp_path, [("x", np.arange(3.0))])
    file = SafetensorsFile(path)
    write_checkpoint(tmp_path, [("x", np.arange(9.0))], overwrite=True)
    np.testing.assert_array_equal(file.read("x"), np.arange(3.0))
    np.testing.assert_array_equal(SafetensorsFile(path).read("x"), np.arange(9.0))


def test_unknown_names_are_refused(tmp_path):
    [path] = write_checkpoint(tmp_path, [("x", np.zeros(3))])
    with pytest.raises(ValueError, match=r"model\.safetensors: no tensor 'y'"):
        SafetensorsFile(path).read("y")


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"])
def test_every_bit_pattern_is_judged_as_numpy_judges_it(tmp_path, code):
    dtype = DTYPES[code]
    # All 8- and 16-bit patterns; of the wider formats all upper halves, with lower halves of 0 and of 1.
    width = min(16, 8 * dtype.itemsize)
    upper = np.arange(1 << width, dtype=np.uint64) << np.uint64(8 * dtype.itemsize - width)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    patterns = np.concatenate([upper, upper + np.uint64(1)]) if dtype.itemsize > 2 else upper
    values = patterns.astype(unsigned).view(dtype)
    finite = is_finite(values)
    assert 0 < finite.sum() < len(values)

    good = values[finite]
    path = write(tmp_path / "good", {"x": entry(code, good.shape, (0, good.nbytes))}, good.tobytes())
    SafetensorsFile(path).read_finite("x")
    bad = values[~finite]
    bad = bad[:: max(1, len(bad) // 100)]
    size = dtype.itemsize
    header = {f"x{i}": entry(code, (), (i * size, (i + 1) * size)) for i in range(len(bad))}
    file = SafetensorsFile(write(tmp_path / "bad", header, bad.tobytes()))
    for name in header:
        with pytest.raises(ValueError, match=f"bad: tensor '{name}': -?(nan|inf) at flat index 0"):
            file.read_finite(name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 131_071, 131_072, 299_999])
def test_the_first_bad_number_is_named_wherever_it_is(tmp_path, value, index):
    array = np.full((3, 100_000), 3e38, np.float32)  # their sum is infinite, none of them is
    header = {"x": entry("F32", array.shape, (0, array.nbytes))}
    SafetensorsFile(write(tmp_path / "x", header, array.tobytes())).read_finite("x")
    array.reshape(-1)[index:] = value
    file = SafetensorsFile(write(tmp_path / "x", header, array.tobytes()))
    assert file.read("x").shape == array.shape
    with pytest.raises(ValueError, match=f"x: tensor 'x': {value} at flat index {index};"):
        file.read_finite("x")


def test_integers_pass_and_booleans_must_be_booleans(tmp_path):
    header = {"b": entry("BOOL", (3,), (0, 3)), "i": entry("I32", (1,), (3, 7))}
    file = SafetensorsFile(write(tmp_path / "x", header, b"\0\1\1\xff\xff\xff\x7f"))
    assert file.read_finite("b").tolist() == [False, True, True]
    assert file.read_finite("i").tolist() == [2**31 - 1]
    file = SafetensorsFile(write(tmp_path / "x", header, b"\0\1\2\0\0\0\0"))
    with pytest.raises(ValueError, match="tensor 'b': byte 2 at flat index 2 is not a boolean"):
        file.read_finite("b")


def test_bfloat16_is_what_ml_dtypes_calls_it(tmp_path):
    file = SafetensorsFile(write(tmp_path / "x", {"x": entry("BF16", (2,), (0, 4))}, b"\x80\x3f\x00\xc0"))
    assert file.read("x").dtype == ml_dtypes.bfloat16
    assert file.read("x").astype(float).tolist() == [1.0, -2.0]


def skip_all(text):
    scanner = Scanner(text, "w")
    scanner.skip()
    scanner.end()


@pytest.mark.parametrize(
    "text",
    ['"a\\n"', "0", "-1.5e+3", "true", "null", "[]", "[1, [2]]", '{"a": {"b": [false]}}', "[" * 16 + "]" * 16],
)
def test_skipped_values_are_json(text):
    json.loads(text)
    skip_all(text)


@pytest.mark.parametrize(
    "text", ["", "NaN", "01", "1.", ".5", "[1,]", "[1 2]", '{"a"}', '{"a":1,"a":1}', "tru", "'a'", "+1", "[" * 100_000]
)
def test_skipped_values_must_be_json(text):
    with pytest.raises(ValueError, match=r"^w: "):
        skip_all(text)
