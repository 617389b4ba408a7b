"""What the compilers make of a kernel, on a machine without the chip: cycle estimates, schedules, registers, memory.

The compilers write it when environment variables ask for it before they are loaded, hence a process of its own. How to
read the cycles of TPUs: they are estimates, not measurements, for the grid that was compiled. The body of a `pl.when`
counts as always taken, a grid of dynamic size as very long. For Pallas kernels they include traffic to HBM at its
nominal bandwidth, for XLA's own fusions they do not, so only kernels compare with kernels. On chips with two cores
(v4, v5p) parallel grid axes are shared between both. For GPUs there are no such estimates.
"""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels_pallas import aot, llo, ptx


class Program(NamedTuple):
    """Something to compile: `factory` names a function of a module that returns the function and its arguments.

    Attributes:
      chip: One of `aot.CHIPS`.
      factory: "package.module:name", imported in the other process.
      kwargs: Its arguments, such as JSON can hold.
    """

    chip: str
    factory: str
    kwargs: Mapping[str, Any]


class Kernel(NamedTuple):
    """One Pallas kernel of a program.

    Attributes:
      name: Its name in `pallas_call` or `plgpu.kernel`.
      cycles: TPU: the compiler's estimate; None where it wrote none.
      schedule: TPU: its bundles; None where the compiler wrote none.
      code: GPU: its machine code.
    """

    name: str
    cycles: int | None = None
    schedule: llo.Schedule | None = None
    code: ptx.Code | None = None


class Evidence(NamedTuple):
    """What compiling one program showed.

    Attributes:
      error: Why the compiler refused the program; None if it did not. Nothing else is known then.
      kernels: The Pallas kernels.
      other_cycles: TPU: the estimate for all that is not a Pallas kernel, without traffic to HBM.
      argument_bytes: In main memory.
      output_bytes: In main memory.
      temp_bytes: In main memory, besides arguments and outputs.
    """

    error: str | None = None
    kernels: tuple[Kernel, ...] = ()
    other_cycles: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0

    @property
    def cycles(self) -> int | None:
        """Estimated cycles of all Pallas kernels together; None if one has no estimate."""
        found = [kernel.cycles for kernel in self.kernels]
        return None if not found or None in found else sum(c for c in found if c is not None)


def estimated_cycles(programs: Sequence[Program]) -> list[dict[str, int]]:
    """The TPU compiler's cycle estimates of programs.

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
    results = []
    for program, result in zip(programs, _compiled(programs, schedules=False), strict=True):
        if result["error"] is not None:
            raise RuntimeError(f"compiling for cycle estimates failed:\n{result['error']}")
        if not result["cycles"]:
            raise RuntimeError(f"this version of libtpu wrote no cycle estimates for {program}")
        results.append(result["cycles"])
    return results


def evidence(programs: Sequence[Program], *, schedules: bool = True) -> Iterator[Evidence]:
    """Compiles programs, and collects what the compilers write about their Pallas kernels.

    Args:
      programs: What to compile, each for its chip.
      schedules: Whether to read the schedules of TPU kernels; they take longer than all the rest.

    Yields:
      What was found for every program, in order, as soon as it is known. A program that does not compile has `error`.

    Raises:
      ValueError: An unknown chip.
      ImportError: A compiler is not installed.
      RuntimeError: The other process could not begin.
    """
    for result in _compiled(programs, schedules=schedules):
        if result["error"] is not None:
            yield Evidence(error=result["error"])
            continue
        cycles: dict[str, int] = dict(result["cycles"])
        kernels = []
        for name in result["kernels"]:
            schedule = result["schedules"].get(name)
            plain = llo.without_number(name)
            kernels.append(
                # Estimates of one name are added up: the first kernel of that name carries them all.
                Kernel(plain, cycles.pop(plain, None), None if schedule is None else llo.Schedule(*schedule))
            )
        kernels += [Kernel(re.sub(r"_\d+$", "", name), code=ptx.Code(*code)) for name, code in result["code"].items()]
        yield Evidence(None, tuple(kernels), sum(cycles.values()), *result["bytes"])


_STARTED, _RESULT = "static report: started", "static report: result "


def _compiled(programs: Sequence[Program], *, schedules: bool) -> Iterator[dict[str, Any]]:
    """Results of `_compile`; a program that ends the other process has that as its error."""
    for program in programs:
        if reason := aot.missing(program.chip):
            raise ImportError(reason)
    done = 0
    while done < len(programs):
        _, same = next(itertools.groupby(programs[done:], _process_of))
        batch = list(same)
        estimates = batch[0].chip != "v4"
        begin, started = done, False
        with tempfile.TemporaryDirectory(prefix="static-report-") as folder, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "kernels_pallas.static_report", folder, "all" if schedules else "cycles"],
                env=_environment(llo.flags(folder, estimates=estimates, schedules=schedules), folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(batch))
                process.stdin.close()
                for line in process.stdout:
                    started |= line.startswith(_STARTED)
                    if line.startswith(_RESULT):
                        done += 1
                        yield json.loads(line.removeprefix(_RESULT))
                code = process.wait()
            finally:
                process.kill()
                process.stdout.close()
                process.wait()
            errors.seek(0)
            said = errors.read()[-3000:]
        if done - begin == len(batch) and code == 0:
            continue
        if not started or code > 0:
            raise RuntimeError(f"the process that compiles failed ({code}):\n{said}")
        done += 1
        yield {"error": f"the compiler ended its process ({code}): {said[-500:]}"}


def _process_of(program: Program) -> tuple[bool, str | None]:
    """Programs of which this differs need processes of their own.

    The v4 compiler ends its process where it is asked for estimates; Mosaic GPU writes nothing about a kernel that it
    compiled before, for whichever GPU.
    """
    return program.chip == "v4", None if program.chip in aot.TPUS else program.chip


def _environment(flags: str, folder: str) -> dict[str, str]:
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    return (
        dict(os.environ)
        | ptx.ENVIRONMENT
        | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"{given} {flags}".strip(),
            "MOSAIC_GPU_DUMP_TO": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
    )


def _compile(folder: Path, program: Program, schedules: bool) -> dict[str, Any]:
    """Runs in the other process."""
    for path in folder.iterdir():
        path.unlink()
    module, _, name = program.factory.partition(":")
    function, args = getattr(importlib.import_module(module), name)(**program.kwargs)
    try:
        compiled = aot.compile_for(program.chip, function, *args)
    except Exception as error:  # the compilers raise all kinds
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    is_tpu = program.chip in aot.TPUS
    text = compiled.as_text() or ""
    code = {} if is_tpu else ptx.kernels(folder)
    if "mosaic_gpu" in text and not code:
        return {"error": "Mosaic GPU wrote nothing: it compiled the same kernel before, or this version writes nothing"}
    memory = compiled.memory_analysis()
    return {
        "error": None,
        "cycles": llo.cycles(folder) if is_tpu else {},
        "kernels": re.findall(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', text),
        "schedules": llo.schedules(folder) if is_tpu and schedules else {},
        "code": code,
        "bytes": [getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp")],
    }


def _main(folder: Path, schedules: bool) -> None:
    programs = json.load(sys.stdin)
    print(_STARTED, flush=True)
    for program in map(Program._make, programs):
        print(_RESULT + json.dumps(_compile(folder, program, schedules)), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2] == "all")
