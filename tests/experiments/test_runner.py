"""The runner, its files and its command, on the small experiments in `tests/experiments/sample`."""

import io
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.catalogue import HOUSE, Catalogue
from experiments.protocol import Outcome
from experiments.runner import run_experiment

SAMPLE = Catalogue(Path(__file__).parent / "sample", "tests.experiments.sample")


@pytest.fixture
def results(tmp_path):
    return tmp_path / "experiments" / "results"


@pytest.fixture
def command(results):
    """Runs the command on the sample; returns its exit code and what it printed."""

    def run(*argv, terminal=False):
        console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
        code = main(argv, catalogue=SAMPLE, results=results, console=console)
        return code, console.file.getvalue()

    return run


def _files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_names_are_found_without_importing_and_helpers_are_not_experiments():
    assert SAMPLE.experiments() == ["coins/broken", "coins/fair"]
    assert SAMPLE.benchmarks() == ["sums"]


def test_every_experiment_and_benchmark_of_the_house_loads():
    for name in HOUSE.experiments():
        assert HOUSE.experiment(name).name == name
    for name in HOUSE.benchmarks():
        assert HOUSE.benchmark(name).name == name


def test_list_shows_titles_and_claims(command):
    code, text = command("list")
    assert code == 0
    assert "coins/fair  A fair coin (Bernoulli, Ars Conjectandi)" in text
    assert "    - No heads at all" in text
    assert "bench sums  Short sums against long ones" in text


def test_a_run_writes_what_it_measured(command, results):
    code, text = command("run", "coins/fair", "--seeds", "3")
    assert code == 0
    assert _files(results) == ["coins/fair.json", "coins/fair.png"]
    record = json.loads((results / "coins/fair.json").read_text(encoding="utf-8"))
    assert (record["scale"], record["seeds"], record["inputs"]) == ("laptop", 3, "default")
    assert record["data"]["throws"] == 1000
    claims = {claim["id"]: claim for claim in record["claims"]}
    shares = claims["half"]["values"]
    assert len(shares) == 3
    assert shares == record["data"]["share"]
    # Within four standard deviations of a fair coin, and not the same coin three times.
    assert all(abs(share - 0.5) < 4 * 0.5 / 1000**0.5 for share in shares)
    assert len(set(shares)) > 1
    assert {name: claim["held"] for name, claim in claims.items()} == {
        "half": True,
        "never": False,
        "certain": None,
        "large": True,
    }
    assert claims["large"]["values"] == [1.0]
    assert (results / "coins/fair.png").read_bytes().startswith(b"\x89PNG")
    assert record["wall_clock"]["share"]["throwing"] <= 1.0
    # Off a terminal, progress is plain lines.
    assert "throwing: 3/3 share 0." in text
    assert "1000 throws per seed" in text
    assert "The coin is a random number generator." in text
    assert re.search(r"No heads at all .* no\b", text)
    assert re.search(r"All heads at full scale .* heads .* not judged\b", text)
    assert "One [1]" in text  # brackets are text, not markup


def test_a_terminal_shows_a_bar(command, tmp_path):
    code, text = command("run", "coins/fair", "--scale", "smoke", "--out", str(tmp_path), terminal=True)
    assert code == 0
    assert "━" in text
    assert "1/1" in text


def test_result_files_name_no_host_user_or_folder(command, results):
    command("run", "coins/fair")
    text = (results / "coins/fair.json").read_text(encoding="utf-8")
    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text
    assert str(results) not in text
    record = json.loads(text)
    assert set(record["versions"]) >= {"jax", "jaxlib", "flax", "optax", "numpy"}
    assert "/" not in record["platform"]


def test_smoke_judges_nothing_and_leaves_kept_results_alone(command, results, tmp_path):
    command("run", "coins/fair")
    before = (results / "coins/fair.json").read_bytes()
    code, text = command("run", "coins/fair", "--scale", "smoke")
    assert code == 0
    written = Path(re.search(r"written: (.*\.json)", text)[1])
    assert not written.is_relative_to(results)
    smoke = json.loads(written.read_text(encoding="utf-8"))
    assert smoke["seeds"] == 1
    assert {claim["held"] for claim in smoke["claims"]} == {None}
    assert (results / "coins/fair.json").read_bytes() == before


@pytest.mark.parametrize("below", [".", "deeper"])
def test_smoke_refuses_the_folder_of_kept_results(command, results, below, capsys):
    code, _ = command("run", "coins/fair", "--scale", "smoke", "--out", str(results / below))
    assert code == 2
    assert "smoke must not go over" in capsys.readouterr().err
    assert not results.exists()


def test_full_scale_lies_beside_the_laptop(command, results):
    command("run", "coins/fair")
    command("run", "coins/fair", "--scale", "full")
    assert _files(results) == [f"coins/fair{end}" for end in (".full.json", ".full.png", ".json", ".png")]
    record = json.loads((results / "coins/fair.full.json").read_text(encoding="utf-8"))
    assert {claim["id"]: claim["held"] for claim in record["claims"]}["certain"] is False


def test_a_failure_in_the_middle_keeps_earlier_results_and_other_experiments_run(command, results, capsys):
    kept = results / "coins" / "broken.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("earlier", encoding="utf-8")
    code, _ = command("run")
    assert code == 1
    errors = capsys.readouterr().err
    assert "RuntimeError: out of coins" in errors
    assert "experiments: failed: coins/broken; earlier results are untouched" in errors
    assert kept.read_text(encoding="utf-8") == "earlier"
    assert _files(results) == ["coins/broken.json", "coins/fair.json", "coins/fair.png"]


def test_a_failing_figure_keeps_earlier_results(results):
    console = Console(file=io.StringIO())
    experiment = SAMPLE.experiment("coins/fair")
    run_experiment(experiment, scale="laptop", folder=results, console=console, seeds=1)
    before = {name: (results / name).read_bytes() for name in _files(results)}

    def fail(figure, data):
        raise RuntimeError("no ink")

    inkless = replace(experiment, plot=fail)
    with pytest.raises(RuntimeError, match="no ink"):
        run_experiment(inkless, scale="laptop", folder=results, console=console, seeds=2)
    assert {name: (results / name).read_bytes() for name in _files(results)} == before


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome({"size": [1.0, 2.0]}), r"measured 'size' with shape \(2,\) over 1 seeds"),
        (Outcome({}), r"missing \['size'\]"),
        (Outcome({"size": 1.0, "other": 1.0}), r"extra \['other'\]"),
    ],
)
def test_outcomes_must_measure_what_was_declared(outcome, message, results):
    experiment = replace(SAMPLE.experiment("coins/broken"), run=lambda context: outcome)
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError, match=message):
        run_experiment(experiment, scale="laptop", folder=results, console=console, seeds=1)
    assert not results.exists()


def test_the_users_data_reaches_the_experiment_and_its_path_stays_out_of_the_record(command, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("text", encoding="utf-8")
    out = tmp_path / "out"
    code, _ = command("run", "coins/broken", "--scale", "smoke", "--data", str(mine), "--out", str(out))
    assert code == 0
    text = (out / "coins/broken.json").read_text(encoding="utf-8")
    record = json.loads(text)
    assert record["inputs"] == "the user's own"
    assert record["claims"][0]["values"] == [len(str(mine))]
    assert str(mine) not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "coins/fare"], "unknown experiment 'coins/fare'; did you mean coins/fair?"),
        (["run", "x"], "unknown experiment 'x'; there are: coins/broken, coins/fair"),
        (["bench", "nothing"], "unknown benchmark 'nothing'; there are: sums"),
        (["run", "--scale", "huge"], "--scale must be one of smoke, laptop, full; got 'huge'"),
        (["run", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["run", "--seeds", "few"], "argument --seeds: invalid int value: 'few'"),
        (["run", "--data", "no/such/file"], "--data: there is nothing at no/such/file"),
        (["run", "coins/fair", "--data", __file__], "--data: coins/fair does not take data of your own"),
        (["run", "--colour"], "unrecognized arguments: --colour"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(command, results, capsys, argv, message):
    code, _ = command(*argv)
    assert code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not results.exists()


def test_bench_judges_targets_and_smoke_does_not(command, results):
    code, text = command("bench", "sums")
    assert code == 0
    record = json.loads((results / "benchmarks/sums.json").read_text(encoding="utf-8"))
    more, absurd = record["targets"]
    assert (more["met"], absurd["met"]) == (True, False)
    seconds = record["seconds"]["times"]
    ratios = sorted(b / a for a, b in zip(seconds["short"], seconds["long"], strict=True))
    assert more["median"] == pytest.approx(ratios[4], rel=1e-5)
    assert "speed over short" in text
    code, text = command("bench", "--scale", "smoke")
    assert code == 0
    assert text.count("not judged") == 2
    assert _files(results) == ["benchmarks/sums.json"]


def test_an_interrupt_exits_130(command, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.runner.run_experiment", interrupt)
    assert command("run", "coins/fair")[0] == 130
