import json

import pytest

from jaxlib_icml.cli import main
from jaxlib_icml.lm import LMConfig
from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.growing import grow_run
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.runs import load_run

pytestmark = pytest.mark.slow

MODEL = LMConfig(
    context_length=32, width=16, num_layers=2, num_heads=2, num_experts=2, num_active_experts=1, expert_width=8
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(f"document {i}: the quick brown fox jumps over the lazy dog\n" * 20)
    config = TrainConfig(model=MODEL, data=str(text), run_dir=str(folder / "base"), steps=3, batch_size=4)
    train(config)
    return folder


def test_a_grown_run_goes_on_training(runs, capsys):
    before = {p: p.read_bytes() for p in (runs / "base").rglob("*") if p.is_file()}
    out = runs / "grown"
    assert main(["grow", str(runs / "base"), "--out", str(out), "--noise", "0", "--method", "interpose_zero"]) == 0
    printed = capsys.readouterr().out
    assert "4 layers, 4 experts" in printed
    assert float(printed.split("differ by at most ")[1].split()[0]) < 1e-5
    assert {p: p.read_bytes() for p in (runs / "base").rglob("*") if p.is_file()} == before
    more = runs / "more"
    arguments = ["--init-from", str(out), "--data", str(runs / "text"), "--run-dir", str(more), "--steps", "2"]
    assert main(["train", *arguments, "--batch-size", "4"]) == 0
    assert json.loads((more / "result.json").read_text())["steps"] == 2
    model = load_run(more).config
    assert (model.num_layers, model.num_experts, model.num_active_experts, model.expert_width) == (4, 4, 2, 8)


def test_report_of_interposition(runs):
    _, report = grow_run(runs / "base", runs / "deeper", width=1)
    assert report.largest_difference > 0.01
    assert report.cliff[0] == pytest.approx(report.cliff[1])
    assert report.loss[1] != report.loss[0]


def test_nothing_is_written_by_a_growth_that_cannot_be(runs):
    for arguments, message in (
        ({"depth": 0}, "factor"),
        ({"noise": -1.0}, "noise"),
        ({"method": "append"}, "method"),
    ):
        with pytest.raises(ValueError, match=message):
            grow_run(runs / "base", runs / "none", **arguments)
    with pytest.raises(ValueError, match="not an empty folder"):
        grow_run(runs / "base", runs / "text")
    assert not (runs / "none").exists()
    assert main(["grow", str(runs / "nowhere"), "--out", str(runs / "none")]) == 2
