"""Training with L2A: the price of routing, exploration, capacity, and runs that take their weights from others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml import cli
from jaxlib_icml.attention import CapacityLadder, CapacityLadderState, L2AConfig
from jaxlib_icml.lm import Exploration, LMConfig, Transformer, loss_fn
from jaxlib_icml.training import loop
from jaxlib_icml.training.checkpoints import named_arrays
from jaxlib_icml.training.config import OptimizerConfig, TokenizerConfig, TrainConfig, updated
from jaxlib_icml.training.evaluate import routing_usage, total_nats
from jaxlib_icml.training.loop import train
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.metrics import read_metrics
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.pruning import prune_run
from jaxlib_icml.training.runs import load_run
from jaxlib_icml.training.step import make_train_program

MODEL = LMConfig(vocab_size=257, context_length=16, width=16, num_layers=2, num_heads=2)
L2A = dataclasses.replace(
    MODEL, context_length=32, attention="l2a", l2a=L2AConfig(window=4, price_step=0.03, price_damping=4.0)
)


@functools.cache
def program(accumulation_steps=1, seed=0):
    mesh = make_mesh(devices=jax.devices()[:1])
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), mesh)
    return make_train_program(L2A, optimizer, mesh, accumulation_steps=accumulation_steps, seed=seed)


def batch_of(rows=4, seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (rows, 32), 0, 257)
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segment_ids": jnp.ones_like(tokens)}


@pytest.mark.slow
def test_the_price_follows_the_rate():
    prog = program()
    state = prog.init(jax.random.key(0))
    price = multiplier = 0.0
    for step in range(3):
        state, metrics = prog.step(state, batch_of(), 1e-2, 0.7)
        assert float(metrics.l2a["price"]) == pytest.approx(price, rel=1e-5, abs=1e-6)
        excess = float(metrics.l2a["rate"]) - 0.2
        multiplier += 0.03 * excess
        price = min(10.0, multiplier + 4.0 * excess)
        assert 0.5 < float(metrics.l2a["rate"]) <= float(metrics.l2a["busiest_rate"]) <= 1, step
        assert float(metrics.l2a["temperature"]) == pytest.approx(0.7)
    assert float(state.routing_control.multiplier) == pytest.approx(multiplier, rel=1e-5)


@pytest.mark.slow
def test_the_step_explores_with_its_seed_and_number():
    prog = program(seed=5)
    state = prog.init(jax.random.key(0))
    exploration = Exploration(jax.random.fold_in(jax.random.key(5), 0), jnp.float32(1.0))
    model = nnx.merge_state(state.params, state.rest)
    _, aux = jax.jit(lambda m: loss_fn(prog.graphdef, m, batch_of(), exploration=exploration))(model)
    _, metrics = prog.step(state, batch_of(), 1e-2, 1.0)
    assert float(metrics.l2a["rate"]) == pytest.approx(float(aux.l2a.rate.mean()), abs=1e-6)
    assert float(metrics.loss) == pytest.approx(float(aux.nll_sum / aux.weight_sum), rel=1e-5)


def test_gradients_that_are_not_finite_leave_the_price_alone():
    prog = program()
    state = prog.init(jax.random.key(0))
    poisoned = batch_of() | {"weights": jnp.full((4, 32), jnp.inf)}
    state, metrics = prog.step(state, poisoned, 1e-2, 1.0)
    assert (float(metrics.finite), float(state.routing_control.multiplier)) == (0.0, 0.0)


@pytest.mark.slow
def test_micro_batches_explore_apart():
    prog = program(accumulation_steps=2)
    same = jax.tree.map(lambda x: jnp.concatenate([x[:1]] * 4), batch_of())
    _, metrics = prog.step(prog.init(jax.random.key(0)), same, 1e-2, 1.0)
    assert 0.5 < float(metrics.l2a["rate"]) < 1


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text("".join(f"line {i * j % 7} says {'ab' * (j % 3)}\n" for j in range(60)))
    return folder


def config_for(text, run_dir, model, **changes):
    base = TrainConfig(
        data=str(text),
        run_dir=str(run_dir),
        steps=6,
        batch_size=4,
        held_out_fraction=0.2,
        evaluate_every=0,
        diagnose_every=0,
        checkpoint_every=3,
        sample_tokens=4,
        model=model,
        tokenizer=TokenizerConfig(kind="bytes"),
        optimizer=OptimizerConfig(warmup_steps=2),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def short(text, tmp_path_factory):
    return train(config_for(text, tmp_path_factory.mktemp("runs") / "short", MODEL)).run_dir


@pytest.fixture(scope="module")
def extended(text, short, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "long"
    return train(config_for(text, run_dir, L2A, init_from=str(short))).run_dir


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_one_without_routers(text, short, tmp_path, monkeypatch):
    seen = {}

    class Stop(Exception):
        pass

    def stop(self, state, *_):
        seen.update(named_arrays(state.params))
        raise Stop

    monkeypatch.setattr(loop._Run, "_steps", stop)
    with pytest.raises(Stop):
        train(config_for(text, tmp_path / "run", L2A, init_from=str(short)))
    given = named_arrays(load_run(short).state)
    assert {name for name in seen if name not in given} == {
        f"layers.{i}.attention.router.out.{part}" for i in range(2) for part in ("kernel", "bias")
    }
    for name, array in given.items():
        np.testing.assert_array_equal(seen[name], array)


@pytest.mark.slow
def test_an_extended_run_says_how_it_routes_and_can_be_continued(text, short, extended):
    steps, temperatures = read_metrics(extended)["l2a_temperature"]
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    # The last fifth of the run explores less and less.
    assert list(temperatures[:5]) == [1.0] * 5
    assert temperatures[5] == pytest.approx((1 - 5 / 6) / 0.2)
    more = train(config_for(text, extended, L2A, init_from=str(short), steps=8))
    assert more.steps == 8
    steps, prices = read_metrics(extended)["l2a_price"]
    assert list(steps) == list(range(1, 9))
    assert prices[0] == 0
    assert (prices[1:] > 1).all()


@pytest.mark.slow
def test_capacity_shrinks_when_routing_is_calm(text, tmp_path):
    def init():
        return CapacityLadderState(0, 0)

    def update(rates, state):  # calm from the third step on
        rung = state.rung + (len(calls) == 2)
        calls.append(rates[0])
        return (1.0, 0.25)[rung], CapacityLadderState(rung, 0)

    calls, capacities = [], []
    original = loop._Run._program

    def spy(self, config):
        capacities.append(config.l2a.capacity_rate)
        return original(self, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "capacity_ladder", lambda: CapacityLadder(init, update))
        patch.setattr(loop, "CAPACITY_RATES", (1.0, 0.25))
        patch.setattr(loop._Run, "_program", spy)
        train(config_for(text, tmp_path / "run", L2A))
        assert capacities == [1.0, 0.25]
        assert len(calls) == 5  # the figures of a step are there one step late
        capacities.clear()
        train(config_for(text, tmp_path / "run", L2A, steps=7))  # remembers its rung
        assert capacities == [1.0, 0.25]


@pytest.mark.slow
def test_pruning_keeps_what_layers_without_use_compute(text, extended, tmp_path):
    run = load_run(extended)
    model = nnx.merge(run.graphdef, run.state)
    router = model.layers[0].attention.router.out
    router.kernel[...], router.bias[...] = jnp.zeros_like(router.kernel[...]), jnp.full((1,), -9.0)
    documents = run.tokenizer.encode_batch([path.read_text() for path in sorted(text.iterdir())[:3]])
    state = nnx.state(model)
    usage = routing_usage(run.graphdef, state, documents, eos_id=run.tokenizer.eos_id)
    assert usage[0] == 0
    assert usage[1] > 0.5
    config = dataclasses.replace(run.config, pruned_layers=(0,))
    pruned = nnx.graphdef(Transformer(config, rngs=nnx.Rngs(0)))
    nats = [total_nats(g, state, documents, eos_id=run.tokenizer.eos_id)[0] for g in (run.graphdef, pruned)]
    assert nats[0] == nats[1]

    result, usage = prune_run(extended, tmp_path / "pruned", eps=1.0)
    assert len(result.config.pruned_layers) == 1
    again = load_run(tmp_path / "pruned")
    assert again.config == result.config
    weights = named_arrays(again.state)
    for name, array in named_arrays(load_run(extended).state).items():
        np.testing.assert_array_equal(weights[name], array)


@pytest.mark.slow
def test_the_commands(text, short, tmp_path, capsys):
    options = [
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--evaluate-every",
        "0",
        "--sample-tokens",
        "0",
        "--data",
        str(text),
    ]
    size = ["--model.context-length", "32", "--model.l2a.window", "4", "--held-out-fraction", "0.2"]
    run = str(tmp_path / "run")
    assert cli.main(["train", "--attention", "l2a", "--init-from", str(short), "--run-dir", run, *size, *options]) == 0
    assert cli.main(["prune", run, "--out", str(tmp_path / "pruned"), "--eps", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 window" in out or "pruned" in out
    assert cli.main(["generate", str(tmp_path / "pruned"), "--prompt", "line 3 says", "--max-new-tokens", "8"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("line 3 says")
    # 19 tokens at most: one layer keeps them all, the other its window of 4.
    assert "KV cache" in said.err
    assert " % less than the " in said.err
    for args, message in (
        (["prune", str(short), "--out", str(tmp_path / "x")], "no routers"),
        (["prune", run, "--out", run], "not an empty folder"),
        (["prune", run, "--out", str(tmp_path / "x"), "--eps", "2"], "eps"),
        (["train", "--attention", "l3a"], "attention"),
        (["export", run], "attention: no family has l2a"),
    ):
        assert cli.main(args) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_lists_in_configuration_files():
    config = updated(TrainConfig(model=L2A), {"model": {"pruned_layers": [1], "l2a": {"window": 8}}})
    assert config.model.pruned_layers == (1,)
    assert config.model.l2a.window == 8
    for wrong, message in ((3, "must be a list"), (["a"], r"pruned_layers\[0\]")):
        with pytest.raises(ValueError, match=message):
            updated(TrainConfig(model=L2A), {"model": {"pruned_layers": wrong}})
