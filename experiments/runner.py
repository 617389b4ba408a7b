"""Runs one experiment or benchmark, judges it, and writes its result files."""

import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome
from experiments.benchmarks.timing import PairedTimes
from experiments.context import Context, bars
from experiments.protocol import Claim, Experiment, Measured, Outcome, Scale
from experiments.records import environment, file_stem, plain, write_json, write_together

VERDICTS = {True: "yes", False: "no", None: "not judged"}
_COLOURS = {True: "green", False: "red", None: "dim"}


def run_experiment(
    experiment: Experiment,
    *,
    scale: Scale,
    folder: Path,
    console: Console,
    seeds: int | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Runs `experiment`, writes `<folder>/<name>.json` and `.png`, prints the table of claims.

    The files of an earlier run are replaced only once everything has succeeded.

    Args:
      experiment: What to run.
      scale: At which scale; smoke runs one seed and judges nothing.
      folder: Where results go.
      console: Where bars, lines and the table are shown.
      seeds: How many seeds; the experiment's own number by default.
      data: The user's own data (a path or a glob), for experiments that accept it.

    Returns:
      The record that was written.

    Raises:
      ValueError: If the outcome does not measure exactly the claims that were declared, once per seed.
    """
    count = seeds if seeds is not None else (1 if scale == "smoke" else experiment.seeds)
    seconds: dict[str, float] = {}
    console.rule(f"{experiment.name} · {scale} · {count} {'seed' if count == 1 else 'seeds'}")
    start = time.perf_counter()
    with bars(console) as display, tempfile.TemporaryDirectory(prefix="experiment-") as scratch:
        context = Context(scale, tuple(range(count)), data, Path(scratch), display, seconds)
        outcome = experiment.run(context)
    total = time.perf_counter() - start

    measured = _measurements(experiment, outcome, count)
    record = {
        "kind": "experiment",
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "scale": scale,
        "seeds": count,
        "inputs": "default" if data is None else "the user's own",
        **environment(),
        "wall_clock": _wall_clock(total, seconds),
        "claims": [_claim_record(claim, measured[claim.id], scale) for claim in experiment.claims],
        "notes": list(outcome.notes),
        "data": plain(outcome.data),
    }
    stem = file_stem(folder, experiment.name, scale)
    json_path, png_path = (stem.with_name(stem.name + suffix) for suffix in (".json", ".png"))
    write_together(
        {
            png_path: lambda path: _draw(experiment, record["data"], path),
            json_path: lambda path: write_json(path, record),
        }
    )
    console.print(claims_table(record))
    for note in outcome.notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"written: {json_path} and {png_path.name}", markup=False, highlight=False, soft_wrap=True)
    return record


def run_benchmark(benchmark: Benchmark, *, scale: Scale, folder: Path, console: Console) -> dict[str, Any]:
    """Runs `benchmark`, writes `<folder>/benchmarks/<name>.json`, prints the table of targets.

    Args:
      benchmark: What to run.
      scale: At which scale; at smoke no target is judged.
      folder: Where results go.
      console: Where bars, lines and the table are shown.

    Returns:
      The record that was written.

    Raises:
      ValueError: If the outcome does not measure exactly the targets that were declared.
    """
    seconds: dict[str, float] = {}
    console.rule(f"benchmark {benchmark.name} · {scale}")
    start = time.perf_counter()
    with bars(console) as display, tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        outcome = benchmark.run(Context(scale, (0,), None, Path(scratch), display, seconds))
    total = time.perf_counter() - start

    _same_ids(benchmark.name, {target.id for target in benchmark.targets}, outcome.ratios)
    named_times = _named_times(outcome)
    record = {
        "kind": "benchmark",
        "name": benchmark.name,
        "title": benchmark.title,
        "scale": scale,
        **environment(),
        "wall_clock": _wall_clock(total, seconds),
        "targets": [
            {
                "id": target.id,
                "statement": target.statement,
                "target": target.expected.text,
                "goal": target.goal,
                "median": outcome.ratios[target.id].median,
                "lower": outcome.ratios[target.id].lower,
                "upper": outcome.ratios[target.id].upper,
                "shown": str(outcome.ratios[target.id]),
                "met": None if scale == "smoke" else target.met(outcome.ratios[target.id]),
            }
            for target in benchmark.targets
        ],
        "notes": list(outcome.notes),
        "seconds": {name: times.seconds for name, times in named_times.items()},
        "data": outcome.data,
    }
    stem = file_stem(folder, f"benchmarks/{benchmark.name}", scale)
    path = stem.with_name(stem.name + ".json")
    write_together({path: lambda temporary: write_json(temporary, record)})

    for name, times in named_times.items():
        console.print(f"{name}\n{times.table()}", markup=False, highlight=False, soft_wrap=True)
    console.print(targets_table(record))
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    return record


def claims_table(record: Mapping[str, Any]) -> Table:
    """Returns the table of claims of one record, for a console."""
    table = Table("claim", "paper", "expected here", "measured", "held", title=escape(record["title"]))
    for claim in record["claims"]:
        colour = _COLOURS[claim["held"]]
        cells = (claim["statement"], claim["paper"] or "–", claim["expected"] or "–", claim["shown"])
        table.add_row(*map(escape, cells), f"[{colour}]{VERDICTS[claim['held']]}[/]")
    return table


def targets_table(record: Mapping[str, Any]) -> Table:
    """Returns the table of targets of one benchmark record, for a console."""
    table = Table("ratio", "target", "goal", "measured [quartiles]", "met", title=escape(record["title"]))
    for target in record["targets"]:
        colour = _COLOURS[target["met"]]
        cells = (target["statement"], target["target"], target["goal"] or "–", target["shown"])
        table.add_row(*map(escape, cells), f"[{colour}]{VERDICTS[target['met']]}[/]")
    return table


def _measurements(experiment: Experiment, outcome: Outcome, seeds: int) -> dict[str, Measured]:
    _same_ids(experiment.name, {claim.id for claim in experiment.claims}, outcome.measured)
    measured = {}
    for key, values in outcome.measured.items():
        numbers = np.asarray(values, np.float64)
        if numbers.ndim > 0 and numbers.shape != (seeds,):
            raise ValueError(
                f"{experiment.name} measured {key!r} with shape {numbers.shape} over {seeds} seeds; give one "
                "number per seed, or a single number over all of them"
            )
        measured[key] = Measured(tuple(map(float, numbers.ravel())))
    return measured


def _same_ids(name: str, declared: set[str], given: Mapping[str, Any]) -> None:
    if declared != set(given):
        missing, unknown = sorted(declared - set(given)), sorted(set(given) - declared)
        raise ValueError(f"{name} measured other things than it declares: missing {missing}, extra {unknown}")


def _claim_record(claim: Claim, measured: Measured, scale: Scale) -> dict[str, Any]:
    expected = claim.expected_at(scale)
    return {
        "id": claim.id,
        "statement": claim.statement,
        "paper": claim.paper,
        "expected": expected.text if expected else "",
        "judged_on": claim.judged_on,
        "values": list(measured.values),
        "mean": measured.mean,
        "low": measured.low,
        "high": measured.high,
        "std": measured.std,
        "shown": measured.show(claim.unit),
        "held": claim.held(measured, scale),
    }


def _wall_clock(total: float, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Seconds in all, and the share of each phase: shares compare between machines, seconds do not."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(total, 1),
        "share": {name: round(spent / total, 3) for name, spent in seconds.items()},
    }


def _named_times(outcome: BenchmarkOutcome) -> dict[str, PairedTimes]:
    return {"times": outcome.times} if isinstance(outcome.times, PairedTimes) else dict(outcome.times)


def _draw(experiment: Experiment, data: Mapping[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever the user's default back end is
    experiment.plot(figure, data)
    figure.savefig(path, dpi=150, metadata={"Software": None})
