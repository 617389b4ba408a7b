"""One safetensors file: everything in its header is checked before anything is read.

The format: a little-endian u64, the length of the header; the header, a JSON object
`{name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {text: text}}`; the data, which the tensors
cover without holes or overlaps.
"""

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxlib_icml.lm.safetensors._scanner import Scanner, clip

MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
_MAX_RANK = 64
_MAX_BYTES = (1 << 63) - 1
_FIELDS = ("dtype", "shape", "data_offsets")
_CHUNK_BYTES = 1 << 19

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
"""NumPy's dtype for each dtype of the format."""

# A number is NaN or infinite if and only if all these bits of it are set.
_NON_FINITE_BITS = {
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F32": 0x7F800000,
    "F64": 0x7FF0000000000000,
}
_NON_FINITE = {DTYPES[name]: bits for name, bits in _NON_FINITE_BITS.items()}


class TensorInfo(NamedTuple):
    """Where a tensor lies: `dtype`, `shape`, and the bytes `start` to `stop` of its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A safetensors file whose header has been checked completely; the data stay on disk.

    Attributes:
      path: the file.
      tensors: dtype, shape and absolute byte range of every tensor, in the header's order.
      metadata: the header's free text.

    Args:
      path: the file.

    Raises:
      ValueError: the file cannot be read or its header is not exactly what the format allows. The message names the
        file and, where one is concerned, the tensor.

    >>> import tempfile
    >>> from jaxlib_icml.lm.safetensors import write_checkpoint
    >>> [path] = write_checkpoint(tempfile.mkdtemp(), [("x", np.arange(3.0))])
    >>> SafetensorsFile(path).read("x")
    array([0., 1., 2.])
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: {'not a file' if self.path.exists() else 'no such file'}")
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(_header_bytes(file.read(8), size, str(self.path)))
                self.tensors, self.metadata = parse_header(header, size, str(self.path))
                # The map holds on to this very file, whatever later takes its name.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        self._size = size
        self._check_size()

    def _check_size(self) -> None:
        # Touching mapped pages beyond the end of a file kills the process.
        sizes = {len(self._map), self._map.size()}
        if sizes != {self._size}:
            raise ValueError(f"{self.path}: was {self._size} bytes long when opened, now has {self._map.size()}")

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the mapped file; nothing is copied, bytes come from disk when touched.

        Args:
          name: a key of `tensors`.

        Returns:
          The tensor. Its memory is aligned if the file aligns it, which NumPy copes with either way.

        Raises:
          ValueError: there is no such tensor, or the file has changed its size since it was opened. (Cutting a file
            short while a view of it is in use cannot be caught.)
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path}: no tensor {clip(name)}")
        self._check_size()
        info = self.tensors[name]
        return np.ndarray(info.shape, info.dtype, buffer=self._map, offset=info.start)

    def read_finite(self, name: str) -> np.ndarray:
        """`read`, refusing NaN, infinities and booleans that are neither 0 nor 1.

        Args:
          name: a key of `tensors`.

        Returns:
          The tensor.

        Raises:
          ValueError: as for `read`, and for such values.
        """
        array = self.read(name)
        check_finite(array, f"{self.path}: tensor {clip(name)}")
        return array


def _header_bytes(prefix: bytes, file_size: int, where: str) -> int:
    if len(prefix) < 8:
        raise ValueError(f"{where}: {file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{where}: header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if 8 + length > file_size:
        raise ValueError(f"{where}: header of {length} bytes in a file of {file_size}")
    return length


def parse_header(header: bytes, file_size: int, where: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata that a header describes.

    Args:
      header: the header's bytes, without its length.
      file_size: bytes of the whole file: 8, the header, the data.
      where: the file's name, for messages.

    Returns:
      `(tensors, metadata)`; the tensors' byte ranges count from the start of the file.

    Raises:
      ValueError: anything that the format does not allow.
    """
    if not header.startswith(b"{"):
        raise ValueError(f"{where}: header does not begin with '{{': not a safetensors file")
    try:
        scanner = Scanner(header.decode("utf-8"), f"{where}: header")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: header is not UTF-8 at byte {error.start}") from error
    data_start = 8 + len(header)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for name in scanner.members():
        if name == METADATA:
            scanner.where = f"{where}: {METADATA}"
            metadata = {key: scanner.string() for key in scanner.members()}
        else:
            scanner.where = f"{where}: tensor {clip(name)}"
            tensors[name] = _tensor(scanner, data_start, file_size)
        scanner.where = f"{where}: header"
    scanner.end()
    _check_layout(tensors, data_start, file_size, where)
    return tensors, metadata


def _tensor(scanner: Scanner, data_start: int, file_size: int) -> TensorInfo:
    dtype: np.dtype | None = None
    shape: list[int] | None = None
    offsets: list[int] | None = None
    for field in scanner.members():
        if field == "dtype":
            code = scanner.string()
            if code not in DTYPES:
                scanner.fail(f"unknown dtype {clip(code)}; known are {', '.join(DTYPES)}")
            dtype = DTYPES[code]
        elif field == "shape":
            shape = _integers(scanner, field, _MAX_RANK)
        elif field == "data_offsets":
            offsets = _integers(scanner, field, 2)
        else:
            scanner.fail(f"unknown field {clip(field)}; a tensor has {', '.join(_FIELDS)}")
    if dtype is None or shape is None or offsets is None:
        missing = [name for name, value in zip(_FIELDS, (dtype, shape, offsets), strict=True) if value is None]
        scanner.fail(f"{', '.join(missing)} missing")
    if len(offsets) != 2:
        scanner.fail(f"data_offsets must be [start, stop], got {offsets}")
    start, stop = offsets
    if start > stop or stop > file_size - data_start:
        scanner.fail(f"data_offsets {offsets} are not in order within {file_size - data_start} bytes of data")
    extent = dtype.itemsize
    for size in shape:
        extent *= size or 1  # NumPy's limit does not let an empty axis excuse the others
    if extent > _MAX_BYTES:
        scanner.fail(f"shape {shape} is too large")
    num_bytes = 0 if 0 in shape else extent
    if stop - start != num_bytes:
        scanner.fail(f"shape {shape} of {dtype} takes {num_bytes} bytes, data_offsets {offsets} hold {stop - start}")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _integers(scanner: Scanner, field: str, most: int) -> list[int]:
    values = []
    for value in scanner.integers():
        values.append(value)
        if len(values) > most:
            scanner.fail(f"{field} has more than {most} entries")
    return values


def _check_layout(tensors: dict[str, TensorInfo], data_start: int, file_size: int, where: str) -> None:
    end, before = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            what = (
                f"overlaps {before}" if info.start < end else f"leaves {info.start - end} bytes unused after {before}"
            )
            raise ValueError(f"{where}: tensor {clip(name)}: {what}")
        end, before = info.stop, f"tensor {clip(name)}"
    if end != file_size:
        raise ValueError(f"{where}: {file_size - end} bytes unused after {before}")


def check_finite(array: np.ndarray, where: str) -> None:
    """Refuses NaN and infinities, without a temporary array of the tensor's size.

    Args:
      array: any C-contiguous array; integers pass unseen.
      where: file and tensor, for the message.

    Raises:
      ValueError: a value is NaN or infinite, or a boolean's byte is neither 0 nor 1.
    """
    is_bool = array.dtype == np.bool_
    if not is_bool and array.dtype not in _NON_FINITE:
        return
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    bits = array.reshape(-1).view(unsigned)
    mask = unsigned.type(0xFE if is_bool else _NON_FINITE[array.dtype])
    step = _CHUNK_BYTES // unsigned.itemsize
    # A chunk and this buffer stay in the processor's cache, so the file's memory is passed over once.
    buffer = np.empty(min(step, bits.size), unsigned)
    for first in range(0, bits.size, step):
        chunk = bits[first : first + step]
        masked = np.bitwise_and(chunk, mask, out=buffer[: chunk.size])
        largest = masked.max()
        if is_bool and largest:
            index = first + int(masked.argmax())
            raise ValueError(f"{where}: byte {bits[index]} at flat index {index} is not a boolean")
        if not is_bool and largest == mask:
            index = first + int(masked.argmax())
            with np.errstate(invalid="ignore"):  # signalling NaNs
                value = float(array.reshape(-1)[index])
            raise ValueError(f"{where}: {value} at flat index {index}; weights must be finite")
