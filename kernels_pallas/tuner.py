"""Finds block sizes: every candidate of a kernel, by the compiler's estimate without a chip or by the clock on one.

Static tuning takes the cycles that the TPU compiler estimates (`static_report` says what they leave out); there is no
such thing for GPUs. Measured tuning needs the chip, and is all there is where `Spec.estimates` is false: for gathered
attention the compiler takes the number of blocks for what suits one candidate, and estimates less than its
multiplications alone would take.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import aot, autotune, chips, static_report
from kernels_pallas.autotune import Entry, TuningResult
from kernels_pallas.spec import Pass, Spec
from kernels_pallas.timing import interleaved

Cost = int | float | None
_PROGRAM = "kernels_pallas.spec:program"


def tune(
    spec: Spec,
    chip: str,
    *,
    method: str | None = None,
    on_result: Callable[[str], None] | None = None,
) -> TuningResult:
    """The best candidate of every kernel that runs this case on a chip.

    Args:
      spec: The case.
      chip: One of `chips.CHIPS`.
      method: "static", "measured", or None: measured where this machine has the chip, else static.
      on_result: Called with a line about every candidate.

    Returns:
      One entry for every kernel with block sizes; none if there is no such kernel, or where static estimates do not
      tell.

    Raises:
      ValueError: An unknown chip or method, static tuning for a GPU, measuring on a chip that is not there.
      ImportError: The compiler is not installed.
      RuntimeError: No candidate compiles.
    """
    check(chip, method)
    method = method or ("measured" if chips.present() == chip else "static")
    if method == "static" and not spec.estimates:
        if on_result is not None:
            on_result(f"{spec.operation} [{spec.name}]: left out, it has to be measured")
        return TuningResult(chip, method, ())
    measure = _measured if method == "measured" else _static
    entries = []
    for kernel in spec.passes("pallas_tpu" if chips.CHIPS[chip].is_tpu else "pallas_gpu"):
        configs = [dict(config._asdict()) for config in kernel.candidates()]
        if not configs:
            continue
        say = _say(on_result, spec, kernel, chip)
        costs = measure(spec, kernel, chip, [None, *configs], say)
        found = [(cost, index) for index, cost in enumerate(costs[1:]) if cost is not None]
        if not found:
            raise RuntimeError(f"no candidate of {kernel.operation} {kernel.kernel} compiles for {chip}")
        cost, best = min(found)
        key = kernel.key()
        assert key is not None
        entries.append(Entry(spec.operation, kernel.kernel, key, configs[best], cost, costs[0]))
    return TuningResult(chip, method, tuple(entries))


def tune_all(
    specs: Sequence[Spec],
    chip: str,
    *,
    method: str | None = None,
    on_result: Callable[[str], None] | None = None,
) -> TuningResult:
    """`tune` for several cases of any operations; entries in the order of operation, kernel and key."""
    check(chip, method)
    results = [tune(spec, chip, method=method, on_result=on_result) for spec in specs]
    return functools.reduce(TuningResult.merged, results)


def check(chip: str, method: str | None) -> None:
    """Raises what `tune` raises for a chip and a method that do not go together."""
    if chip not in chips.CHIPS:
        raise ValueError(f"chip must be one of {', '.join(chips.CHIPS)}, got {chip!r}")
    if method not in (None, *autotune.METHODS):
        raise ValueError(f"method must be None or one of {', '.join(autotune.METHODS)}, got {method!r}")
    here = chips.present()
    if method == "measured" and here != chip:
        raise ValueError(f"chip must be this machine's to measure on it, got {chip!r} on {here or 'a CPU'}")
    if (method or ("measured" if here == chip else "static")) == "static":
        if chip == "v4" or not chips.CHIPS[chip].is_tpu:
            raise ValueError(f"chip must be one that has static estimates (v5e, v5p, v6e), got {chip!r}")
        if reason := aot.missing(chip):
            raise ImportError(reason)


def _static(
    spec: Spec, kernel: Pass, chip: str, configs: Sequence[Mapping[str, int] | None], say: Callable[..., None]
) -> list[Cost]:
    programs = [
        static_report.Program(
            chip,
            _PROGRAM,
            {
                "operation": spec.operation,
                "spec": spec.name,
                "implementation": kernel.implementation,
                "name": kernel.name,
                "config": config,
            },
        )
        for config in configs
    ]
    costs: list[Cost] = []
    for config, found in zip(configs, static_report.evidence(programs, schedules=False), strict=True):
        costs.append(found.cycles)
        say(config, f"{found.cycles} cycles" if found.cycles is not None else f"no: {found.error}")
    return costs


def _measured(
    spec: Spec, kernel: Pass, chip: str, configs: Sequence[Mapping[str, int] | None], say: Callable[..., None]
) -> list[Cost]:
    args = example(spec, kernel)
    runs = {}
    for index, config in enumerate(configs):
        run = jax.jit(kernel.at(config))
        try:
            jax.block_until_ready(run(*args))
        except Exception as error:  # does not fit: the compilers raise all kinds
            say(config, f"no: {error}")
            continue
        runs[index] = functools.partial(run, *args)
    seconds = interleaved(runs, rounds=7)
    costs: list[Cost] = [float(np.median(seconds[i])) if i in seconds else None for i in range(len(configs))]
    for config, cost in zip(configs, costs, strict=True):
        if cost is not None:
            say(config, f"{1e6 * cost:.1f} us")
    return costs


def example(spec: Spec, kernel: Pass) -> tuple[Any, ...]:
    """Arrays for a kernel call: those of the spec, and for a backward pass what the forward pass gives."""
    operands = spec.operands(*spec.make(0))
    if kernel.name == "forward":
        return operands
    (forward,) = (p for p in spec.passes(kernel.implementation) if p.name == "forward")
    out, *residuals = jax.jit(forward.function)(*operands)
    return (*operands, out, *residuals, jnp.ones_like(out))


def _say(
    on_result: Callable[[str], None] | None, spec: Spec, kernel: Pass, chip: str
) -> Callable[[Mapping[str, int] | None, str], None]:
    def say(config: Mapping[str, int] | None, text: str) -> None:
        if on_result is not None:
            which = "heuristic" if config is None else " ".join(f"{k}={v}" for k, v in config.items())
            on_result(f"{spec.operation} [{spec.name}] {kernel.kernel} {chip}: {which}: {text.splitlines()[0]}")

    return say
