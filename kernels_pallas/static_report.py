"""What the compilers make of a kernel, on a machine without the chip: cycle estimates, schedules, registers, memory.

The compilers write it when environment variables ask for it before they are loaded, hence processes of their own. How
to read the cycles of TPUs: they are estimates, not measurements, for the grid that was compiled. Every Pallas kernel is
compiled by itself with its operands in HBM, whose traffic at nominal bandwidth the estimate includes: inside a
program XLA may keep small operands in VMEM. The body of a `pl.when` counts as always taken, a value in scalar memory as
0, a grid of dynamic size as very long. On chips with two cores (v4, v5p) parallel grid axes are shared between both.
For GPUs there are no such estimates.
"""

import functools
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from kernels_pallas import aot, autotune, llo, ptx


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
      argument_bytes: In main memory.
      output_bytes: In main memory.
      temp_bytes: In main memory, besides arguments and outputs.
    """

    error: str | None = None
    kernels: tuple[Kernel, ...] = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0

    @property
    def cycles(self) -> int | None:
        """Estimated cycles of all Pallas kernels together; None if one has no estimate."""
        found = [kernel.cycles for kernel in self.kernels]
        return None if not found or None in found else sum(c for c in found if c is not None)


def estimated_cycles(programs: Sequence[Program]) -> list[dict[str, int]]:
    """The TPU compiler's cycle estimates of the Pallas kernels in programs.

    Args:
      programs: What to compile, each for its chip.

    Returns:
      For every program the estimated cycles of its Pallas kernels by the `name` of their `pallas_call`; those of one
      name are added up.

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
    for program, found in zip(programs, evidence(programs, schedules=False), strict=True):
        if found.error is not None:
            raise RuntimeError(f"compiling for cycle estimates failed:\n{found.error}")
        if found.cycles is None:
            raise RuntimeError(f"this version of libtpu wrote no cycle estimates for {program}")
        cycles: dict[str, int] = {}
        for kernel in found.kernels:
            cycles[kernel.name] = cycles.get(kernel.name, 0) + (kernel.cycles or 0)
        results.append(cycles)
    return results


def evidence(programs: Sequence[Program], *, schedules: bool = True) -> Iterator[Evidence]:
    """Compiles programs, and collects what the compilers write about their Pallas kernels.

    Args:
      programs: What to compile, each for its chip.
      schedules: Whether to read the schedules of TPU kernels, and to compile the programs around them for their bytes;
        that takes longer than all the rest.

    Yields:
      What was found for every program, in order, as soon as it is known. A program that does not compile has `error`.

    Raises:
      ValueError: An unknown chip.
      ImportError: A compiler is not installed.
      RuntimeError: The other process could not begin.
    """
    whole = _compiled([p for p in programs if p.chip in aot.TPUS] if schedules else [], "whole")
    for program, result in zip(programs, _compiled(programs, "schedules" if schedules else "cycles"), strict=True):
        if program.chip in aot.TPUS and schedules:
            around = next(whole)
            result |= {name: around[name] for name in ("error", "bytes") if result["error"] is None and name in around}
        if result["error"] is not None:
            yield Evidence(error=result["error"])
            continue
        kernels = [
            Kernel(name, cycles, None if schedule is None else llo.Schedule(*schedule))
            for name, cycles, schedule in result["kernels"]
        ]
        kernels += [Kernel(re.sub(r"_\d+$", "", name), code=ptx.Code(*code)) for name, code in result["code"].items()]
        yield Evidence(None, tuple(kernels), *result["bytes"])


_STARTED, _RESULT = "static report: started", "static report: result "


_MOST = 16  # programs of one process, whose memory grows


def _compiled(programs: Sequence[Program], mode: str) -> Iterator[dict[str, Any]]:
    """Results of `_compile`; a program that ends the other process has that as its error."""
    for program in programs:
        if reason := aot.missing(program.chip):
            raise ImportError(reason)
    done = 0
    while done < len(programs):
        _, same = next(itertools.groupby(programs[done:], _process_of))
        batch = list(itertools.islice(same, _MOST))
        begin, started = done, False
        with tempfile.TemporaryDirectory(prefix="static-report-") as folder, tempfile.TemporaryFile("w+") as errors:
            flags = ""
            if mode != "whole":
                flags = llo.flags(folder, estimates=batch[0].chip != "v4", schedules=mode == "schedules")
            process = subprocess.Popen(
                [sys.executable, "-m", "kernels_pallas.static_report", folder, mode],
                env=_environment(flags, folder),
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


def _compile(folder: Path, program: Program, mode: str) -> dict[str, Any]:
    """Runs in the other process."""
    module, _, name = program.factory.partition(":")
    function, args = getattr(importlib.import_module(module), name)(**program.kwargs)
    result: dict[str, Any] = {"error": None, "kernels": [], "code": {}, "bytes": [0, 0, 0]}
    try:
        if program.chip not in aot.TPUS:
            return result | _whole(program.chip, function, args, folder)
        if mode == "whole":
            return result | _whole(program.chip, function, args, None)
        with autotune.for_chip(program.chip):
            found = pallas_calls(function, *args)
        return result | {"kernels": [_kernel(program.chip, *call, folder, mode) for call in found]}
    except Exception as error:  # the compilers raise all kinds
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _whole(chip: str, function: Callable[..., Any], args: Sequence[Any], folder: Path | None) -> dict[str, Any]:
    """A program's bytes, and with `folder` the code of its GPU kernels."""
    _clear(folder)
    compiled = aot.compile_for(chip, function, *args)
    code = {} if folder is None else ptx.kernels(folder)
    if folder is not None and "mosaic_gpu" in (compiled.as_text() or "") and not code:
        raise RuntimeError("Mosaic GPU wrote nothing: it compiled the same kernel before, or this version never does")
    memory = compiled.memory_analysis()
    sizes = [getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp")]
    return {"code": code, "bytes": sizes}


def _kernel(
    chip: str, name: str, call: Callable[..., Any], shapes: Sequence[Any], folder: Path, mode: str
) -> tuple[Any, ...]:
    """Name, cycles and schedule of one TPU kernel."""
    _clear(folder)
    text = aot.compile_for(chip, call, *shapes).as_text() or ""
    (of_xla,) = re.findall(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', text)
    schedule = llo.schedules(folder).get(of_xla) if mode == "schedules" else None
    return name, llo.cycles(folder).get(llo.without_number(of_xla)), schedule


PallasCall: TypeAlias = tuple[str, Callable[..., Any], list[jax.ShapeDtypeStruct]]


def pallas_calls(function: Callable[..., Any], *args: Any) -> list[PallasCall]:
    """Every `pallas_call` that a function makes: its name, a function of its own, the shapes of its operands.

    >>> pallas_calls(jax.numpy.sin, 1.0)
    []
    """
    found: list[PallasCall] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
                call = functools.partial(equation.primitive.bind, **equation.params)
                found.append((equation.params["name"] or "kernel", call, shapes))
                continue
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(value):
                    visit(getattr(value, "jaxpr", value))

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _clear(folder: Path | None) -> None:
    for path in () if folder is None else folder.iterdir():
        path.unlink()


def _main(folder: Path, mode: str) -> None:
    programs = json.load(sys.stdin)
    print(_STARTED, flush=True)
    for program in map(Program._make, programs):
        print(_RESULT + json.dumps(_compile(folder, program, mode)), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
