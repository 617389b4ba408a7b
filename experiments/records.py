"""Result files: plain JSON, written whole or not at all, with nothing of the machine's names in them."""

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from experiments.protocol import Scale

RESULTS = Path(__file__).parent / "results"

_VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")
_VERSIONS_IF_USED = ("torch", "sklearn")


def plain(value: Any) -> Any:
    """Returns `value` as JSON types: arrays as lists, floats at seven digits, nan and inf as strings.

    >>> plain({"loss": np.float32(0.1), "steps": np.arange(3), "gap": float("nan")})
    {'loss': 0.1, 'steps': [0, 1, 2], 'gap': 'nan'}

    Raises:
      TypeError: If there is something JSON has no place for.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(float(value))
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        is_standard = array.dtype.kind in "biufSU"
        return plain((array if is_standard else array.astype(np.float32)).tolist())  # bfloat16 and the like
    raise TypeError(f"JSON cannot hold a {type(value).__name__}; give numbers, strings, lists, dicts, arrays")


def environment() -> dict[str, Any]:
    """Returns versions and the kind of machine: no host name, no user, no path."""
    import jax

    versions = {}
    for package in (*_VERSIONS, *(name for name in _VERSIONS_IF_USED if name in sys.modules)):
        try:
            versions[package] = version({"sklearn": "scikit-learn"}.get(package, package))
        except PackageNotFoundError:
            continue
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}, {cores} CPU cores, "
        f"{jax.device_count()} x {device.device_kind}",
    }


def file_stem(folder: Path, name: str, scale: Scale) -> Path:
    """Returns where the results of `name` lie, without a suffix; full-scale ones lie beside the laptop's."""
    return folder / (f"{name}.full" if scale == "full" else name)


def write_together(files: Mapping[Path, Callable[[Path], object]]) -> None:
    """Writes all of `files` or, when any writer raises, leaves what was there untouched.

    Args:
      files: Path to a function that writes its content to the (temporary) path it is given.
    """
    with ExitStack() as stack:
        written: dict[Path, Path] = {}
        for path, write in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
            os.close(handle)
            written[path] = Path(name)
            stack.callback(Path(name).unlink, missing_ok=True)
            write(Path(name))
            Path(name).chmod(0o644)  # mkstemp makes files only their owner can read
        for path, temporary in written.items():
            temporary.replace(path)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes `record` to `path`, keys in the order given."""
    text = json.dumps(plain(record), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the record in `path`.

    Raises:
      ValueError: If it is not one of ours.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(record, dict) or "name" not in record:
        raise ValueError(f"{path.name} is not a result file: it has no name")
    return record
