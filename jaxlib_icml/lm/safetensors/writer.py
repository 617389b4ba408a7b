"""Writing checkpoints: one tensor in memory at a time, and never half a checkpoint in the folder."""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlib_icml.lm.safetensors._scanner import clip
from jaxlib_icml.lm.safetensors.checkpoint import INDEX_FILE, MODEL_FILE
from jaxlib_icml.lm.safetensors.file import DTYPES, MAX_HEADER_BYTES, METADATA, check_finite

_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 22
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class _Spec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], Any]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Any] | tuple[str, tuple[int, ...], Any, Callable[[], Any]]],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes `model.safetensors`, or several files and their index, as Hugging Face's libraries read them.

    All files are complete on disk under temporary names before the first gets its own, and the index comes last: a
    failure on the way leaves the folder as it was, a crash never leaves what looks like a checkpoint and is not one.
    (Overwriting several files cannot be done in one step: a crash within its last moment leaves none.)

    Args:
      folder: created if it is not there.
      tensors: `(name, array)`, or `(name, shape, dtype, function)` for tensors that `function()` makes when their
        turn comes, so that only one is in memory. Arrays of NumPy or JAX.
      max_shard_bytes: tensors are spread over files of at most this many bytes of data; a larger tensor has a file
        of its own.
      metadata: free text for every file; `format` is `pt` unless given, as `transformers` wants it.
      overwrite: replace a checkpoint that is in the folder.

    Returns:
      The files with tensors, in order.

    Raises:
      ValueError: a name twice or not a text, a dtype that the format lacks, NaN or infinite numbers, a function whose
        array is not as announced, a checkpoint in the folder; the message names the tensor.

    >>> import tempfile
    >>> bias = ("bias", (3,), np.float32, lambda: np.zeros(3, np.float32))
    >>> files = write_checkpoint(tempfile.mkdtemp(), [("kernel", np.ones((2, 3), np.float32)), bias])
    >>> [file.name for file in files]
    ['model.safetensors']
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    text = {"format": "pt", **(metadata or {})}
    for key, value in text.items():
        _check_text(key, "metadata: key")
        _check_text(value, f"metadata: value of {clip(key)}", allow_empty=True)
    shards = _split(_specs(tensors), max_shard_bytes)
    names = [MODEL_FILE]
    if len(shards) > 1:
        if len(shards) > 99_999:
            raise ValueError(
                f"max_shard_bytes: {max_shard_bytes} would make {len(shards)} files, at most 99999 allowed"
            )
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder.mkdir(parents=True, exist_ok=True)
    old = _existing(folder)
    if old and not overwrite:
        raise ValueError(f"folder: {folder} already holds {old[0].name}; overwrite=True replaces it")

    temporary = {name: folder / f".{name}.{secrets.token_hex(8)}.tmp" for name in names}
    index = folder / f".{INDEX_FILE}.{secrets.token_hex(8)}.tmp"
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_file(temporary[name], shard, text)
        if len(shards) > 1:
            _write_index(index, names, shards)
        # What makes a folder a checkpoint goes first and comes last.
        if len(shards) > 1:
            (folder / MODEL_FILE).unlink(missing_ok=True)
        (folder / INDEX_FILE).unlink(missing_ok=True)
        for name, path in temporary.items():
            os.replace(path, folder / name)
        if len(shards) > 1:
            os.replace(index, folder / INDEX_FILE)
    finally:
        for path in (*temporary.values(), index):
            path.unlink(missing_ok=True)
    for path in old:
        if path.name not in {*names, MODEL_FILE, INDEX_FILE}:
            path.unlink(missing_ok=True)
    _sync_folder(folder)
    return tuple(folder / name for name in names)


def _check_text(value: Any, what: str, allow_empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or allow_empty):
        raise ValueError(f"{what} must be {'a' if allow_empty else 'a non-empty'} text, got {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {clip(value)} holds half a surrogate pair") from error


def _specs(tensors: Iterable[Any]) -> list[_Spec]:
    specs: dict[str, _Spec] = {}
    for item in tensors:
        if not isinstance(item, tuple) or len(item) not in (2, 4):
            raise ValueError(
                f"tensors: expected (name, array) or (name, shape, dtype, function), got {clip(repr(item))}"
            )
        name = item[0]
        _check_text(name, "tensors: name")
        if name == METADATA or name in specs:
            raise ValueError(f"tensors: {clip(name)} " + ("is reserved" if name == METADATA else "is given twice"))
        if len(item) == 2:
            array = item[1] if hasattr(item[1], "dtype") else np.asarray(item[1])
            specs[name] = _Spec(name, tuple(array.shape), _dtype(array.dtype, name), _constant(array))
        else:
            shape, make = tuple(item[1]), item[3]
            if any(not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 0 for size in shape):
                raise ValueError(f"tensors: {clip(name)}: shape must hold sizes, got {shape}")
            if not callable(make):
                raise ValueError(
                    f"tensors: {clip(name)}: the fourth entry must be a function, got {type(make).__name__}"
                )
            specs[name] = _Spec(name, tuple(int(size) for size in shape), _dtype(item[2], name), make)
    if not specs:
        raise ValueError("tensors: nothing to write")
    return list(specs.values())


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _dtype(dtype: Any, name: str) -> np.dtype:
    try:
        found = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        found = None
    if found not in _CODES:
        raise ValueError(f"tensors: {clip(name)}: dtype {dtype} is none of {', '.join(map(str, _CODES))}")
    return found


def _split(specs: list[_Spec], max_shard_bytes: int) -> list[list[_Spec]]:
    shards: list[list[_Spec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    # Wide dtypes first: then every tensor begins at a multiple of its own item size.
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def _existing(folder: Path) -> list[Path]:
    marks = [path for path in (folder / MODEL_FILE, folder / INDEX_FILE) if os.path.lexists(path)]
    return marks + sorted(path for path in folder.iterdir() if _SHARD.fullmatch(path.name))


def _header(shard: list[_Spec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {METADATA: dict(metadata)}
    start = 0
    for spec in shard:
        stop = start + spec.num_bytes
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": spec.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"tensors: names of a file take {len(text)} bytes, more than the {MAX_HEADER_BYTES} allowed")
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, shard: list[_Spec], metadata: Mapping[str, str]) -> None:
    with path.open("xb") as file:
        file.write(_header(shard, metadata))
        for spec in shard:
            array = np.asarray(spec.make())
            if array.shape != spec.shape or array.dtype.newbyteorder("<") != spec.dtype:
                raise ValueError(
                    f"tensors: {clip(spec.name)}: announced as {spec.dtype} {spec.shape}, "
                    f"made as {array.dtype} {array.shape}"
                )
            for block in _blocks(array):
                block = np.ascontiguousarray(block, spec.dtype)
                check_finite(block, f"tensors: {clip(spec.name)}")
                file.write(block.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive parts of an array in C order, none much larger than a few megabytes if that can be."""
    if array.size == 0:
        return
    if array.ndim == 0 or array.nbytes <= _CHUNK_BYTES:
        yield array
    elif len(array) == 1:
        yield from _blocks(array[0])
    else:
        rows = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
        for first in range(0, len(array), rows):
            block = array[first : first + rows]
            yield from _blocks(block) if rows == 1 else [block]


def _write_index(path: Path, names: list[str], shards: list[list[_Spec]]) -> None:
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for shard in shards for spec in shard)},
        "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
    }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
