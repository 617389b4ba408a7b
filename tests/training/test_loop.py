import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import chex
import jax
import numpy as np
import pytest

from jaxlib_icml.lm import LMConfig
from jaxlib_icml.training.config import OptimizerConfig, TokenizerConfig, TrainConfig
from jaxlib_icml.training.evaluate import total_nats
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.mesh import MeshConfig
from jaxlib_icml.training.metrics import read_metrics
from jaxlib_icml.training.progress import PlainReporter, Progress, RichReporter
from jaxlib_icml.training.runs import RunFolder, load_run, read_config, write_text

MODEL = LMConfig(
    context_length=16, width=16, num_layers=1, num_heads=2, num_experts=2, num_active_experts=1, mlp_width=16
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text("".join(f"line {i * j % 7} says {'ab' * (j % 3)}\n" for j in range(60)))
    return folder


def config_for(text, run_dir, **changes):
    base = TrainConfig(
        preset="tiny-moe",
        data=str(text),
        run_dir=str(run_dir),
        steps=6,
        batch_size=4,
        held_out_fraction=0.2,
        evaluate_every=3,
        diagnose_every=2,
        checkpoint_every=2,
        sample_tokens=6,
        model=MODEL,
        tokenizer=TokenizerConfig(vocab_size=270),
        optimizer=OptimizerConfig(warmup_steps=2, decay="constant"),
        mesh=MeshConfig(data=1) if jax.device_count() == 1 else MeshConfig(),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    return train(config_for(text, run_dir))


def test_a_finished_run_has_everything(finished, text):
    names = {p.name for p in finished.run_dir.iterdir()}
    assert {
        "config.json",
        "tokenizer",
        "checkpoints",
        "metrics.jsonl",
        "loss.png",
        "samples.txt",
        "result.json",
    } <= names
    assert finished.run_dir.joinpath("loss.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(finished.run_dir.joinpath("result.json").read_text())
    assert result["steps"] == 6
    assert result["held_out_bits_per_byte"] == finished.held_out_bits_per_byte
    assert set(result["ngram_bits_per_byte"]) == {"4", "6"}
    metrics = read_metrics(finished.run_dir)
    assert metrics["loss"][0].tolist() == [1, 2, 3, 4, 5, 6]
    assert metrics["monitor_bits_per_byte"][0].tolist() == [3, 6]
    assert np.isfinite(metrics["loss"][1]).all()
    assert len(finished.samples) == 3


def test_the_optimizers_health_is_recorded(finished):
    metrics = read_metrics(finished.run_dir)
    olion = [f"olion_{name}" for name in ("isotropy", "spread", "sign_agreement", "zero_share")]
    stabilizer = [f"stabilizer_{name}" for name in ("norm_ratio", "spikes", "skipped")]
    assert {name for name in metrics if name.startswith(("olion", "stabilizer"))} == {*olion, *stabilizer}
    for names, expected in ((olion, [2, 4, 6]), (stabilizer, [1, 2, 3, 4, 5, 6])):
        for name in names:
            steps, values = metrics[name]
            assert steps.tolist() == expected
            assert np.isfinite(values).all()
    assert np.all((metrics["olion_sign_agreement"][1] > 0.5) & (metrics["olion_sign_agreement"][1] <= 1))
    # Lengths are near one per leaf: their ratio to the raw norms follows the raw norm.
    lengths = metrics["stabilizer_norm_ratio"][1] * metrics["grad_norm"][1]
    assert np.all((lengths > 1) & (lengths < 50))


def test_the_saved_model_gives_the_reported_figure(finished, text):
    run = load_run(finished.run_dir)
    assert run.step == 6
    from jaxlib_icml.training.corpus import load_corpus

    held_out = load_corpus(str(text), held_out_fraction=0.2).held_out
    docs = run.tokenizer.encode_batch([d.text for d in held_out])
    nats, targets = total_nats(run.graphdef, run.state, docs, eos_id=run.tokenizer.eos_id, batch_size=4)
    assert targets == sum(len(d) + 1 for d in docs)
    bits = nats / np.log(2) / sum(d.num_bytes for d in held_out)
    assert bits == pytest.approx(finished.held_out_bits_per_byte, rel=1e-5)


def test_context_overlap_cannot_change_the_number_of_targets(finished, text):
    run = load_run(finished.run_dir)
    docs = [run.tokenizer.encode("some text that is longer than one row of sixteen tokens, by far\n" * 3)]
    kwargs = {"eos_id": run.tokenizer.eos_id, "batch_size": 2}
    counts = {total_nats(run.graphdef, run.state, docs, overlap=overlap, **kwargs)[1] for overlap in (0, 5, 12)}
    assert counts == {len(docs[0]) + 1}


@pytest.mark.slow
def test_stopping_and_continuing_changes_no_bit(finished, text, tmp_path):
    """Three steps, then the same command with six: weights, losses and data order of the uninterrupted run."""
    run_dir = tmp_path / "two"
    train(config_for(text, run_dir, steps=3))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a line cut by a crash
    continued = train(config_for(text, run_dir))
    chex.assert_trees_all_equal(
        jax.tree.leaves(load_run(run_dir).state), jax.tree.leaves(load_run(finished.run_dir).state)
    )
    assert continued.held_out_bits_per_byte == finished.held_out_bits_per_byte
    ours, theirs = read_metrics(run_dir)["loss"], read_metrics(finished.run_dir)["loss"]
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_diagnosis_changes_no_bit(finished, text, tmp_path):
    train(config_for(text, tmp_path / "blind", diagnose_every=0))
    chex.assert_trees_all_equal(
        jax.tree.leaves(load_run(tmp_path / "blind").state), jax.tree.leaves(load_run(finished.run_dir).state)
    )
    assert not any(name.startswith("olion") for name in read_metrics(tmp_path / "blind"))


@pytest.mark.slow
def test_minutes_end_a_run(text, tmp_path):
    result = train(config_for(text, tmp_path / "timed", steps=None, minutes=0.02))
    assert result.steps >= 1
    rates = read_metrics(tmp_path / "timed")["learning_rate"][1]
    assert np.isfinite(rates).all()


def test_another_run_in_the_same_folder_is_refused(finished, text, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in finished.run_dir.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(ValueError, match=r"already holds another run \(seed: 0 -> 1\)"):
        train(config_for(text, finished.run_dir, seed=1))
    assert before == {p: p.stat().st_mtime_ns for p in before}
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        train(config_for(text, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_use_is_refused(text, tmp_path):
    config = config_for(text, tmp_path / "busy")
    with (
        RunFolder(tmp_path / "busy", config),
        pytest.raises(ValueError, match="in use by another process"),
        RunFolder(tmp_path / "busy", config),
    ):
        pass
    with RunFolder(tmp_path / "busy", config):
        assert read_config(tmp_path / "busy") == config


def test_unusable_folders_and_configs_are_named(text, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot write"):
        train(config_for(text, tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="holds no run"):
        load_run(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        load_run(broken)
    (broken / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        load_run(broken)


def test_data_and_batch_mistakes_come_before_any_folder(text, tmp_path):
    for changes, message in [
        ({"data": str(tmp_path / "missing")}, "missing"),
        ({"batch_size": 3, "mesh": MeshConfig(data=2)}, "batch_size"),
        ({"mesh": MeshConfig(data=5)}, "mesh"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(config_for(text, tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_text(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


STEP = Progress(3, 0.5, 2.0, 1.0, 1234.5, 61.0, True)


def test_plain_lines_show_the_figures(capsys):
    with PlainReporter(interval=0.0) as reporter:
        reporter.note("hello")
        reporter.step(STEP)
    assert capsys.readouterr().out == "hello\n 50%  step 3  loss 2.000  1,234 tok/s  |g| 1.00 ▲  spikes 1  1:01 left\n"


def test_the_bar_shows_the_figures(capsys):
    with RichReporter() as reporter:
        reporter.note("[not markup]")
        reporter.step(STEP)
    out = capsys.readouterr().out
    assert "[not markup]" in out
    assert "loss 2.000" in out


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(text, tmp_path, number):
    run_dir = tmp_path / "run"
    flags = (
        f"--data {text} --run-dir {run_dir} --steps 100000 --batch-size 4 --checkpoint-every 0 --evaluate-every 0 "
        "--tokenizer.vocab-size 270 --model.width 16 --model.num-heads 2 --model.num-layers 1 "
        "--model.context-length 16 --model.num-experts 0 --model.mlp-width 16"
    ).split()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlib_icml.cli", "train", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "XLA_FLAGS": ""},
    )  # fmt: skip
    killer = threading.Timer(240, process.kill)
    killer.start()
    while process.poll() is None and not (run_dir / "metrics.jsonl").exists():
        time.sleep(0.2)
    time.sleep(2.0)
    process.send_signal(number)
    _, errors = process.communicate()
    killer.cancel()
    assert process.returncode == 130, errors
    assert "continues" in errors
    assert "Traceback" not in errors
    assert load_run(run_dir).step > 0
