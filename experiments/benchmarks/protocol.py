"""What a benchmark declares: the ratios it measures and the targets they should meet.

BENCHMARK = Benchmark(
    name="train_step",
    title="Our train step against the same model in PyTorch",
    targets=(
        Target("speed", "our tokens per second over PyTorch's", at_least(1.0), goal="1.3"),
        Target("memory", "our peak memory over PyTorch's", at_most(1.0)),
    ),
    run=run,  # Context -> BenchmarkOutcome({"speed": times.speedup("ours", over="torch"), ...}, times)
)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.timing import PairedTimes, Ratio
from experiments.protocol import Expected

if TYPE_CHECKING:
    from experiments.context import Context


@dataclass(frozen=True)
class Target:
    """One ratio and what it should be.

    Attributes:
      id: The key under which `run` returns the ratio.
      statement: Which quantity over which.
      expected: The target; met when the median of the ratio meets it.
      goal: Where we want to be later, in words; empty for none.
    """

    id: str
    statement: str
    expected: Expected
    goal: str = ""

    def met(self, ratio: Ratio) -> bool:
        return math.isfinite(ratio.median) and bool(self.expected.holds(ratio.median))


@dataclass(frozen=True)
class BenchmarkOutcome:
    """What a benchmark measured.

    Attributes:
      ratios: Target id to ratio.
      times: The paired times behind the ratios (several sets where one process times several things).
      data: Further raw numbers and settings: shapes, steps, peak bytes.
      notes: Sentences that a reader of the numbers should know.
    """

    ratios: Mapping[str, Ratio]
    times: PairedTimes | Mapping[str, PairedTimes]
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """The declared object of a benchmark module.

    Attributes:
      name: The module's name.
      title: One line of what is compared with what.
      targets: What is measured.
      run: Measures every target; at scale smoke it only shows that it runs.
    """

    name: str
    title: str
    targets: tuple[Target, ...]
    run: Callable[["Context"], BenchmarkOutcome]

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError(f"targets of {self.name} is empty; a benchmark needs at least one target")
        ids = [target.id for target in self.targets]
        if len(set(ids)) < len(ids):
            raise ValueError(f"targets of {self.name} have the same id twice: {ids}")
