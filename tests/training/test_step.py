import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, loss_fn
from jaxlib_icml.training.config import OptimizerConfig
from jaxlib_icml.training.mesh import MeshConfig, batch_shards, make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.step import make_train_program

DENSE = LMConfig(vocab_size=33, context_length=16, width=32, num_layers=2, num_heads=2)
MOE = dataclasses.replace(DENSE, num_experts=4, moe_balance="bias")


def one_device():
    return make_mesh(devices=jax.devices()[:1])


ALONE = MeshConfig(data=1)


@functools.cache
def program(config=DENSE, accumulation_steps=1, optimizer="sgd", mesh=ALONE):
    count = mesh.data * mesh.fsdp * mesh.tensor * mesh.expert
    devices = make_mesh(mesh, jax.devices()[:count])
    factory = optax.sgd if optimizer == "sgd" else make_optimizer(OptimizerConfig(name=optimizer), devices)
    return make_train_program(config, factory, devices, accumulation_steps=accumulation_steps)


def make_batch(rows=4, seed=0, weights=True):
    keys = jax.random.split(jax.random.key(seed), 2)
    tokens = jax.random.randint(keys[0], (rows, 16), 0, 33)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segment_ids": jnp.ones_like(tokens)}
    if weights:
        # Uneven over rows, so that averaging micro-batch means would be wrong.
        share = jnp.arange(rows)[:, None] / rows
        batch["weights"] = (jax.random.uniform(keys[1], tokens.shape) < share).astype(float)
    return batch


def params_of(state):
    return nnx.to_pure_dict(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_one_step_is_gradient_descent_on_the_mean_loss_however_it_is_cut(steps):
    prog = program(accumulation_steps=steps)
    state = prog.init(jax.random.key(0))
    batch = make_batch()
    grads = jax.jit(jax.grad(lambda p: loss_fn(prog.graphdef, nnx.merge_state(p, state.rest), batch)[0]))(state.params)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params_of(state), nnx.to_pure_dict(grads))
    norm = float(optax.tree.norm(grads))
    after, metrics = prog.step(state, batch, 0.5)
    chex.assert_trees_all_close(params_of(after), expected, atol=2e-6)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.tokens) == float(batch["weights"].sum())
    assert int(after.step) == 1


@pytest.mark.slow
def test_the_rate_is_an_argument_and_does_not_recompile():
    prog = program()
    state = prog.init(jax.random.key(0))
    before = params_of(jax.tree.map(jnp.copy, state))
    state, _ = prog.step(state, make_batch(), 0.0)
    chex.assert_trees_all_equal(params_of(state), before)
    size = prog.step._cache_size()
    state, metrics = prog.step(state, make_batch(), 0.25)
    assert float(metrics.learning_rate) == 0.25
    assert prog.step._cache_size() == size


@pytest.mark.parametrize("optimizer", ["olion", "adamw"])
def test_non_finite_gradients_change_nothing_but_the_counters(optimizer):
    prog = program(MOE, optimizer=optimizer)
    state, _ = prog.step(prog.init(jax.random.key(0)), make_batch(), 1e-2)
    kept = jax.tree.map(jnp.copy, (state.params, state.rest, state.opt_state))
    poisoned = make_batch()
    poisoned["weights"] = poisoned["weights"].at[2, 3].set(jnp.nan)
    state, metrics = prog.step(state, poisoned, 1e-2)
    chex.assert_trees_all_equal((state.params, state.rest, state.opt_state), kept)
    assert (int(state.step), int(state.skipped), float(metrics.finite)) == (2, 1, 0.0)
    state, metrics = prog.step(state, make_batch(), 1e-2)
    assert (int(state.skipped), float(metrics.finite)) == (1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["olion", "adamw"])
def test_a_batch_is_learned_by_heart(optimizer):
    prog = program(MOE, optimizer=optimizer)
    state = prog.init(jax.random.key(0))
    batch = make_batch(weights=False)
    for _ in range(60):
        state, metrics = prog.step(state, batch, 1e-2)
    assert float(metrics.loss) < 1.0 < np.log(33)
    biases = jnp.concatenate([x.ravel() for x in jax.tree.leaves(state.rest)])
    assert float(jnp.abs(biases).max()) > 0.0


def test_the_same_seed_gives_the_same_bits():
    prog = program(MOE, optimizer="olion")

    def run():
        state = prog.init(jax.random.key(5))
        for seed in range(3):
            state, _ = prog.step(state, make_batch(seed=seed), 1e-2)
        return state

    chex.assert_trees_all_equal(run(), run())


MESHES = [
    MeshConfig(data=2),
    MeshConfig(data=1, fsdp=2),
    MeshConfig(data=1, tensor=2),
    MeshConfig(data=1, expert=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=["data", "fsdp", "tensor", "expert"])
def test_two_devices_give_the_losses_of_one(mesh):
    def losses(mesh):
        prog = program(MOE, optimizer="olion", mesh=mesh)
        state = prog.init(jax.random.key(0))
        out = []
        for seed in range(4):
            state, metrics = prog.step(state, make_batch(seed=seed), 1e-2)
            out.append(float(metrics.loss))
        return out, state

    alone, _ = losses(MeshConfig(data=1))
    together, state = losses(mesh)
    np.testing.assert_allclose(together, alone, rtol=2e-3)
    if mesh.data == 1:
        # The parameters and their momentum are really cut in two, each piece on its own device.
        for tree in (state.params, state.opt_state):
            cut = [x for x in jax.tree.leaves(tree) if not x.sharding.is_fully_replicated]
            assert cut
            assert all(2 * x.addressable_shards[0].data.size == x.size for x in cut)


def test_mesh_sizes_must_fit_the_devices():
    assert batch_shards(one_device()) == 1
    with pytest.raises(ValueError, match="does not fit 2 devices"):
        make_mesh(MeshConfig(data=3))
    with pytest.raises(ValueError, match="mesh"):
        MeshConfig(data=0)
    with pytest.raises(ValueError, match="mesh"):
        MeshConfig(data=-1, fsdp=-1)


def test_a_batch_that_does_not_divide_is_refused():
    prog = program(accumulation_steps=4)
    with pytest.raises(ValueError, match="accumulation_steps"):
        prog.step(prog.init(jax.random.key(0)), make_batch(rows=6), 0.1)
    with pytest.raises(ValueError, match="accumulation_steps"):
        make_train_program(DENSE, optax.sgd, one_device(), accumulation_steps=0)
