"""GGUF files that nobody vouches for: a strict scan of the header, then tensors one at a time as float32.

The format (github.com/ggml-org/ggml, docs/gguf.md): magic, version, two counts, key-value pairs, tensor
descriptions, padding, tensor data. The scan checks all of it against the size of the file before anything
of a claimed size is allocated; the quantised blocks are decoded by the package `gguf`, whose own reader
trusts the counts and lengths that it finds and is not used.
"""

import io
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

__all__ = ["GGUFFile", "GGUFTensor", "unpermute_rotary"]

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 1 << 27  # today's largest vocabularies take an eighth of this
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_ENTRIES = 1 << 17  # of keys, of tensors and of arrays: each costs far more memory than its bytes in the file
_MAX_NESTING = 4
_MAX_DIMS = 4
_MAX_EMPTY = 1 << 60  # what the dimensions of a tensor without elements may multiply to, zeros left out
_WINDOW_BYTES = 1 << 16
_CHUNK = 1 << 17  # elements decoded at a time: the temporaries of a chunk stay in the cache

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The fewest bytes that a value of each type takes.
_LEAST_BYTES = {**{type_id: dtype.itemsize for type_id, dtype in _NUMBERS.items()}, _STRING: 8, _ARRAY: 12}
_LEAST_PAIR = 8 + 1 + 4 + 1  # length, name, type, value
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # length, name, rank, one dimension, type, offset


class _Format(NamedTuple):
    name: str
    block: int  # elements in a block: rows consist of whole blocks
    block_bytes: int


# The formats that tensors are stored in. Q8_1 (9) and Q8_K (15) are for activations and never in a file.
_FORMATS = {
    0: _Format("F32", 1, 4),
    1: _Format("F16", 1, 2),
    2: _Format("Q4_0", 32, 18),
    3: _Format("Q4_1", 32, 20),
    6: _Format("Q5_0", 32, 22),
    7: _Format("Q5_1", 32, 24),
    8: _Format("Q8_0", 32, 34),
    10: _Format("Q2_K", 256, 84),
    11: _Format("Q3_K", 256, 110),
    12: _Format("Q4_K", 256, 144),
    13: _Format("Q5_K", 256, 176),
    14: _Format("Q6_K", 256, 210),
    16: _Format("IQ2_XXS", 256, 66),
    17: _Format("IQ2_XS", 256, 74),
    18: _Format("IQ3_XXS", 256, 98),
    19: _Format("IQ1_S", 256, 50),
    20: _Format("IQ4_NL", 32, 18),
    21: _Format("IQ3_S", 256, 110),
    22: _Format("IQ2_S", 256, 82),
    23: _Format("IQ4_XS", 256, 136),
    24: _Format("I8", 1, 1),
    25: _Format("I16", 1, 2),
    26: _Format("I32", 1, 4),
    27: _Format("I64", 1, 8),
    28: _Format("F64", 1, 8),
    29: _Format("IQ1_M", 256, 56),
    30: _Format("BF16", 1, 2),
    34: _Format("TQ1_0", 256, 54),
    35: _Format("TQ2_0", 256, 66),
    39: _Format("MXFP4", 32, 17),
    40: _Format("NVFP4", 64, 36),
    41: _Format("Q1_0", 128, 18),
}
_FORMAT_OF = {entry.name: entry for entry in _FORMATS.values()}
_FLOATS = ("F32", "F16", "BF16")
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class GGUFTensor(NamedTuple):
    """Where a tensor lies in its file.

    Attributes:
      shape: in numpy's order, rows first: a matrix is (out, in). GGUF writes it the other way round.
      type: storage format, such as "F16" or "Q4_K".
      start: offset of its first byte in the file.
      stop: offset after its last byte.
    """

    shape: tuple[int, ...]
    type: str
    start: int
    stop: int


class GGUFFile:
    """A GGUF file whose header has been checked completely: metadata, and tensors on demand.

    Versions 2 and 3, little-endian. Nothing of the tensors is read before `read`.

    Args:
      path: the file.

    Attributes:
      path: the file.
      metadata: the key-value pairs. Numbers, booleans and strings are Python's; arrays of numbers and
        booleans are read-only numpy arrays, arrays of strings or of arrays are lists.
      tensors: `GGUFTensor` by name, in the order of the file.

    Raises:
      ValueError: anything in the header is malformed, contradicts the size of the file, or is beyond the
        limits of this reader; the message names the file and the key or tensor.

    >>> import struct, tempfile
    >>> pair = struct.pack("<Q", 7) + b"answers" + struct.pack("<II", 4, 42)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "tiny.gguf"
    ...     size = path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    ...     GGUFFile(path).metadata
    {'answers': 42}
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not stat.S_ISREG(self.path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ValueError(f"{self.path}: not a regular file")
        with self.path.open("rb") as stream:
            self._identity = _identity(stream)
            self.metadata, self.tensors = _scan(stream, self._identity[0], str(self.path))

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor as float32, decoded if it is quantised.

        F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K are understood; all but the first
        three need the package `gguf`. Besides the result, a few MB of memory are used.

        Args:
          name: a key of `tensors`.

        Returns:
          A new array of the tensor's shape; all of it is finite.

        Raises:
          ValueError: there is no such tensor, its format is not one of the above, the file has changed since
            it was opened, or a value is NaN or infinite (block scales included); names the file and the tensor.
          ImportError: the package `gguf` is missing.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path}: no tensor {_shown(name)} among its {len(self.tensors)}")
        tensor, where = self.tensors[name], f"{self.path}: tensor {_shown(name)}"
        if tensor.type not in _FLOATS + _QUANTISED:
            readable = ", ".join(_FLOATS + _QUANTISED)
            raise ValueError(f"{where}: cannot decode format {tensor.type}, only {readable}")
        _, block, block_bytes = _FORMAT_OF[tensor.type]
        result = np.empty(math.prod(tensor.shape), np.float32)
        buffer = np.empty(min(result.size, _CHUNK) // block * block_bytes, np.uint8)
        # Read, not mapped: a file cut short meanwhile is then an error instead of the end of the process.
        with self.path.open("rb") as stream:
            if _identity(stream) != self._identity:
                raise ValueError(f"{where}: the file has changed since it was opened")
            stream.seek(tensor.start)
            for first in range(0, result.size, _CHUNK):
                part = result[first : first + _CHUNK]
                stored = buffer[: part.size // block * block_bytes]
                if stream.readinto(stored.data) != stored.size:
                    raise ValueError(f"{where}: the file ends inside it")
                part[:] = _decode(stored, tensor.type)
                if not np.isfinite(part).all():
                    index = np.unravel_index(first + int(np.argmin(np.isfinite(part))), tensor.shape)
                    position = ", ".join(str(i) for i in index)
                    raise ValueError(f"{where}: not finite at [{position}] (format {tensor.type})")
        return result.reshape(tensor.shape)


def unpermute_rotary(matrix: Shaped[np.ndarray, "..."], num_heads: int) -> Shaped[np.ndarray, "..."]:
    """Query or key weights of a GGUF file of architecture "llama", in the row order that `nn.rotary` expects.

    Such files (Llama, Mistral and Mixtral models) order the rows of every head for rotary embeddings that turn
    the pairs (x_2i, x_2i+1); here, as in the checkpoints they were made from, the pairs are (x_i, x_i+half).
    Rows 2i and 2i+1 become rows i and i + half. Qwen and OLMoE models are stored in our order already.

    Args:
      matrix: (num_heads * head_dim, ...) weights stored as (out, in), or a bias.
      num_heads: query heads for a query matrix, key-value heads for a key matrix.

    Returns:
      The matrix with its rows reordered, same shape and dtype.

    Raises:
      ValueError: the rows do not split into `num_heads` heads of even size.

    >>> unpermute_rotary(np.arange(8), num_heads=2)
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: must be positive, got {num_heads}")
    rows = matrix.shape[0] if matrix.ndim else 0
    if rows == 0 or rows % (2 * num_heads):
        raise ValueError(f"matrix: its {rows} rows are not {num_heads} heads (num_heads) of an even size")
    pairs = matrix.reshape(num_heads, rows // (2 * num_heads), 2, *matrix.shape[1:])
    return pairs.swapaxes(1, 2).copy().reshape(matrix.shape)


def _identity(stream: io.BufferedReader) -> tuple[int, int, int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def _decode(stored: UInt8[np.ndarray, " bytes"], type_name: str) -> Float32[np.ndarray, " elements"]:
    # Infinite or NaN scales are reported by the caller, with the tensor's name.
    with np.errstate(invalid="ignore", over="ignore"):
        match type_name:
            case "F32":
                return stored.view("<f4")
            case "F16":
                return stored.view("<f2").astype(np.float32)
            case "BF16":
                return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                f"decoding {type_name} tensors needs the package gguf: pip install 'jaxlib-icml[lm]'"
            ) from error
        return gguf.quants.dequantize(stored[None], gguf.GGMLQuantizationType[type_name])[0]


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}..."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Header:
    """The beginning of a file, read front to back through a small window; `where` is what errors name."""

    def __init__(self, stream: io.BufferedIOBase, size: int, path: str):
        self._stream, self._size, self._path = stream, size, path
        self._window, self._at, self._loaded = b"", 0, 0
        self.where = "header"
        self.num_arrays = 0

    @property
    def position(self) -> int:
        return self._loaded - len(self._window) + self._at

    def fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self._path}: {self.where}: {problem}")

    def take(self, count: int) -> bytes:
        """The next bytes; nothing is allocated unless the file has them."""
        stop = self._at + count
        if stop > len(self._window):
            self._refill(count)
            stop = self._at + count
        taken = self._window[self._at : stop]
        self._at = stop
        return taken

    def _refill(self, count: int) -> None:
        left = self._size - self.position
        if count > left:
            self.fail(f"{_plural(count, 'byte')} claimed at byte {self.position}, where the file has {left} more")
        if self.position + count > _MAX_HEADER_BYTES:
            self.fail(f"ends at byte {self.position + count}; headers may have {_MAX_HEADER_BYTES} bytes")
        rest = self._window[self._at :]
        wanted = min(max(count - len(rest), _WINDOW_BYTES), min(self._size, _MAX_HEADER_BYTES) - self._loaded)
        more = self._stream.read(wanted)
        if len(more) != wanted:
            self.fail("the file became shorter while it was read")
        self._window, self._at = rest + more, 0
        self._loaded += wanted

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, least_bytes: int, most: int, noun: str) -> int:
        """A 64-bit count of things that take `least_bytes` each."""
        count = self.uint64()
        left = self._size - self.position
        if count * least_bytes > left:
            self.fail(f"{_plural(count, noun)} claimed, but the file has only {left} more bytes")
        if count > most:
            self.fail(f"{_plural(count, noun)} claimed; at most {most} are allowed")
        return count

    def string(self) -> str:
        raw = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8 ({error.reason} after {_plural(error.start, 'byte')})")

    def name(self) -> str:
        length = self.uint64()
        if not 1 <= length <= _MAX_NAME_BYTES:
            self.fail(f"the name has {_plural(length, 'byte')}; it must have 1 to {_MAX_NAME_BYTES}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            self.fail(f"the name is not UTF-8 ({error.reason} after {_plural(error.start, 'byte')})")

    def numbers(self, type_id: int, count: int) -> np.ndarray:
        values = np.frombuffer(self.take(count * _NUMBERS[type_id].itemsize), _NUMBERS[type_id])
        if type_id != _BOOL:
            return values
        if count and values.max() > 1:
            self.fail(f"a boolean is {values.max()}; it must be 0 or 1")
        return values.view(np.bool_)

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id in _NUMBERS:
            return self.numbers(type_id, 1)[0].item()
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            self.fail(f"unknown value type {type_id}; known are 0 to 12")
        if depth == _MAX_NESTING:
            self.fail(f"arrays are nested more than {_MAX_NESTING} deep")
        self.num_arrays += 1
        if self.num_arrays > _MAX_ENTRIES:
            self.fail(f"more than {_MAX_ENTRIES} arrays in the file")
        element_type = self.uint32()
        if element_type not in _LEAST_BYTES:
            self.fail(f"unknown type {element_type} of an array's elements; known are 0 to 12")
        count = self.count(_LEAST_BYTES[element_type], _MAX_HEADER_BYTES, "array element")
        if element_type in _NUMBERS:
            return self.numbers(element_type, count)
        if element_type == _STRING:
            return [self.string() for _ in range(count)]
        return [self.value(_ARRAY, depth + 1) for _ in range(count)]


def _scan(stream: io.BufferedIOBase, size: int, path: str) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of a file of `size` bytes that `stream` is at the beginning of."""
    header = _Header(stream, size, path)
    magic = header.take(min(4, size))
    if magic != b"GGUF":
        header.fail(f"not a GGUF file: it begins with {magic!r}")
    version = header.uint32()
    if version and version & 0xFFFF == 0:
        header.fail(f"big-endian (version reads as {version:#010x}); only little-endian files are supported")
    if version not in _VERSIONS:
        header.fail(f"version {version}; supported are 2 and 3")
    num_tensors = header.count(_LEAST_TENSOR, _MAX_ENTRIES, "tensor")
    num_pairs = header.count(_LEAST_PAIR, _MAX_ENTRIES, "key")

    metadata: dict[str, Any] = {}
    alignment = _DEFAULT_ALIGNMENT
    for number in range(1, num_pairs + 1):
        header.where = f"key number {number} of {num_pairs}"
        key = header.name()
        header.where = f"key {_shown(key)}"
        if key in metadata:
            header.fail("occurs twice")
        type_id = header.uint32()
        metadata[key] = value = header.value(type_id)
        if key == "general.alignment":
            if type_id != _UINT32:
                header.fail(f"must be of type uint32 ({_UINT32}), got type {type_id}")
            if value < 8 or value & (value - 1):
                header.fail(f"must be a power of two, at least 8, got {value}")
            alignment = value

    placed: dict[str, tuple[tuple[int, ...], _Format, int]] = {}
    for number in range(1, num_tensors + 1):
        header.where = f"tensor number {number} of {num_tensors}"
        name = header.name()
        header.where = f"tensor {_shown(name)}"
        if name in placed:
            header.fail("occurs twice")
        placed[name] = _description(header)

    data_start = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, (shape, storage, offset) in placed.items():
        header.where = f"tensor {_shown(name)}"
        if offset % alignment:
            header.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
        start = data_start + offset
        stop = start + math.prod(shape) // storage.block * storage.block_bytes
        if stop > size:
            header.fail(f"shape {shape} of {storage.name} takes bytes {start} to {stop} of a file of {size}")
        tensors[name] = GGUFTensor(shape, storage.name, start, stop)

    last = None
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if last is not None and tensor.start < tensors[last].stop:
            header.where = f"tensor {_shown(name)}"
            header.fail(f"starts at byte {tensor.start}, inside tensor {_shown(last)}")
        if tensor.stop > tensor.start:
            last = name
    return metadata, tensors


def _description(header: _Header) -> tuple[tuple[int, ...], _Format, int]:
    """Shape, format and offset of the tensor whose name was read last."""
    num_dims = header.uint32()
    if not 1 <= num_dims <= _MAX_DIMS:
        header.fail(f"{_plural(num_dims, 'dimension')}; there may be 1 to {_MAX_DIMS}")
    shape = tuple(header.uint64() for _ in range(num_dims))[::-1]
    storage = _FORMATS.get(type_id := header.uint32())
    if storage is None:
        header.fail(f"unknown tensor type {type_id}")
    if shape[-1] % storage.block:
        header.fail(f"shape {shape}: rows of {storage.name} must be multiples of {storage.block} long")
    if 0 in shape and math.prod(dim for dim in shape if dim) > _MAX_EMPTY:
        header.fail(f"shape {shape} is too large")
    return shape, storage, header.uint64()
