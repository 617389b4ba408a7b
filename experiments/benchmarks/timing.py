"""Paired timing: compare functions in one process, so that only ratios are believed.

A machine's speed drifts from second to second, and other work on it slows whatever happens to run.
Timing one function after the other therefore measures the machine. Here every round times all functions back
to back, in an order that rotates from round to round; a ratio is formed within each round, and its median and
quartiles are reported over rounds.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kernels_pallas.timing import Ratio, ratio


@dataclass(frozen=True)
class PairedTimes:
    """Seconds per call of every function, one number per round, rounds aligned between functions."""

    seconds: Mapping[str, tuple[float, ...]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Returns the median seconds per call of `name`."""
        return float(np.median(self.seconds[name]))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Returns the first and third quartile of the seconds per call of `name`."""
        lower, upper = np.quantile(self.seconds[name], (0.25, 0.75))
        return float(lower), float(upper)

    def speedup(self, name: str, over: str) -> Ratio:
        """Returns how many times faster `name` is than `over`: time(over) / time(name), paired by round.

        >>> times = PairedTimes({"ours": (1.0, 2.0, 1.0), "theirs": (3.0, 4.0, 2.0)})
        >>> times.speedup("ours", over="theirs").median
        2.0
        """
        return ratio(self.seconds[over], self.seconds[name])

    def table(self, over: str | None = None) -> str:
        """Returns a printable table: median, quartiles and speed-up of every function over `over`.

        Args:
          over: The function the others are compared with; the first one by default.
        """
        over = next(iter(self.seconds)) if over is None else over
        width = max(len(name) for name in self.seconds)
        lines = [f"{'':{width}}  {'median':>10}  {'quartiles':>23}  speed over {over} [quartiles]"]
        for name in self.seconds:
            lower, upper = (f"{1e3 * q:.4g}" for q in self.quartiles(name))
            lines.append(
                f"{name:{width}}  {1e3 * self.median(name):>7.4g} ms  {f'{lower} .. {upper} ms':>23}  "
                f"{self.speedup(name, over)}"
            )
        return "\n".join(lines)


def paired_times(
    functions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 15,
    warmup: int = 2,
    calls: int = 1,
    on_round: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Times functions of no arguments against one another, interleaved.

    Every call is waited for: JAX arrays anywhere in the returned pytree are blocked on; other results are
    taken to be ready. Bind arguments with `functools.partial`, and do not donate them.

    Args:
      functions: Name to function, at least one.
      repeats: Rounds that are measured; in each one, every function is timed once.
      warmup: Calls of every function before the first round (compilation, caches).
      calls: Consecutive calls per measurement; raise it for functions of a few microseconds.
      on_round: Called with the number of finished rounds, for a progress bar.
      clock: Returns the time in seconds.

    Returns:
      The times, `repeats` per function.

    Raises:
      ValueError: If there is no function, or if `repeats` or `calls` is below 1, or `warmup` below 0.

    >>> times = paired_times({"one": lambda: sum(range(10)), "two": lambda: sum(range(20))}, repeats=3)
    >>> times.rounds
    3
    """
    if not functions:
        raise ValueError("functions is empty; give at least one function to time")
    for argument, value, least in (("repeats", repeats, 1), ("calls", calls, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")

    names = list(functions)
    for name in names:
        for _ in range(warmup):
            jax.block_until_ready(functions[name]())

    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # a collection in the middle of one measurement would be charged to that function
    try:
        for index in range(repeats):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                for _ in range(calls):
                    jax.block_until_ready(functions[name]())
                seconds[name].append((clock() - start) / calls)
            if on_round is not None:
                on_round(index + 1)
    finally:
        if collecting:
            gc.enable()
    return PairedTimes({name: tuple(values) for name, values in seconds.items()})
