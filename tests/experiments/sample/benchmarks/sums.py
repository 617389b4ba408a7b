"""A small real benchmark: adding ten numbers against adding twenty thousand."""

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import paired_times
from experiments.context import Context
from experiments.protocol import at_least


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=3, laptop=9, full=9)
    with context.progress("adding", total=repeats) as phase:
        times = paired_times(
            {"short": lambda: sum(range(10)), "long": lambda: sum(range(20_000))},
            repeats=repeats,
            on_round=lambda _: phase.advance(),
        )
    ratio = times.speedup("short", over="long")
    return BenchmarkOutcome({"more": ratio, "absurd": ratio}, times, data={"terms": [10, 20_000]})


BENCHMARK = Benchmark(
    name="sums",
    title="Short sums against long ones",
    targets=(
        Target("more", "short sums per long sum", at_least(2.0), goal="10"),
        Target("absurd", "short sums per long sum", at_least(1e9)),
    ),
    run=run,
)
