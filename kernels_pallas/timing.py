"""Interleaved timing: only ratios of things timed in turns in one process are believed."""

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

Name = TypeVar("Name", bound=Hashable)


class Ratio(NamedTuple):
    """Median over rounds, and quartiles."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.lower:.3g}, {self.upper:.3g}]"


def interleaved(
    functions: Mapping[Name, Callable[[], Any]],
    *,
    rounds: int,
    least_seconds: float = 1e-3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds per call of functions of no arguments, timed in turns.

    Args:
      functions: Name to function; compiled already, or by a call before the first round.
      rounds: How often each is timed; the order rotates.
      least_seconds: Quicker functions are called several times in a row, waited for once.
      clock: The time in seconds.

    Returns:
      For every function one number per round.

    >>> seconds = interleaved({"one": lambda: 1, "two": lambda: 2}, rounds=3, least_seconds=0.0)
    >>> {name: len(times) for name, times in seconds.items()}
    {'one': 3, 'two': 3}
    """
    names = list(functions)
    calls = {}
    for name in names:
        jax.block_until_ready(functions[name]())
        start = clock()
        jax.block_until_ready(functions[name]())
        once = max(clock() - start, 1e-9)
        calls[name] = max(1, min(100, int(least_seconds / once)))
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would be charged to whoever is being timed
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                results = [functions[name]() for _ in range(calls[name])]
                jax.block_until_ready(results)
                seconds[name].append((clock() - start) / calls[name])
    finally:
        if collecting:
            gc.enable()
    return seconds


def ratio(of: Sequence[float], over: Sequence[float]) -> Ratio:
    """of / over, formed within each round.

    >>> ratio([1.0, 2.0, 1.0], [2.0, 4.0, 4.0]).median
    0.5
    """
    lower, median, upper = np.quantile(np.asarray(of) / np.asarray(over), (0.25, 0.5, 0.75))
    return Ratio(float(median), float(lower), float(upper))
