"""`icml` with models from elsewhere: import, export, generate, eval and train --init-from."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml import cli
from jaxlib_icml.lm import LMConfig, Transformer
from jaxlib_icml.lm.hub import export_model, load_pretrained
from jaxlib_icml.lm.tokenizer import ByteTokenizer
from jaxlib_icml.training.runs import load_run

CONFIG = LMConfig(vocab_size=257, context_length=48, width=16, num_layers=1, num_heads=2, mlp_width=32, qk_norm=True)
OPTIONS = ["--batch-size", "4", "--evaluate-every", "0", "--checkpoint-every", "0", "--sample-tokens", "8"]
OPTIONS += ["--held-out-fraction", "0.2"]
TRAIN = ["--steps", "2", *OPTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    _, state = nnx.split(Transformer(CONFIG, rngs=nnx.Rngs(0)))
    export_model(path, CONFIG, state, ByteTokenizer())
    return path


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "imported"
    assert cli.main(["import", str(folder), "--run-dir", str(run)]) == 0
    return run


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    return folder


def output(capsys, *args):
    code = cli.main(list(args))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_a_folder_and_its_import_write_the_same_text(folder, imported, capsys):
    options = ("--prompt", "def", "--max-new-tokens", "12", "--seed", "3")
    first = output(capsys, "generate", str(folder), *options)
    assert first.startswith("def")
    assert first == output(capsys, "generate", "--model", str(folder), *options)
    assert first == output(capsys, "generate", str(imported), *options)


def test_eval_of_a_folder_equals_that_of_its_import(folder, imported, text, capsys):
    first = output(capsys, "eval", str(folder), "--data", str(text))
    assert "bits per byte" in first
    assert first == output(capsys, "eval", str(imported), "--data", str(text))
    shorter = output(capsys, "eval", str(folder), "--data", str(text), "--context-length", "8")
    assert shorter != first


def test_an_exported_import_is_the_same_file(folder, imported, tmp_path, capsys):
    out = output(capsys, "export", str(imported), "--out", str(tmp_path / "again"))
    assert "qwen3, float32" in out
    files = [(path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "again")]
    assert files[0] == files[1]


def test_folders_have_names_by_default(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "runs/small" in output(capsys, "import", str(folder))
    assert "runs/small/safetensors" in output(capsys, "export", "runs/small", "--format", "safetensors")
    assert load_pretrained("runs/small/safetensors").config == load_pretrained(folder).config
    assert cli.main(["export", str(folder)]) == 2
    assert "out: name the folder to write" in capsys.readouterr().err


@pytest.mark.slow
def test_training_starts_from_the_weights_given(folder, text, tmp_path, capsys):
    run = tmp_path / "run"
    args = ["train", "--init-from", str(folder), "--data", str(text), "--run-dir", str(run), *TRAIN]
    output(capsys, *args, "--optimizer.learning-rate", "1e-12")
    trained, source = load_run(run), load_pretrained(folder)
    assert trained.step == 2
    for a, b in zip(jax.tree.leaves(trained.state), jax.tree.leaves(source.state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The same command goes on with the run, not with the folder.
    output(capsys, *args[: -len(TRAIN)], "--steps", "3", *OPTIONS, "--optimizer.learning-rate", "1e-12")
    assert load_run(run).step == 3
    output(capsys, "generate", str(run), "--max-new-tokens", "3")


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_with_the_weights_again(folder, text, tmp_path, capsys):
    run_dir = tmp_path / "run"
    args = ["train", "--init-from", str(folder), "--data", str(text), "--run-dir", str(run_dir), *TRAIN]
    output(capsys, *args, "--optimizer.learning-rate", "1e-12")
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)  # what an unfinished save leaves
    output(capsys, *args, "--optimizer.learning-rate", "1e-12")
    for a, b in zip(
        jax.tree.leaves(load_run(run_dir).state), jax.tree.leaves(load_pretrained(folder).state), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_without_the_model_it_began_with(folder, text, tmp_path, capsys):
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(folder, source)
    args = ["train", "--init-from", str(source), "--data", str(text), "--run-dir", str(run)]
    output(capsys, *args, *TRAIN)
    shutil.rmtree(source)
    output(capsys, *args, "--steps", "3", *OPTIONS)
    assert load_run(run).step == 3


@pytest.mark.slow
def test_training_may_lengthen_the_context_but_not_change_the_parameters(folder, imported, text, tmp_path, capsys):
    for i, source in enumerate((folder, imported)):
        run = tmp_path / f"longer{i}"
        args = ["train", "--init-from", str(source), "--data", str(text), "--run-dir", str(run), *TRAIN]
        output(capsys, *args, "--model.context-length", "64")
        assert load_run(run).config.context_length == 64
        run = tmp_path / f"wider{i}"
        args[args.index(str(tmp_path / f"longer{i}"))] = str(run)
        assert cli.main([*args, "--model.mlp-width", "64"]) == 2
        error = capsys.readouterr().err
        assert "mlp" in error
        assert error.count("\n") == 1
        assert not run.exists()


def test_chat_needs_chat_tokens_and_uses_the_template(folder, tmp_path, capsys):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    copy = tmp_path / "chatty"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    out = output(capsys, "generate", str(copy), "--chat", "--system", "Hi", "--prompt", "a", "--max-new-tokens", "5")
    assert "assistant" not in out  # the reply only


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["import", "FOLDER", "--run-dir", "IMPORTED"], "run_dir: IMPORTED is not an empty folder"),
        (["import", "nothing", "--run-dir", "new"], "nothing"),
        (["export", "IMPORTED", "--out", "FOLDER"], "is not empty; overwrite=True"),
        (["export", "IMPORTED", "--out", "new", "--dtype", "int8"], "dtype"),
        (["generate", "FOLDER", "--system", "Hi"], "system: needs --chat"),
        (["generate", "FOLDER", "--prompt", "x" * 60], "60 tokens|61 tokens"),
        (["eval", "FOLDER"], "data: name a text"),
        (["eval", "FOLDER", "--data", "FOLDER/config.json", "--context-length", "99"], "seq_len: must be between"),
        (["train", "--init-from", "nothing"], "nothing"),
        (["generate", "FOLDER", "--seed", "1" + "0" * 22], "seed: must fit into 64 bits"),
        (["export", "FOLDER", "--out", "FOLDER/config.json"], "is not a folder"),
        (["generate", "x" * 300], "name too long|no run"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(args, message, folder, imported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    places = {"FOLDER": str(folder), "IMPORTED": str(imported)}

    def fill(text):
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    assert cli.main([fill(arg) for arg in args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert any(part in error for part in fill(message).split("|")), error
    assert not list(tmp_path.iterdir())
