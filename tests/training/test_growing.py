import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.cli import main
from jaxlib_icml.lm import LMConfig, Transformer
from jaxlib_icml.lm.growth import grow, grown_config
from jaxlib_icml.moe.growth import grow_opt_state
from jaxlib_icml.training.checkpoints import Checkpointer, named_arrays
from jaxlib_icml.training.config import OptimizerConfig, TrainConfig
from jaxlib_icml.training.growing import grow_run
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.runs import load_run, read_config, save_model, write_run
from jaxlib_icml.training.step import make_train_program, restore_state

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


@pytest.mark.parametrize("name", ["olion", "adamw"])
@pytest.mark.parametrize("scan", [False, True])
def test_states_of_our_optimizers_grow(name, scan):
    config = dataclasses.replace(MODEL, scan_layers=scan)
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(0)))
    tx = make_optimizer(OptimizerConfig(name))(1e-3)
    grown, model = grow(state, config, key=jax.random.key(0))
    old, new = (nnx.split_state(tree, nnx.Param, ...)[0] for tree in (state, grown))
    gradients = jax.tree.map(jnp.cos, old)
    before = tx.update(gradients, tx.init(old), old)[1]
    wanted = tx.init(new)
    for policy in ("copy", "scale", "reset"):
        after = grow_opt_state(before, old, grown_config(config)[1], policy)
        assert jax.tree.structure(after) == jax.tree.structure(wanted)
        assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(wanted)]
        updates = tx.update(jax.tree.map(jnp.cos, new), after, new)[0]
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates))
    assert model == grown_config(config)[0]


def test_report_of_interposition(runs):
    _, report = grow_run(runs / "base", runs / "deeper", width=1)
    assert report.largest_difference > 0.01
    assert report.cliff[0] == pytest.approx(report.cliff[1])
    assert report.loss[1] != report.loss[0]


def test_nothing_is_written_by_a_growth_that_cannot_be(runs):
    for arguments, message in (
        ({"depth": 0}, "depth"),
        ({"noise": -1.0}, "noise"),
        ({"method": "append"}, "method"),
    ):
        with pytest.raises(ValueError, match=message):
            grow_run(runs / "base", runs / "none", **arguments)
    with pytest.raises(ValueError, match="not an empty folder"):
        grow_run(runs / "base", runs / "text")
    assert not (runs / "none").exists()
    assert main(["grow", str(runs / "nowhere"), "--out", str(runs / "none")]) == 2


@pytest.mark.parametrize("policy", ["reset", "copy"])
def test_a_grown_run_resumes_where_the_old_one_was(runs, policy, capsys):
    out = runs / f"resumed-{policy}"
    arguments = ["grow", str(runs / "base"), "--out", str(out), "--policy", policy, "--steps", "200"]
    assert main(arguments) == 0
    assert f"{policy}; the data go on" in capsys.readouterr().out
    with Checkpointer(runs / "base" / "checkpoints") as old, Checkpointer(out / "checkpoints") as new:
        assert new.can_continue(0)
        config = read_config(out)
        assert (config.steps, config.optimizer.warmup_steps) == (200, 2)
        mesh = make_mesh(config.mesh)
        states = []
        for folder, step, settings in ((runs / "base", 3, old), (out, 0, new)):
            program = make_train_program(load_run(folder).config, make_optimizer(config.optimizer, mesh), mesh)
            states.append(restore_state(settings, step, program))
    (before, place), (after, same_place) = states
    assert place["data"] == same_place["data"]
    assert int(after.step) == 0
    moments = [
        {
            name: x
            for name, x in named_arrays(state.opt_state).items()
            if name.endswith("moe.experts.up.kernel") and x.ndim
        }
        for state in (before, after)
    ]
    assert len(moments[1]) == 2 * len(moments[0]) > 0
    for name, x in moments[0].items():
        first, second = (moments[1][name.replace(f"layers.{i}", f"layers.{j}")] for i, j in _copies(name))
        if policy == "copy":
            np.testing.assert_array_equal(first, jnp.concatenate([x, x]))
            np.testing.assert_array_equal(second, first)
        else:
            assert not jnp.any(first)
    assert main(["train", "--resume", str(out), "--steps", "2"]) == 0
    assert json.loads((out / "result.json").read_text())["steps"] == 2


def _copies(name):
    layer = int(name.split("layers.")[1].split(".")[0])
    return (layer, 2 * layer), (layer, 2 * layer + 1)


def test_resuming_needs_a_run_and_takes_options_on_top(runs, capsys):
    assert main(["train", "--resume", str(runs / "text")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "base"), "--run-dir", "x"]) == 2
    assert "not both" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "base"), "--seed", "5"]) == 2
    assert "seed: 0 -> 5" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "base"), "--steps", "4"]) == 0
    assert json.loads((runs / "base" / "result.json").read_text())["steps"] == 4


def test_no_state_to_copy(runs):
    grow_run(runs / "base", runs / "first")
    with pytest.raises(ValueError, match="policy must be one of"):
        grow_run(runs / "base", runs / "none", policy="keep")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        grow_run(runs / "base", runs / "none", steps=0)
    import_like = runs / "imported"
    model = load_run(runs / "base")
    write_run(import_like, read_config(runs / "base"), model.tokenizer, lambda saver: save_model(saver, model))
    with pytest.raises(ValueError, match="holds no state of an optimizer"):
        grow_run(import_like, runs / "none", policy="copy")
    assert not grow_run(import_like, runs / "second")[1].continues
    assert not (runs / "none").exists()
