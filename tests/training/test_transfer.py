"""Runs that take their hyper-parameters from a smaller one."""

import dataclasses
import json

import pytest

from jaxlib_icml.cli import main
from jaxlib_icml.moe import BaseSpec, MoEShape
from jaxlib_icml.training.config import TrainConfig, updated
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.runs import read_config
from jaxlib_icml.training.transfer import BASE_FILE, base_text, read_base, transferred, with_base

SMALL = {
    "parameterization": "moe-mup",
    "steps": 2,
    "batch_size": 2,
    "sample_tokens": 0,
    "evaluate_every": 0,
    "tokenizer": {"kind": "bytes"},
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.05},
    "model": {
        "context_length": 32,
        "width": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_experts": 4,
        "num_active_experts": 1,
        "expert_width": 64,
    },
}
WIDER = {"width": 64, "num_heads": 4, "num_layers": 2, "expert_width": 256}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.fixture
def base(tmp_path):
    """A file as a run would have written it."""
    shape = MoEShape(32, 1, 64, 4, 1, head_dim=16)
    path = tmp_path / "tuned.json"
    path.write_text(base_text(BaseSpec(shape, learning_rate=0.01, weight_decay=0.05, optimizer="adamw")))
    return path


def wider(base, text, run, **change):
    config = updated(TrainConfig(), {**SMALL, "optimizer": {}, "data": str(text), "run_dir": str(run), **change})
    return with_base(updated(config, {"model": WIDER}), base)


@pytest.mark.slow
def test_base_is_written_and_can_be_transferred_again(text, tmp_path):
    run = tmp_path / "base"
    train(updated(TrainConfig(), {**SMALL, "data": str(text), "run_dir": str(run)}))
    base = read_base(run)
    assert base.shape == MoEShape(32, 1, 64, 4, 1, head_dim=16, vocab_size=257, context=32)
    assert (base.learning_rate, base.weight_decay, base.optimizer) == (0.01, 0.05, "adamw")
    config = wider(run, text, tmp_path / "wide")
    assert config.optimizer.learning_rate == 0.01
    train(config)
    assert read_base(tmp_path / "wide") == base
    saved = read_config(tmp_path / "wide").model
    assert (saved.residual_scale, saved.logit_scale, saved.moe_gate) == (1 / 2, 1 / 2, "sigmoid")
    records = [json.loads(line) for line in (tmp_path / "wide" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] == pytest.approx(5.55, abs=0.05)
    # The same command goes on.
    assert train(dataclasses.replace(config, steps=3)).steps == 3
    # So does the run by itself, and a grown one, when the base has gone.
    run.rename(tmp_path / "moved")
    assert main(["train", "--resume", str(tmp_path / "wide"), "--steps", "4"]) == 0
    assert main(["grow", str(tmp_path / "wide"), "--out", str(tmp_path / "grown"), "--steps", "1"]) == 0
    assert main(["train", "--resume", str(tmp_path / "grown")]) == 0
    assert read_base(tmp_path / "grown") == base
    assert read_config(tmp_path / "grown").model.residual_scale == 1 / 2  # as its weights were trained


def test_another_base_is_refused(base, text, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    changed = dataclasses.replace(read_base(base), learning_rate=0.5)
    (run / BASE_FILE).write_text(base_text(changed))
    with pytest.raises(ValueError, match="another base model"):
        transferred(wider(base, text, run), run)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"num_experts": 8}}, "κ = 1/8"),
        ({"model": {"num_heads": 8}}, "head_dim"),
        ({"optimizer": {"name": "olion"}}, "tuned with adamw"),
        ({"model": {"attention": "l2a"}}, "no rule is known for l2a"),
    ],
)
def test_bases_that_do_not_carry_over(base, text, tmp_path, values, message):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        train(updated(wider(base, text, run), values))
    assert not run.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "must hold an object"),
        ("{}", "must hold a shape"),
        (
            '{"shape": {"width": 64, "num_layers": 2, "expert_width": 9, "num_experts": 2, "num_active": 3}}',
            "num_active",
        ),
        (
            '{"shape": {"width": 64, "num_layers": 2, "expert_width": 9, "num_experts": 2, "num_active": 1}, "lr": 1}',
            "lr",
        ),
    ],
)
def test_damaged_base_files(tmp_path, content, message):
    (tmp_path / "base.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_base(tmp_path)


def test_command_line(base, text, tmp_path, capsys):
    run = tmp_path / "run"
    args = ["train", "--data", str(text), "--run-dir", str(run), "--steps", "1", "--sample-tokens", "0"]
    assert main([*args, "--base", str(tmp_path / "none")]) == 2
    assert "base: cannot read" in capsys.readouterr().err
    assert main([*args, "--base", str(base), "--model.num-heads", "8", "--model.num-experts", "16"]) == 2
    assert "transfer holds at fixed κ only" in capsys.readouterr().err
    assert not run.exists()
    with pytest.raises(ValueError, match="needs a parameterization"):
        TrainConfig(base="x")
