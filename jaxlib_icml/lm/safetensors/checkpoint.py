"""A checkpoint: one safetensors file, or a folder whose index says which file holds which tensor."""

import os
from pathlib import Path

import numpy as np

from jaxlib_icml.lm.safetensors._scanner import Scanner, clip
from jaxlib_icml.lm.safetensors.file import SafetensorsFile, TensorInfo

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_MAX_INDEX_BYTES = 100_000_000


class Checkpoint:
    """The tensors of a model, wherever they lie; opened and checked completely, read one by one.

    Attributes:
      path: the folder or file.
      metadata: the free text that all files agree on.

    Args:
      path: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files it names; or one
        `.safetensors` file.
      follow_symlinks: also read files of the folder that are links to somewhere outside it, as in the snapshot
        folders of Hugging Face's cache. Only for folders whose links were made by someone you trust.

    Raises:
      ValueError: a file is missing, is not what the format allows, lies outside the folder, or the index and the
        files disagree. The message names the file and the tensor.

    >>> import tempfile
    >>> from jaxlib_icml.lm.safetensors import write_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> _ = write_checkpoint(folder, [("x", np.zeros(3)), ("y", np.ones(2))], max_shard_bytes=24)
    >>> checkpoint = Checkpoint(folder)
    >>> checkpoint.names(), checkpoint.read("y")
    (('x', 'y'), array([1., 1.]))
    """

    def __init__(self, path: str | os.PathLike[str], *, follow_symlinks: bool = False):
        self.path = Path(path)
        if not self.path.exists():
            raise ValueError(f"{self.path}: no such file or folder")
        if not self.path.is_dir():
            if self.path.suffix != _SUFFIX:
                raise ValueError(f"{self.path}: not a folder and not a {_SUFFIX} file")
            file = SafetensorsFile(self.path)
            self._file_of = dict.fromkeys(file.tensors, file)
        else:
            whole, index = self.path / MODEL_FILE, self.path / INDEX_FILE
            # A link into nowhere does not "exist".
            has_whole, has_index = (os.path.lexists(candidate) for candidate in (whole, index))
            if has_whole and has_index:
                raise ValueError(f"{self.path}: holds both {MODEL_FILE} and {INDEX_FILE}; name the file you mean")
            if not has_whole and not has_index:
                raise ValueError(f"{self.path}: holds neither {MODEL_FILE} nor {INDEX_FILE}")
            _check_inside(whole if has_whole else index, follow_symlinks)
            if has_whole:
                file = SafetensorsFile(whole)
                self._file_of = dict.fromkeys(file.tensors, file)
            else:
                self._file_of = _open_shards(index, follow_symlinks)
        files = list({file.path: file for file in self._file_of.values()}.values())
        first = files[0].metadata if files else {}
        self.metadata = {key: value for key, value in first.items() if all(f.metadata.get(key) == value for f in files)}

    def names(self) -> tuple[str, ...]:
        """All tensors, in the order of the file or of the index."""
        return tuple(self._file_of)

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor.

        Raises:
          ValueError: there is no such tensor.
        """
        if name not in self._file_of:
            raise ValueError(f"{self.path}: no tensor {clip(name)}")
        return self._file_of[name]

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor (ValueError: there is none of that name)."""
        return self.file(name).tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file; see `SafetensorsFile.read`."""
        return self.file(name).read(name)

    def read_finite(self, name: str) -> np.ndarray:
        """`read`, refusing NaN and infinities; see `SafetensorsFile.read_finite`."""
        return self.file(name).read_finite(name)


def open_checkpoint(path: str | os.PathLike[str], *, follow_symlinks: bool = False) -> Checkpoint:
    """Opens a checkpoint; see `Checkpoint`.

    Args:
      path: a folder or one `.safetensors` file.
      follow_symlinks: also read files of the folder that are links to somewhere outside it.

    Returns:
      The checkpoint.

    Raises:
      ValueError: it is not a complete, consistent checkpoint.

    >>> open_checkpoint("nowhere")
    Traceback (most recent call last):
      ...
    ValueError: nowhere: no such file or folder
    """
    return Checkpoint(path, follow_symlinks=follow_symlinks)


def _check_inside(path: Path, follow_symlinks: bool) -> None:
    """Refuses a file of a folder that is a link out of it."""
    try:
        target, folder = path.resolve(), path.parent.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ValueError(f"{path}: cannot be followed: {error}") from error
    if not follow_symlinks and not target.is_relative_to(folder):
        raise ValueError(f"{path}: links to {target}, outside its folder; follow_symlinks=True allows that")


def _open_shards(index: Path, follow_symlinks: bool) -> dict[str, SafetensorsFile]:
    """Opens the files that an index names; maps tensors to files after checking both against each other."""
    shard_of = parse_index(_read_index(index), str(index))
    files: dict[str, SafetensorsFile] = {}
    for name, shard in shard_of.items():
        if shard not in files:
            path = index.parent / shard
            if not os.path.lexists(path):
                raise ValueError(f"{index}: tensor {clip(name)}: no file {clip(shard)} in the folder")
            _check_inside(path, follow_symlinks)
            files[shard] = SafetensorsFile(path)
        if name not in files[shard].tensors:
            raise ValueError(f"{index}: tensor {clip(name)} is not in {shard}")
    for shard, file in files.items():
        for name in file.tensors:
            if name not in shard_of:
                raise ValueError(f"{file.path}: tensor {clip(name)} is not in {index.name}")
            if shard_of[name] != shard:
                raise ValueError(f"{file.path}: tensor {clip(name)} is also in {shard_of[name]}, as {index.name} says")
    return {name: files[shard] for name, shard in shard_of.items()}


def _read_index(index: Path) -> bytes:
    if not index.is_file():
        raise ValueError(f"{index}: not a file")
    try:
        with index.open("rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error.strerror or error}") from error
    if len(text) > _MAX_INDEX_BYTES:
        raise ValueError(f"{index}: more than the {_MAX_INDEX_BYTES} bytes allowed")
    return text


def parse_index(text: bytes, where: str) -> dict[str, str]:
    """The `weight_map` of an index: which file holds each tensor.

    Args:
      text: JSON, `{"metadata": ..., "weight_map": {tensor: file}}`.
      where: the index's name, for messages.

    Returns:
      File names by tensor; each is the plain name of a `.safetensors` file.

    Raises:
      ValueError: not such JSON, or a file name that could mean something outside the folder.
    """
    try:
        scanner = Scanner(text.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from error
    shard_of: dict[str, str] = {}
    for key in scanner.members():
        if key != "weight_map":
            scanner.skip()
            continue
        for name in scanner.members():
            scanner.where = f"{where}: tensor {clip(name)}"
            shard_of[name] = shard = scanner.string()
            plain = shard.isprintable() and not set(shard) & set('/\\:"<>|?*') and not shard.startswith(".")
            if not plain or not shard.endswith(_SUFFIX):
                scanner.fail(f"{clip(shard)} is not the plain name of a {_SUFFIX} file")
            scanner.where = where
    scanner.end()
    if not shard_of:
        raise ValueError(f"{where}: weight_map names no tensors")
    return shard_of
