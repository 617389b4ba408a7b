"""The symmetric product: what computing one triangle of blocks saves.

On this machine: the "xla" path against the plain product x xᵀ, float32, at the shapes of Newton-Schulz iterations. For
TPUs: the compiler's own cycle estimates (`kernels_pallas.static_report`, no measurements) of the Pallas kernel over
the same kernel with the same block sizes computing every block and mirroring none, bfloat16. They need the
extra [aot] in the environment that runs this; without it those ratios are not measured.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import PairedTimes, Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_most
from kernels_pallas import aot, static_report, symmetric_product

CPU_SHAPES = ((256, 256), (256, 1024), (512, 512), (512, 2048), (768, 768), (768, 3072), (1024, 1024), (1024, 4096))
TPU_SHAPES = ((1024, 1024), (1024, 4096), (2048, 2048))
CHIPS = ("v5e", "v5p", "v6e")


def kernel(n: int, k: int, block: int, triangle: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The Pallas kernel for one bfloat16 matrix; `block` 0 takes the block sizes it chooses by itself."""
    from kernels_pallas.symmetric_product import pallas_tpu

    config = pallas_tpu.heuristic(n, k, itemsize=2)
    if block:
        config = config._replace(block=block)
    shape = jax.ShapeDtypeStruct((1, n, k), jnp.bfloat16)
    return functools.partial(pallas_tpu.symmetric_product, config=config, triangle=triangle), (shape, shape)


def _cpu_times(n: int, k: int, repeats: int, tick: Callable[[], None]) -> PairedTimes:
    x = jax.random.normal(jax.random.key(0), (n, k))
    functions = {
        "plain": jax.jit(lambda x: jnp.matmul(x, x.T, precision="highest")),
        "symmetric": jax.jit(functools.partial(symmetric_product, implementation="xla")),
    }
    calls = max(1, 2**27 // (n * n * k))
    bound = {name: functools.partial(function, x) for name, function in functions.items()}
    return paired_times(bound, repeats=repeats, calls=calls, on_round=lambda _: tick())


def _cycles(cases: list[tuple[str, int, int, int]]) -> list[dict[str, Any]]:
    """For every (chip, n, k, block) the estimated cycles of one triangle of blocks and of all of them."""
    programs = [
        static_report.Program(chip, f"{__name__}:kernel", {"n": n, "k": k, "block": block, "triangle": triangle})
        for chip, n, k, block in cases
        for triangle in (True, False)
    ]
    found = [
        next(cycles for name, cycles in operations.items() if name.startswith("symmetric_product"))
        for operations in static_report.estimated_cycles(programs)
    ]
    return [
        {"chip": chip, "n": n, "k": k, "block": block, "triangle": triangle, "all blocks": everything}
        for (chip, n, k, block), triangle, everything in zip(cases, found[::2], found[1::2], strict=True)
    ]


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=25, full=51)
    shrink = context.pick(smoke=4, laptop=1, full=1)
    times: dict[str, PairedTimes] = {}
    ratios: dict[str, Ratio] = {}
    data: dict[str, Any] = {"shapes divided by": shrink}
    notes: list[str] = []
    for n, k in CPU_SHAPES:
        with context.progress(f"{n} x {k}", total=repeats) as bar:
            paired = _cpu_times(n // shrink, k // shrink, repeats, bar.advance)
        times[f"{n} x {k}"] = paired
        ratios[f"cpu_{n}_{k}"] = paired.speedup("plain", over="symmetric")
    if _NO_COMPILER:
        notes.append(f"No estimates for TPUs: {_NO_COMPILER}")
    else:
        chosen = [(chip, n, k, 0) for chip in CHIPS for n, k in TPU_SHAPES]
        others = [(chip, 2048, 2048, block) for chip in CHIPS for block in (256, 512)]
        with context.progress("static estimates", total=1) as bar:
            rows = _cycles([(chip, n // shrink, k // shrink, block) for chip, n, k, block in chosen + others])
            bar.advance()
        for (chip, n, k, _), row in zip(chosen, rows, strict=False):
            ratio = row["triangle"] / row["all blocks"]
            ratios[f"{chip}_{n}_{k}"] = Ratio(ratio, ratio, ratio)
        data["estimated cycles"] = rows
        notes.append(
            "Ratios of TPU kernels are the compiler's static estimates, with the block sizes it runs by default."
        )
    return BenchmarkOutcome(ratios, times, data, tuple(notes))


def _targets() -> tuple[Target, ...]:
    targets = []
    for n, k in CPU_SHAPES:
        # Below, what halving saves goes into mirroring.
        bound = 0.95 if n >= 768 else 1.2
        statement = f"CPU, {n} x {k} float32: time over the plain product, which is not exactly symmetric"
        targets.append(Target(f"cpu_{n}_{k}", statement, at_most(bound)))
    if not _NO_COMPILER:
        for chip, (n, k) in itertools.product(CHIPS, TPU_SHAPES):
            statement = f"{chip}, {n} x {k} bfloat16: static cycles over the kernel computing all blocks"
            targets.append(Target(f"{chip}_{n}_{k}", statement, at_most(0.65 if n == 2048 else 0.8)))
    return tuple(targets)


_NO_COMPILER = aot.missing("v5e")

BENCHMARK = Benchmark(
    name="symmetric_product",
    title="One triangle of blocks of x xᵀ against all of them",
    targets=_targets(),
    run=run,
)
