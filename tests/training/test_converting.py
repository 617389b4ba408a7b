"""Dense runs made runs of mixtures of experts."""

import json

import pytest

from jaxlib_icml.cli import main
from jaxlib_icml.lm import LMConfig
from jaxlib_icml.moe.prism_moe import PrismConfig
from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.converting import convert_run
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.runs import load_run, read_config

pytestmark = pytest.mark.slow

MODEL = LMConfig(context_length=32, width=16, num_layers=2, num_heads=2, mlp_width=64)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: the quick brown fox jumps over the lazy dog\n" * 20)
    train(TrainConfig(model=MODEL, data=str(folder / "text"), run_dir=str(folder / "base"), steps=3, batch_size=4))
    return folder


def test_a_converted_run_goes_on_training(runs, capsys):
    before = {p: p.read_bytes() for p in (runs / "base").rglob("*") if p.is_file()}
    out = runs / "experts"
    arguments = ["--num-experts", "6", "--tokens", "512", "--router-delta", "4", "--steps", "2", "--no-compensate"]
    assert main(["convert-moe", str(runs / "base"), "--out", str(out), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "50.0 % of the hidden units of 2 layers" in printed
    assert float(printed.split("with all experts")[-2].split()[-1]) < 1e-4
    assert {p: p.read_bytes() for p in (runs / "base").rglob("*") if p.is_file()} == before
    config = read_config(out)
    assert config.optimizer.learning_rate == pytest.approx(read_config(runs / "base").optimizer.learning_rate / 10)
    assert main(["train", "--resume", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["steps"] == 2
    model = load_run(out).config
    assert (model.num_experts, model.num_active_experts, model.moe_gate, model.moe_router_delta) == (6, 2, "cosine", 4)


def test_report_and_misuse(runs):
    _, report = convert_run(runs / "base", runs / "repaired", PrismConfig(num_experts=6, min_tokens=16), tokens=512)
    assert len(report.layers) == 2
    assert report.exact_difference > 0  # the repair is for few experts
    for arguments, message in (
        ({"prism": PrismConfig(num_experts=5)}, "do not divide among 5"),
        ({"prism": PrismConfig(num_experts=6), "tokens": 0}, "tokens"),
        ({"prism": PrismConfig(num_experts=6), "steps": 0}, "steps"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_run(runs / "base", runs / "none", **arguments)
    with pytest.raises(ValueError, match="experts already"):
        convert_run(runs / "repaired", runs / "none", PrismConfig(num_experts=6))
    with pytest.raises(ValueError, match="not an empty folder"):
        convert_run(runs / "base", runs / "text", PrismConfig())
    assert not (runs / "none").exists()
    assert main(["convert-moe", str(runs / "nowhere"), "--out", str(runs / "none")]) == 2
