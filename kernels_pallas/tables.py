"""Results of the commands: tables as text, and as records that `python -m experiments report` shows."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


class Table(NamedTuple):
    """What a command found.

    Attributes:
      name: Under which it is kept, such as "kernels/static_report".
      title: One line.
      header: Names of the columns.
      rows: Cells as they are shown.
      notes: Sentences that a reader should know.
      data: The numbers behind the rows, such as JSON can hold.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str]
    data: Any

    def text(self) -> str:
        """Aligned columns.

        >>> print(Table("t", "T", ("a", "bb"), [("1", "2"), ("333", "4")], ["Note."], []).text())
        a    bb
        1    2
        333  4
        Note.
        """
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*shown, *self.notes])

    def write(self, path: Path, device: str) -> None:
        """Writes the record: versions and the kind of device, nothing of the machine's names."""
        record: Mapping[str, Any] = {
            "name": self.name,
            "kind": "kernels",
            "title": self.title,
            "python": platform.python_version(),
            "versions": versions(),
            "platform": device,
            "header": self.header,
            "rows": self.rows,
            "notes": self.notes,
            "data": self.data,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of the packages that decide over the results, those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
