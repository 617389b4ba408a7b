"""What the TPU compiler expects of a kernel: its own cycle estimates, on a machine without a TPU.

The compiler writes them when `LIBTPU_INIT_ARGS` asks for it before libtpu is loaded, hence a process of its own. How
to read them: they are estimates, not measurements, for the grid that was compiled. The body of a `pl.when` counts as
always taken, a grid of dynamic size as very long. For Pallas kernels they include traffic to HBM at its nominal
bandwidth, for XLA's own fusions they do not, so only kernels compare with kernels. On chips with two cores (v4, v5p)
parallel grid axes are shared between both.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels_pallas import aot

_SUFFIX = "_static_llo_profile.textproto"


class Program(NamedTuple):
    """Something to compile: `factory` names a function of a module that returns the function and its arguments.

    Attributes:
      chip: One of `aot.TPUS`.
      factory: "package.module:name", imported in the other process.
      kwargs: Its arguments, such as JSON can hold.
    """

    chip: str
    factory: str
    kwargs: Mapping[str, Any]


def estimated_cycles(programs: Sequence[Program]) -> list[dict[str, int]]:
    """The compiler's cycle estimates of programs.

    Args:
      programs: What to compile, each for its chip.

    Returns:
      For every program the estimated cycles of its operations: Pallas kernels by the `name` of their `pallas_call`,
      fusions by XLA's name, without the number that XLA appends; operations of one name are added up.

    Raises:
      ValueError: A chip that is no TPU.
      ImportError: The compiler is not installed.
      RuntimeError: The other process failed, or the compiler wrote no estimates (the option is undocumented).

    >>> estimated_cycles([Program("h100", "module:function", {})])
    Traceback (most recent call last):
    ...
    ValueError: chip must be one of v4, v5e, v5p, v6e, got 'h100'
    """
    for program in programs:
        if program.chip not in aot.TPUS:
            raise ValueError(f"chip must be one of {', '.join(aot.TPUS)}, got {program.chip!r}")
        if reason := aot.missing(program.chip):
            raise ImportError(reason)
    with tempfile.TemporaryDirectory(prefix="static-report-") as folder:
        dump = f"--xla_jf_dump_static_llo_profile_to={folder}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}".strip(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        run = subprocess.run(
            [sys.executable, "-m", "kernels_pallas.static_report", folder],
            input=json.dumps(programs),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode != 0:
        raise RuntimeError(f"compiling for cycle estimates failed ({run.returncode}):\n{run.stderr[-3000:]}")
    cycles: list[dict[str, int]] = json.loads(run.stdout.splitlines()[-1])
    return cycles


def _compile_all(folder: Path, programs: Sequence[Sequence[Any]]) -> list[dict[str, int]]:
    """Runs in the other process."""
    results = []
    for program in map(Program._make, programs):
        module, _, name = program.factory.partition(":")
        function, args = getattr(importlib.import_module(module), name)(**program.kwargs)
        aot.compile_for(program.chip, function, *args)
        files = sorted(folder.glob(f"*{_SUFFIX}"))
        if not files:
            raise RuntimeError(f"this version of libtpu wrote no cycle estimates for {program}")
        cycles: dict[str, int] = {}
        for path in files:
            # Such as "mm.1_TPU v5 lite_static_llo_profile.textproto".
            operation = re.sub(r"\.\d+$", "", path.name.removesuffix(_SUFFIX).rpartition("_TPU")[0])
            text = path.read_text(encoding="utf-8")
            found = sum(int(number) for number in re.findall(r"estimated_cycles:\s*(\d+)", text))
            cycles[operation] = cycles.get(operation, 0) + found
            path.unlink()
        results.append(cycles)
    return results


if __name__ == "__main__":
    print(json.dumps(_compile_all(Path(sys.argv[1]), json.load(sys.stdin))))
