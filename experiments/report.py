"""Regenerates `experiments/RESULTS.md` from the result files, and the README's method table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.protocol import SCALES
from experiments.records import RESULTS, read_json
from experiments.runner import VERDICTS
from jaxlib_icml.methods import method_table

README = Path(__file__).parents[1] / "README.md"
REPORT = Path(__file__).parent / "RESULTS.md"

BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


def stale_files(results: Path = RESULTS, report: Path = REPORT, readme: Path = README) -> dict[Path, str]:
    """Returns the files that differ from what they should hold, with what they should hold.

    Args:
      results: The folder of result files.
      report: The report; it lies where links into `results` are relative to it.
      readme: The README; left alone when there is none.

    Raises:
      ValueError: If a result file is damaged or the README has lost its markers.
    """
    wanted = {report: results_markdown(results, report.parent)}
    if readme.exists():
        wanted[readme] = with_method_table(readme.read_text(encoding="utf-8"))
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def with_method_table(text: str) -> str:
    """Returns the README's text with the part between the markers replaced by the method table.

    Raises:
      ValueError: If the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END}, once each and in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{method_table()}\n{END}{rest.split(END)[1]}"


def results_markdown(results: Path, relative_to: Path) -> str:
    """Returns the report on every result file below `results`; the same files give the same text.

    Args:
      results: The folder of result files.
      relative_to: The folder that links start from.

    Raises:
      ValueError: If a result file is damaged.
    """
    found = [(path, read_json(path)) for path in sorted(results.rglob("*.json")) if path.is_file()]
    kernels = [record for _, record in found if record["kind"] == "kernels"]  # from `python -m kernels_pallas`
    found = [(path, record) for path, record in found if record["kind"] != "kernels"]
    found.sort(key=lambda item: (item[1]["name"], SCALES.index(item[1]["scale"])))
    experiments = [(path, record) for path, record in found if record["kind"] == "experiment"]
    benchmarks = [(path, record) for path, record in found if record["kind"] == "benchmark"]

    parts = [
        "# Results",
        "What the papers claim, what we expected at our scale, and what came out. Written by "
        "`python -m experiments report` from the files in `results/`; a claim that did not hold stays here. "
        "Rerun one with `python -m experiments run NAME`.",
        _summary([record for _, record in experiments]),
    ]
    parts += [_experiment(path, record, relative_to) for path, record in experiments]
    if benchmarks:
        parts += [
            "# Benchmarks",
            "Ratios of two things timed in turns in one process: median over rounds, quartiles in brackets.",
        ]
        parts += [_benchmark(record) for _, record in benchmarks]
    if kernels:
        parts += ["# Kernels", "Written by `python -m kernels_pallas report` and `bench`."]
        parts += [_kernels(record) for record in kernels]
    return "\n\n".join(parts) + "\n"


def _summary(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return "No experiment has been run yet."
    verdicts = [claim["held"] for record in records for claim in record["claims"]]
    lines = [f"{verdicts.count(True)} of {len(verdicts)} claims held."]
    for wanted, title in ((False, "Did not hold"), (None, "Not judged")):
        lines += [
            f"- {title}: `{record['name']}` ({record['scale']}): {claim['statement']}"
            for record in records
            for claim in record["claims"]
            if claim["held"] is wanted
        ]
    return "\n".join([lines[0], "", *lines[1:]]).rstrip()


def _experiment(path: Path, record: Mapping[str, Any], relative_to: Path) -> str:
    rows = [
        (
            claim["statement"],
            claim["paper"] or "–",
            (claim["expected"] or "–") + (" (every seed)" if claim["judged_on"] == "every seed" else ""),
            claim["shown"],
            VERDICTS[claim["held"]],
        )
        for claim in record["claims"]
    ]
    seeds = "1 seed" if record["seeds"] == 1 else f"{record['seeds']} seeds"
    inputs = "" if record["inputs"] == "default" else f" Inputs: {record['inputs']}."
    parts = [
        f"## {record['name']}: {record['title']}",
        f"Paper: {record['paper']}. Scale {record['scale']}, {seeds}; {_environment(record)}.{inputs}",
        _table(("claim", "paper (full scale)", "expected here", "measured", "held"), rows),
    ]
    parts += record["notes"]
    figure = path.with_suffix(".png")
    if figure.exists():
        parts.append(f"![{record['title']}]({figure.relative_to(relative_to).as_posix()})")
    return "\n\n".join(parts)


def _benchmark(record: Mapping[str, Any]) -> str:
    rows = [
        (
            target["statement"],
            target["target"],
            target["goal"] or "–",
            target["shown"],
            VERDICTS[target["met"]],
        )
        for target in record["targets"]
    ]
    parts = [
        f"## {record['name']}: {record['title']}",
        f"Scale {record['scale']}; {_environment(record)}.",
        _table(("ratio", "target", "goal", "measured", "met"), rows),
    ]
    return "\n\n".join([*parts, *record["notes"]])


def _kernels(record: Mapping[str, Any]) -> str:
    parts = [
        f"## {record['name']}: {record['title']}",
        f"{_environment(record)}.",
        _table(record["header"], record["rows"]),
    ]
    return "\n\n".join([*parts, *record["notes"]])


def _environment(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"Python {record['python']}, {versions}; {record['platform']}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
