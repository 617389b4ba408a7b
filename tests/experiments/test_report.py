"""The report: everything in the result files, nothing else, and the same every time."""

import io
import json
import re

import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.report import BEGIN, END, results_markdown, stale_files, with_method_table
from jaxlib_icml.methods import method_table
from tests.experiments.test_runner import SAMPLE


@pytest.fixture
def checkout(tmp_path):
    """A folder like a checkout, with results of the sample and a README."""
    results = tmp_path / "experiments" / "results"
    for argv in (["run", "coins/fair"], ["run", "coins/fair", "--scale", "full"], ["bench", "sums"]):
        assert main(argv, catalogue=SAMPLE, results=results, console=Console(file=io.StringIO())) == 0
    (tmp_path / "README.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n", encoding="utf-8")
    return tmp_path


def _report(checkout, *argv):
    console = Console(file=io.StringIO())
    code = main(["report", *argv], results=checkout / "experiments" / "results", console=console)
    return code, console.file.getvalue()


def _cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_check_says_stale_until_the_report_is_written(checkout):
    assert _report(checkout, "--check") == (1, "RESULTS.md: stale\nREADME.md: stale\n")
    assert _report(checkout) == (0, "RESULTS.md: written\nREADME.md: written\n")
    assert _report(checkout, "--check") == (0, "")
    assert _report(checkout) == (0, "everything is up to date\n")
    result = checkout / "experiments/results/coins/fair.json"
    result.write_text(result.read_text(encoding="utf-8").replace("A fair coin", "A coin"), encoding="utf-8")
    assert _report(checkout, "--check") == (1, "RESULTS.md: stale\n")


def test_the_report_holds_every_claim_with_its_numbers(checkout):
    _report(checkout)
    text = (checkout / "experiments/RESULTS.md").read_text(encoding="utf-8")
    rows = [_cells(line) for line in text.splitlines() if line.startswith("| ")]
    for path in (checkout / "experiments/results/coins").glob("*.json"):
        for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]:
            statement = claim["statement"].replace("|", r"\|")
            row = next(r for r in rows if r[0] == statement and r[3] == claim["shown"])
            assert len(row) == 5
            assert row[1] == (claim["paper"] or "–")
            assert row[4] == {True: "yes", False: "no", None: "not judged"}[claim["held"]]
    assert "4 of 8 claims held." in text
    assert "- Did not hold: `coins/fair` (laptop): No heads at all" in text
    assert "- Not judged: `coins/fair` (laptop): All heads at full scale" in text
    assert "The coin is a random number generator." in text
    assert text.index("Scale laptop") < text.index("Scale full") < text.index("# Benchmarks")
    assert next(r for r in rows if r[1] == "≥ 1e+09")[4] == "no"


def test_figure_links_lead_somewhere(checkout):
    _report(checkout)
    report = checkout / "experiments/RESULTS.md"
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", report.read_text(encoding="utf-8"))
    assert links == ["results/coins/fair.png", "results/coins/fair.full.png"]
    assert all((report.parent / link).is_file() for link in links)


def test_only_the_part_between_the_markers_changes(checkout):
    _report(checkout)
    text = (checkout / "README.md").read_text(encoding="utf-8")
    assert text == f"# Title\n\n{BEGIN}\n{method_table()}\n{END}\n\nThe end.\n"
    assert with_method_table(text) == text


def test_a_missing_readme_is_left_missing_and_lost_markers_are_an_error(checkout, capsys):
    readme = checkout / "README.md"
    for damaged in ("# Title\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"):
        readme.write_text(damaged, encoding="utf-8")
        assert _report(checkout)[0] == 2
        assert "README.md must hold the lines" in capsys.readouterr().err
        assert readme.read_text(encoding="utf-8") == damaged
    readme.unlink()
    assert _report(checkout) == (0, "RESULTS.md: written\n")
    assert not readme.exists()


def test_no_results_is_a_report_too(tmp_path):
    assert "No experiment has been run yet." in results_markdown(tmp_path / "none", tmp_path)


def test_the_text_depends_on_the_files_alone(checkout, tmp_path_factory):
    results = checkout / "experiments/results"
    other = tmp_path_factory.mktemp("other") / "experiments" / "results"
    for path in sorted(results.rglob("*"), reverse=True):
        if path.is_file():
            copy = other / path.relative_to(results)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    assert results_markdown(results, results.parent) == results_markdown(other, other.parent)


def test_the_houses_own_report_is_up_to_date():
    assert [path.name for path in stale_files()] == [], "run: python -m experiments report"


def test_the_report_shows_the_tables_of_the_kernels(checkout):
    record = {
        "name": "kernels/sample",
        "kind": "kernels",
        "title": "A table",
        "python": "3.11",
        "versions": {"jax": "0"},
        "platform": "a chip",
        "header": ["a", "b"],
        "rows": [["1", "x|y"]],
        "notes": ["A note."],
        "data": [],
    }
    path = checkout / "experiments/results/kernels/sample.json"
    path.parent.mkdir()
    path.write_text(json.dumps(record), encoding="utf-8")
    assert _report(checkout)[0] == 0
    text = (checkout / "experiments/RESULTS.md").read_text(encoding="utf-8")
    part = text[text.index("## kernels/sample: A table") :]
    assert "| a | b |\n| --- | --- |\n| 1 | x\\|y |" in part
    assert part.rstrip().endswith("A note.")
