import dataclasses
import json
import os
import subprocess
import sys

import pytest

from jaxlib_icml import cli
from jaxlib_icml.training.config import TrainConfig

TINY = """
--batch-size 4 --evaluate-every 0 --checkpoint-every 0 --sample-tokens 8 --held-out-fraction 0.2
--tokenizer.vocab-size 270 --model.width 16 --model.num-heads 2 --model.num-layers 1 --model.context-length 32
--model.num-experts 2 --model.num-active-experts 1 --model.expert-width 16
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 40)
    return folder


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "a"
    assert cli.main(["train", "--steps", "3", "--data", str(text), "--run-dir", str(run_dir), *TINY.split()]) == 0
    return run_dir


@pytest.mark.slow
def test_train_writes_the_run_and_says_what_to_type_next(text, tmp_path, capsys):
    run_dir = tmp_path / "b"
    code = cli.main(["train", "--steps", "2", "--data", str(text), "--run-dir", str(run_dir), *TINY.split()])
    out = capsys.readouterr().out
    assert code == 0
    assert "held-out text" in out
    assert "byte 4-gram" in out
    assert "byte 6-gram" in out
    assert f"icml generate {run_dir}" in out
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 2


def test_generate_is_reproducible_and_respects_the_seed(run, capsys):
    def text(*args):
        assert cli.main(["generate", str(run), "--max-new-tokens", "10", "--temperature", "2", *args]) == 0
        return capsys.readouterr().out

    first = text("--prompt", "def f", "--seed", "1")
    assert first == text("--prompt", "def f", "--seed", "1")
    assert first != text("--prompt", "def f", "--seed", "2")
    assert first.startswith("def f")
    several = text("--prompt", "def f", "return")
    assert several.count("-" * 80) == 2


def test_eval_prints_perplexity_and_bits_per_byte(run, text, capsys):
    assert cli.main(["eval", str(run)]) == 0
    own = capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert f"bits per byte   {result['held_out_bits_per_byte']:.4f}" in own
    assert cli.main(["eval", str(run), "--data", str(text / "3.py")]) == 0
    assert "1 documents" in capsys.readouterr().out


def test_info_lists_devices_and_presets(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out
    assert "qwen3-0.6b" in out
    assert "jaxlib" in out


def test_toml_sets_defaults_and_flags_win(text, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text('preset = "tiny-dense"\nsteps = 9\n[model]\nwidth = 24\nnum_heads = 2\n')
    default, rest = cli._train_defaults(["--config", str(file), "--steps", "2"])
    assert rest == ["--steps", "2"]
    config = cli.parse(TrainConfig, rest, "icml train", default)
    assert (config.preset, config.steps, config.model.width, config.model.num_experts) == (
        "tiny-dense",
        2,
        24,
        0,
    )


def test_every_field_is_a_documented_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out

    def flags(config, prefix=""):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                yield from flags(value, f"{prefix}{field.name}.")
            else:
                yield f"--{prefix}{field.name}".replace("_", "-")

    words = set(out.replace("|", " ").replace(",", " ").split())
    missing = [flag for flag in flags(TrainConfig()) if flag not in words]
    assert not missing
    assert "Peak learning rate" in out


BAD = {
    "command": (["trian"], "did you mean train"),
    "flag": (["train", "--widht", "3"], "--widht"),
    "value": (["train", "--steps", "many"], "--steps"),
    "preset": (["train", "--preset", "huge"], "unknown 'huge'"),
    "config file": (["train", "--config", "/nowhere.toml"], "cannot read /nowhere.toml"),
    "heads": (["train", "--model.num-heads", "7"], "7 heads do not divide width 128"),
    "experts": (
        ["train", "--model.num-experts", "2", "--model.num-active-experts", "3"],
        "num_active_experts",
    ),
    "minutes": (["train", "--minutes", "-1"], "minutes"),
    "data": (["train", "--data", "/nowhere"], "/nowhere"),
    "run": (["generate", "/nowhere"], "holds no run"),
    "sampling": (["generate", "/nowhere", "--top-p", "2"], "top_p"),
    "no run": (["generate"], "--model"),
    "info": (["info", "x"], "no arguments"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_one_line_and_exit_code_2(name, capsys):
    args, message = BAD[name]
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("icml: error: ")
    assert captured.err.count("\n") == 1


def test_mistakes_in_files_are_one_line(text, run, tmp_path, capsys):
    (tmp_path / "bad.toml").write_text("steps = ")
    (tmp_path / "key.toml").write_text("stepz = 3")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01\x02")
    (tmp_path / "short.txt").write_text("x = 1\n")
    (tmp_path / "taken").write_text("x")
    tiny = [*TINY.split(), "--steps", "1"]
    for args, message in [
        (["train", "--config", str(tmp_path / "bad.toml")], "not valid TOML"),
        (["train", "--config", str(tmp_path / "key.toml")], "stepz: unknown key"),
        (["train", "--data", str(tmp_path / "empty.txt"), *tiny, "--run-dir", str(tmp_path / "r1")], "empty"),
        (
            ["train", "--data", str(tmp_path / "binary.txt"), *tiny, "--run-dir", str(tmp_path / "r2")],
            "binary",
        ),
        (
            ["train", "--data", str(tmp_path / "short.txt"), *tiny, "--run-dir", str(tmp_path / "r3")],
            "longer than the corpus",
        ),
        (["train", "--data", str(text), *tiny, "--run-dir", str(tmp_path / "taken")], "cannot write"),
        (["train", "--data", str(text), *tiny, "--run-dir", str(run)], "already holds another run"),
        (["generate", str(run), "--prompt", "x + 1\n" * 40], "leave no room"),
    ]:
        if "already" in message:
            args = [*args, "--seed", "9"]
        assert cli.main(args) == 2, args
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_a_failed_start_leaves_no_folder_behind(tmp_path):
    (tmp_path / "short.txt").write_text("x = 1\n")
    run_dir = tmp_path / "run"
    args = ["train", "--data", str(tmp_path / "short.txt"), "--run-dir", str(run_dir), "--steps", "1", *TINY.split()]
    assert cli.main(args) == 2
    assert not run_dir.exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_installed_command_exits_with_2_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "jaxlib_icml.cli", "train", "--preset", "huge"],
        capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
