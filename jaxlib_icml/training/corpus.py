"""Where training text comes from: the Python standard library, or any file, folder, glob or JSONL file.

A corpus is two lists of documents, one to learn from and one held out. Which documents are held out depends
on their names and sizes only, so every process, and every later run on the same files, makes the same split.
"""

import functools
import glob
import hashlib
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

__all__ = ["Corpus", "Document", "load_corpus", "standard_library_corpus"]

# Left out of the default corpus: what distributors ship separately or not at all (test suites, Tk programs,
# lib2to3, distutils), so that the corpus is a function of the Python version and not of who packaged it.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    (
        *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"),
        *("idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
        # Generated tables that are near copies of one another: held-out files would repeat training files.
        "encodings",
    )
)
# Written per machine (build configuration) or per distribution.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    """One text with the name it is known by.

    Args:
      name: path relative to the corpus root (with ``:line`` for JSONL); the held-out split hashes it.
      text: the contents; never empty in a loaded corpus, always encodable as UTF-8.
    """

    name: str
    text: str

    @functools.cached_property
    def utf8(self) -> bytes:
        """The contents as bytes, the unit of bits per byte."""
        return self.text.encode("utf-8")

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.utf8)


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents never trained on.

    Args:
      train: training documents.
      held_out: documents for validation; empty only if nothing was to be held out.
      description: one line for people: what it is, how many files and bytes, what was skipped.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    description: str

    @functools.cached_property
    def train_bytes(self) -> int:
        """UTF-8 bytes of the training documents."""
        return sum(document.num_bytes for document in self.train)

    @functools.cached_property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes of the held-out documents, the denominator of bits per byte."""
        return sum(document.num_bytes for document in self.held_out)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over names, contents, their order and the split: equal only for equal corpora."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(len(part).to_bytes(8, "little"))
            for document in part:
                for field in (document.name.encode("utf-8", "surrogateescape"), document.utf8):
                    # Lengths keep fields from running together.
                    digest.update(len(field).to_bytes(8, "little"))
                    digest.update(field)
        return digest.hexdigest()


def standard_library_corpus(*, held_out_fraction: float = 0.05) -> Corpus:
    """The running Python's standard-library sources, about 9 MB: the corpus that is on every machine.

    All ``.py`` files below the standard-library folder in the order of their relative POSIX paths, except
    test suites, ``idlelib``, ``tkinter``, ``turtledemo``, ``lib2to3``, ``distutils`` (all of which some
    distributions leave out), ``site-packages``, machine-specific build configuration, the generated
    tables of ``encodings`` (near copies of one another, which would leak into the held-out files), and files
    that are empty or not UTF-8. The result therefore depends on the Python version alone.

    Args:
      held_out_fraction: share of the bytes to hold out, in [0, 1), as in `load_corpus`.

    Returns:
      The corpus; ``held_out`` is about half a megabyte by default.

    Raises:
      ValueError: if this Python carries no readable standard-library sources.

    Example:
      >>> corpus = standard_library_corpus()
      >>> corpus.train_bytes > 8_000_000 and corpus.held_out_bytes > 300_000
      True
    """
    root = Path(sysconfig.get_paths()["stdlib"])

    def wanted(relative: PurePosixPath) -> bool:
        return (
            relative.suffix == ".py"
            and not relative.parts[0].startswith("config-")
            and not relative.name.startswith(_STDLIB_SKIPPED_PREFIXES)
        )

    documents, _ = _read_files(root, _walk(root, _STDLIB_SKIPPED_FOLDERS), text_field="text", wanted=wanted)
    if not documents:
        raise ValueError(f"no standard-library sources below {root}: name a file or folder of text instead")
    version = ".".join(map(str, sys.version_info[:3]))
    return _split(documents, held_out_fraction, f"Python {version} standard library", "")


def load_corpus(
    path: str | os.PathLike[str] | None = None, *, held_out_fraction: float = 0.05, text_field: str = "text"
) -> Corpus:
    """Loads text from a file, a folder, a glob or JSONL, and holds part of it out.

    A folder is read recursively in the order of relative paths; hidden files and folders, symbolic links,
    binary and empty files are skipped, and the description counts those skipped. A glob (``*``, ``?``, ``[``;
    ``**`` crosses folders) is treated the same way. ``.jsonl`` files hold one JSON object per line, each a
    document.

    Documents are held out whole, in the order of the SHA-256 of their names, until ``held_out_fraction`` of
    the bytes is reached. Where documents are too few or too large for that (a single file, say), the tail of
    each one is held out, cut at a line where possible.

    Args:
      path: a file, folder or glob; None is `standard_library_corpus`.
      held_out_fraction: share of the bytes to hold out, in [0, 1).
      text_field: the member of each JSONL object that holds the text.

    Returns:
      The corpus. Names are relative to the folder (or the fixed part of the glob), so they do not depend on
      where it lies.

    Raises:
      ValueError: missing path, empty corpus, a binary file named explicitly, a bad JSONL line (with file and
        line number), or a fraction outside [0, 1).

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> _ = (folder / "notes.txt").write_text("one line\\n" * 20)
      >>> load_corpus(folder / "notes.txt", held_out_fraction=0.25).held_out_bytes
      45
    """
    _check_fraction(held_out_fraction)
    if path is None:
        return standard_library_corpus(held_out_fraction=held_out_fraction)
    spelled = os.fspath(path)
    named = Path(spelled).expanduser()
    if not spelled:
        raise ValueError("path is empty: name a file, a folder or a glob")
    if named.is_dir():
        documents, skipped = _read_files(named, _walk(named), text_field)
    elif named.exists():
        documents = _read_file(named, named.name, text_field)
        skipped = ""
    elif glob.has_magic(spelled):
        root = _fixed_part(named)
        matches = (Path(match) for match in glob.iglob(os.fspath(named), recursive=True))
        documents, skipped = _read_files(root, matches, text_field)
    else:
        raise ValueError(f"{spelled}: no such file or folder")
    if not documents:
        raise ValueError(f"{spelled}: empty corpus, no text found{skipped}")
    return _split(documents, held_out_fraction, spelled, skipped)


def _check_fraction(held_out_fraction: float) -> None:
    if not 0.0 <= held_out_fraction < 1.0:
        raise ValueError(f"held_out_fraction must be in [0, 1), got {held_out_fraction}")


def _walk(root: Path, skipped_folders: frozenset[str] = frozenset()) -> Iterable[Path]:
    for folder, folders, files in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        for name in files:
            yield Path(folder, name)


def _fixed_part(pattern: Path) -> Path:
    """The leading components of a glob that contain no wildcard."""
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()


def _read_files(
    root: Path,
    paths: Iterable[Path],
    text_field: str,
    wanted: Callable[[PurePosixPath], bool] = lambda relative: not relative.name.startswith("."),
) -> tuple[list[Document], str]:
    """Documents of the text files among `paths`, sorted by path below `root`, and what was skipped."""
    root = Path(os.path.abspath(root))
    real_root = root.resolve()
    chosen: dict[str, Path] = {}
    links = 0
    for path in paths:
        path = Path(os.path.abspath(path))
        relative = PurePath(os.path.relpath(path, root))
        if not wanted(PurePosixPath(relative.as_posix())) or path.is_dir():
            continue
        # A path without symbolic links below the root resolves to itself; anything else might lead out of the
        # folder.
        if path.resolve() != real_root / relative:
            links += 1
        elif stat.S_ISREG(path.stat().st_mode):
            chosen[relative.as_posix()] = path
    documents: list[Document] = []
    binaries = 0
    for name in sorted(chosen):
        data = _read_bytes(chosen[name])
        if _binary_reason(data) is None:
            documents.extend(_parse(data, chosen[name], name, text_field))
        else:
            binaries += 1
    counts = [
        f"{count} {what}{'s' if count > 1 else ''}"
        for count, what in ((binaries, "binary file"), (links, "symbolic link"))
        if count
    ]
    return documents, f" (skipped {' and '.join(counts)})" if counts else ""


def _read_file(path: Path, name: str, text_field: str) -> list[Document]:
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file")
    data = _read_bytes(path)
    reason = _binary_reason(data)
    if reason is not None:
        raise ValueError(f"{path}: binary file ({reason}); a corpus is UTF-8 text")
    return _parse(data, path, name, text_field)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _binary_reason(data: bytes) -> str | None:
    nul = data.find(b"\0")
    if nul >= 0:
        return f"NUL byte at offset {nul}"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at offset {error.start}"
    return None


def _parse(data: bytes, path: Path, name: str, text_field: str) -> list[Document]:
    if path.suffix == ".jsonl":
        return _parse_jsonl(data, path, name, text_field)
    return [Document(name, data.decode("utf-8"))] if data else []


def _parse_jsonl(data: bytes, path: Path, name: str, text_field: str) -> list[Document]:
    documents: list[Document] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ValueError(f"{where}: not valid JSON: {reason}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
        if text_field not in record:
            present = ", ".join(sorted(map(repr, record))[:8]) or "none"
            raise ValueError(f"{where}: no field {text_field!r}; fields present: {present}")
        text = record[text_field]
        if not isinstance(text, str):
            raise ValueError(f"{where}: field {text_field!r} must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: field {text_field!r} holds half a surrogate pair") from error
        if text:
            documents.append(Document(f"{name}:{number}", text))
    return documents


def _split(documents: Sequence[Document], held_out_fraction: float, source: str, skipped: str) -> Corpus:
    _check_fraction(held_out_fraction)
    budget = held_out_fraction * sum(document.num_bytes for document in documents)
    held_names: set[str] = set()
    held_bytes = 0
    for document in sorted(documents, key=_name_hash):
        if held_bytes >= 0.9 * budget:
            break
        if held_bytes + document.num_bytes <= budget:
            held_names.add(document.name)
            held_bytes += document.num_bytes
    if held_bytes >= 0.5 * budget:
        train = tuple(document for document in documents if document.name not in held_names)
        held_out = tuple(document for document in documents if document.name in held_names)
    else:
        heads_and_tails = [_cut_tail(document, held_out_fraction) for document in documents]
        train = tuple(head for head, _ in heads_and_tails if head.text)
        held_out = tuple(tail for _, tail in heads_and_tails if tail.text)
        if not held_out or not train:
            raise ValueError(
                f"{source}: corpus of {sum(document.num_bytes for document in documents)} bytes is too small "
                f"to hold out {held_out_fraction:.3g} of it"
            )

    def count(part: tuple[Document, ...]) -> str:
        megabytes = sum(document.num_bytes for document in part) / 1e6
        return f"{len(part)} documents ({megabytes:.3g} MB)"

    return Corpus(train, held_out, f"{source}: train {count(train)}, held out {count(held_out)}{skipped}")


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()


def _cut_tail(document: Document, fraction: float) -> tuple[Document, Document]:
    text = document.text
    cut = len(text) - round(fraction * len(text))
    line = text.rfind("\n", 0, cut) + 1
    # A line start is taken only if it is close: one line may be the whole file.
    if len(text) - line <= 2 * (len(text) - cut):
        cut = line or cut
    return Document(document.name, text[:cut]), Document(f"{document.name}#tail", text[cut:])
