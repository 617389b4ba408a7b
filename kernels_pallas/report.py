"""What the compilers say about every kernel, for chips that are not there."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from kernels_pallas import aot, chips, static_report
from kernels_pallas.spec import Pass, Spec
from kernels_pallas.static_report import Evidence, Program
from kernels_pallas.tables import Table

HEADER = (
    *("operation", "case", "pass", "chip", "compiles", "on-chip memory", "cycles", "MXU or wgmma", "spills"),
    *("occupancy", "HBM bytes", "at least"),
)
NOTES = (
    "Nothing here was measured. on-chip memory: VMEM of a TPU, shared memory of a GPU's thread block. cycles: the TPU "
    "compiler's static estimate (bodies under a condition count as always taken). MXU: share of the places for matrix "
    "multiplications taken in the hot loop; wgmma: tensor core instructions, every loop's body once. spills: bundles "
    "that store a spilled vector register (TPU), bytes spilled by a thread (GPU). occupancy: thread blocks a "
    "multiprocessor holds, and registers of a thread. at least: roofline bound from the data sheets, of arithmetic (a) "
    "or memory (m).",
)


def report(
    specs: Iterable[Spec], names: Sequence[str], on_row: Callable[[tuple[str, ...]], None] | None = None
) -> Table:
    """Compiles every kernel of the cases for every chip.

    Args:
      specs: The cases.
      names: Chips, of `aot.CHIPS`.
      on_row: Called with every row as soon as it is known.

    Returns:
      A row for every case, pass and chip; those that do not compile are rows too.

    Raises:
      ImportError: A compiler is missing.
    """
    for chip in names:
        if reason := aot.missing(chip):
            raise ImportError(reason)
    todo = [
        (chip, spec, kernel)
        for chip in names
        for spec in specs
        for kernel in spec.passes("pallas_tpu" if chips.CHIPS[chip].is_tpu else "pallas_gpu")
    ]
    programs = [
        Program(
            chip,
            f"{__name__}:as_shipped",
            {"operation": spec.operation, "spec": spec.name, "implementation": p.implementation, "name": p.name},
        )
        for chip, spec, p in todo
    ]
    rows, data = [], []
    for (chip, spec, kernel), found in zip(todo, static_report.evidence(programs), strict=True):
        row = _row(chip, spec, kernel, found)
        rows.append(row)
        data.append(_data(chip, spec, kernel, found))
        if on_row is not None:
            on_row(row)
    return Table("kernels/static_report", "Pallas kernels, compiled without a chip", HEADER, rows, NOTES, data)


def as_shipped(operation: str, spec: str, implementation: str, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A kernel call with the block sizes that it takes by itself on the chip it is compiled for."""
    from kernels_pallas.spec import find

    (found,) = (p for p in find(operation, spec).passes(implementation) if p.name == name)
    return found.function, found.args


def bound(chip: str, spec: Spec, kernel: Pass) -> tuple[float, float]:
    """Least seconds of arithmetic and of memory; float32 takes six passes on a TPU."""
    passes = 6 if chips.CHIPS[chip].is_tpu and jnp.dtype(spec.dtype) == jnp.float32 else 1
    return chips.CHIPS[chip].seconds(kernel.flops, kernel.bytes, passes)


def _row(chip: str, spec: Spec, kernel: Pass, found: Evidence) -> tuple[str, ...]:
    arithmetic, memory = bound(chip, spec, kernel)
    least = f"{1e6 * max(arithmetic, memory):.1f} us ({'a' if arithmetic > memory else 'm'})"
    head = (spec.operation, spec.name, kernel.name, chip)
    if found.error is not None:
        return (*head, f"no: {found.error.splitlines()[0][:80]}", *["-"] * 6, least)
    moved = f"{kernel.bytes / 2**20:.1f} MiB + {found.temp_bytes / 2**20:.1f}"
    schedules = [k.schedule for k in found.kernels if k.schedule is not None]
    codes = [k.code for k in found.kernels if k.code is not None]
    cycles = "-" if found.cycles is None else f"{found.cycles:,}"
    cells = ["-"] * 4
    if schedules:
        shares = [f"{100 * s.mxu:.0f} %" for s in schedules if s.mxu is not None]
        on_chip = max(s.vmem for s in schedules)
        cells = [f"{on_chip / 2**20:.1f} MiB", " ".join(shares) or "-", str(sum(s.spills for s in schedules)), "-"]
    elif codes:
        instructions = " ".join(str(c.wgmma if c.hgmma is None else c.hgmma) for c in codes)
        worst = min(codes, key=lambda c: c.blocks_per_multiprocessor)
        registers = " ".join(str(c.registers) for c in codes)
        cells = [
            f"{max(c.shared for c in codes) / 2**10:.0f} KiB",
            instructions,
            str(sum(c.spills for c in codes)),
            f"{worst.blocks_per_multiprocessor} x {worst.threads}, {registers} regs",
        ]
    compiles = "yes" if found.kernels else "no kernel in it"
    return (*head, compiles, cells[0], cycles, *cells[1:], moved, least)


def _data(chip: str, spec: Spec, kernel: Pass, found: Evidence) -> dict[str, Any]:
    arithmetic, memory = bound(chip, spec, kernel)
    return {
        "operation": spec.operation,
        "case": spec.name,
        "pass": kernel.name,
        "chip": chip,
        "error": found.error,
        "kernels": [
            {
                "name": k.name,
                "cycles": k.cycles,
                **(k.schedule._asdict() if k.schedule is not None else {}),
                **(k.code._asdict() if k.code is not None else {}),
            }
            for k in found.kernels
        ],
        "argument_bytes": found.argument_bytes,
        "output_bytes": found.output_bytes,
        "temp_bytes": found.temp_bytes,
        "flops": kernel.flops,
        "bytes": kernel.bytes,
        "bound_seconds": {"arithmetic": arithmetic, "memory": memory},
    }
