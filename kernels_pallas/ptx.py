"""Reads what Mosaic GPU and CUDA's tools write about a kernel; see `static_report`."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
"""What is written into the folder `MOSAIC_GPU_DUMP_TO`; the variables are undocumented."""

# Of one streaming multiprocessor, compute capability 9.0: CUDA C++ programming guide, "Technical specifications".
_REGISTERS, _SHARED_BYTES, _THREADS, _RESERVED_BYTES = 65536, 233472, 2048, 1024


class Code(NamedTuple):
    """The machine code of a GPU kernel.

    Attributes:
      registers: Of one thread.
      barriers: Named barriers.
      spills: Bytes of registers stored to memory for want of registers, by every thread.
      shared: Bytes of shared memory of a thread block.
      threads: Of a thread block.
      blocks_per_multiprocessor: Thread blocks that a multiprocessor holds at a time.
      wgmma: Tensor core instructions in the PTX, every loop's body once.
      hgmma: The same in the machine code; None where nvdisasm is missing.
    """

    registers: int
    barriers: int
    spills: int
    shared: int
    threads: int
    blocks_per_multiprocessor: int
    wgmma: int
    hgmma: int | None


def occupancy(registers: int, shared: int, threads: int) -> int:
    """Thread blocks that a Hopper multiprocessor holds at a time.

    >>> occupancy(registers=168, shared=100_000, threads=384)
    1
    """
    return min(
        _REGISTERS // max(1, registers * threads), _SHARED_BYTES // (shared + _RESERVED_BYTES), _THREADS // threads
    )


def kernels(folder: Path) -> dict[str, Code]:
    """The code of every Mosaic GPU kernel that was dumped, by its name and number such as "matmul_0".

    Raises:
      ValueError: The files are not as this module knows them.
    """
    return {path.stem: _code(path) for path in sorted(folder.glob("*.ptx"))}


def _code(ptx: Path) -> Code:
    text = ptx.read_text(encoding="utf-8")
    report = _ptxas(ptx)
    host = ptx.with_suffix(".ll")
    launch = _launch(host.read_text(encoding="utf-8")) if host.exists() else None
    if launch is None:
        raise ValueError(f"this version of Mosaic GPU did not write how {ptx.stem} is launched")
    threads, shared = launch
    registers = _number(r"Used (\d+) registers", report, ptx.stem)
    return Code(
        registers=registers,
        barriers=_number(r"used (\d+) barriers", report, ptx.stem),
        spills=_number(r"(\d+) bytes spill stores", report, ptx.stem),
        shared=shared,
        threads=threads,
        blocks_per_multiprocessor=occupancy(registers, shared, threads),
        wgmma=len(re.findall(r"\bwgmma\.mma_async", text)),
        hgmma=_hgmma(ptx),
    )


def _ptxas(ptx: Path) -> str:
    """What `ptxas -v` says, written at compile time or now."""
    written = ptx.with_suffix(".ptxas")
    if written.exists():
        return written.read_text(encoding="utf-8")
    tool = shutil.which("ptxas")
    if tool is None:
        raise ValueError(f"the compiler wrote no report on {ptx.stem}, and there is no ptxas to ask")
    return _run([tool, "-v", "-arch=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))])


def _launch(host: str) -> tuple[int, int] | None:
    """Threads of a block and bytes of shared memory, from the code of the host.

    >>> _launch("call void @mosaic_gpu_launch_kernel(ptr %0, " + ", ".join(
    ...     f"i32 {n}" for n in (1, 36, 1, 0, 0, 0, 128, 3, 1, 4096)) + ", ptr %1)")
    (384, 4096)
    """
    call = re.search(r"@mosaic_gpu_launch_kernel\(ptr [^,]*((?:, i32 \d+){10})", host)
    if call is None:
        return None
    numbers = [int(number) for number in re.findall(r"i32 (\d+)", call[1])]
    return numbers[6] * numbers[7] * numbers[8], numbers[9]  # grid, cluster, block, shared memory


def _hgmma(ptx: Path) -> int | None:
    disassembler, assembler = nvdisasm(), shutil.which("ptxas")
    if disassembler is None or assembler is None:
        return None
    cubin = ptx.with_suffix(".cubin")
    if not cubin.exists():
        _run([assembler, "-arch=sm_90a", str(ptx), "-o", str(cubin)])
    return len(re.findall(r"\bHGMMA\.", _run([disassembler, "-c", str(cubin)])))


def nvdisasm() -> str | None:
    """Where CUDA's disassembler is: on the path, or in the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((str(p) for root in roots for p in Path(root).glob("*/bin/nvdisasm")), None)


def _number(pattern: str, text: str, kernel: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"ptxas wrote no {pattern!r} on {kernel}")
    return int(found[1])


def _run(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr
