"""Reads what the TPU compiler writes about a kernel when it is asked to; see `static_report`.

The files are undocumented. Their names end in what they hold; the kernel's name, with the number that XLA appends,
comes before it.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

PROFILE = "_static_llo_profile.textproto"
_UTILIZATION = "-final_hlo-static-per-bundle-utilization.txt"
_BUNDLES = "-final_bundles.txt"
_ALLOCATIONS = "-original.txt"


class Schedule(NamedTuple):
    """The bundles of a kernel: what the processor issues in one cycle unless it waits.

    Attributes:
      bundles: Their number, every loop's body once.
      mxu: Of the hot loop's places for matrix multiplications the share that is taken. The hot loop is the
        innermost one with at least half of all multiplications; None for a kernel without any.
      spills: Bundles that store a vector register for want of registers.
      vmem: Bytes of VMEM: scratch, and windows of operands as often as they are buffered.
    """

    bundles: int
    mxu: float | None
    spills: int
    vmem: int


def flags(folder: str, *, estimates: bool, schedules: bool) -> str:
    """The flags (`LIBTPU_INIT_ARGS`) that make the compiler write cycle estimates and schedules."""
    first = f"--xla_jf_dump_static_llo_profile_to={folder} " if estimates else ""
    return first + (f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true" if schedules else "")


def cycles(folder: Path) -> dict[str, int]:
    """Estimated cycles of every operation by its name without the number; those of one name are added up."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob(f"*{PROFILE}")):
        # Such as "mm.1_TPU v5 lite_static_llo_profile.textproto".
        name = without_number(path.name.removesuffix(PROFILE).rpartition("_TPU")[0])
        numbers = re.findall(r"estimated_cycles:\s*(\d+)", path.read_text(encoding="utf-8"))
        found[name] = found.get(name, 0) + sum(map(int, numbers))
    return found


def schedules(folder: Path) -> dict[str, Schedule]:
    """The schedule of every operation, by name and number such as "mm.1"."""
    found = {}
    for path in sorted(folder.glob(f"*{_UTILIZATION}")):
        # Such as "1796065455507385307-mm.1-70-final_hlo-static-per-bundle-utilization.txt".
        before = re.match(r"(\d+-(.*))-\d+$", path.name.removesuffix(_UTILIZATION))
        if before is None:
            continue
        bundles = _one(folder, f"{before[1]}-*{_BUNDLES}", without="schedule-analysis")
        allocations = _one(folder, f"{before[1]}-*{_ALLOCATIONS}")
        if bundles is not None and allocations is not None:
            found[before[2]] = schedule(path.read_text(), bundles, vmem_bytes(allocations))
    return found


def schedule(utilization: str, bundles: str, vmem: int) -> Schedule:
    """The schedule that these texts describe."""
    head, _, table = utilization.partition("== UTILIZATION:")
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith("==")]
    columns = [name.strip() for name in lines[0].split(",")]
    capacity = dict(zip(columns, map(int, lines[1].split()), strict=True))
    rows = [dict(zip(columns, map(int, line.split()), strict=True)) for line in table.splitlines() if line.strip()]
    matmuls = [row["MATMUL"] for row in rows]
    hot = hot_loop(matmuls, loop_depths(bundles))
    places = capacity["MATMUL"] * len(hot)
    return Schedule(
        bundles=len(rows),
        mxu=sum(matmuls[i] for i in hot) / places if places else None,
        spills=sum(row["VSTORE:SPILL"] > 0 for row in rows),
        vmem=vmem,
    )


def loop_depths(bundles: str) -> list[int]:
    """How many loops every bundle of a listing lies in.

    >>> loop_depths("   0   :  { nop }\\n 0x1 LB: > { nop }\\n 0x2   : >> { nop }")
    [0, 1, 2]
    """
    matches = re.finditer(r"^\s*(?:0x[0-9a-f]+|\d+)\s[A-Z ]*:([> ]*)\{", bundles, re.MULTILINE)
    return [match[1].count(">") for match in matches]


def hot_loop(matmuls: list[int], depths: list[int]) -> range:
    """The innermost loop with at least half of all multiplications, as indices of bundles; all if there is no loop.

    >>> hot_loop([0, 0, 4, 4, 0, 1], [0, 1, 2, 2, 1, 0])
    range(2, 4)
    """
    if len(depths) != len(matmuls) or not sum(matmuls):
        return range(0)
    for depth in range(max(depths), 0, -1):
        inside = [d >= depth for d in depths]
        for is_loop, group in itertools.groupby(range(len(depths)), inside.__getitem__):
            indices = list(group)
            if is_loop and 2 * sum(matmuls[i] for i in indices) >= sum(matmuls):
                return range(indices[0], indices[-1] + 1)
    return range(len(matmuls))


def vmem_bytes(allocations: str) -> int:
    """Bytes of VMEM that a listing before scheduling declares.

    >>> vmem_bytes("#allocation2 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped]")
    4096
    """
    found = re.findall(r"^\s*(#\S+) \[shape = [^\n]*space=vmem, size = (0x[0-9a-f]+)", allocations, re.MULTILINE)
    return sum(int(size, 16) for size in dict(found).values())


def without_number(name: str) -> str:
    """An operation's name without the number that XLA appends."""
    return re.sub(r"\.\d+$", "", name)


def _one(folder: Path, pattern: str, without: str = "\0") -> str | None:
    paths = sorted(path for path in folder.glob(pattern) if without not in path.name)
    return paths[0].read_text(encoding="utf-8") if paths else None
