"""The optimizer that applies the rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.moe import (
    UNIT_CONSTANTS,
    BaseSpec,
    MoEShape,
    SparseMoE,
    rules,
    scale_by_adam_grouped,
    transfer_optimizer,
)
from jaxlib_icml.moe.parameterization import optimizer_rules
from jaxlib_icml.optim import muon_direction, scale_by_olion

SMALL = MoEShape(width=16, num_layers=2, expert_width=32, num_experts=4, num_active=1, head_dim=8)
WIDE = MoEShape(width=32, num_layers=4, expert_width=128, num_experts=8, num_active=2, head_dim=8)
BASE = BaseSpec(SMALL, learning_rate=0.1, constants=UNIT_CONSTANTS, eps=1e-3)


def params(shape, seed=0):
    layer = SparseMoE(shape.width, shape.expert_width, shape.num_experts, shape.num_active, rngs=nnx.Rngs(seed))
    n = shape.width
    tree = {
        "moe": nnx.to_pure_dict(nnx.state(layer, nnx.Param)),
        "norm": {"scale": jnp.ones(n)},
        "embed": {"embedding": jnp.ones((5, n))},
        "attention": {name: {"kernel": jnp.ones((n, n // 8, 8))} for name in ("query", "key", "value")}
        | {"out": {"kernel": jnp.ones((n // 8, 8, n))}},
    }
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), tree)


def trajectory(tx, start, steps=4):
    state, now, found = tx.init(start), start, []
    for step in range(steps):
        keys = iter(jax.random.split(jax.random.key(step), 99))
        grads = jax.tree.map(lambda x, keys=keys: jax.random.normal(next(keys), x.shape), now)
        updates, state = jax.jit(tx.update)(grads, state, now)
        found.append(updates)
        now = optax.apply_updates(now, updates)
    return found


def test_at_the_base_it_is_adam_bit_for_bit():
    ours = trajectory(transfer_optimizer(BASE, SMALL), params(SMALL))
    theirs = trajectory(optax.adam(0.1, 0.9, 0.95, 1e-3), params(SMALL))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_state_is_adams():
    ours, theirs = scale_by_adam_grouped(eps_tree=1e-3), optax.scale_by_adam(0.9, 0.95, 1e-3)
    start = params(SMALL)
    one, two = (tx.update(start, tx.init(start)) for tx in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_away_from_the_base_every_group_has_its_rate_eps_and_decay():
    base = dataclasses.replace(BASE, weight_decay=0.3, optimizer="adamw")
    start = params(WIDE)
    updates = trajectory(transfer_optimizer(base, WIDE, schedule=lambda count: 0.1 * (count + 1)), start, 1)[0]
    keys = iter(jax.random.split(jax.random.key(0), 99))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), start)
    table = rules(base, WIDE)
    for path, group in {
        ("moe", "router", "kernel"): "router",
        ("moe", "experts", "gate", "kernel"): "expert_up",
        ("moe", "experts", "down", "kernel"): "expert_down",
        ("norm", "scale"): "norm",
        ("embed", "embedding"): "embedding",
        ("attention", "key", "kernel"): "query_key",
        ("attention", "out", "kernel"): "attention_out",
    }.items():
        g, w, got = grads, start, updates
        for name in path:
            g, w, got = g[name], w[name], got[name]
        g, rule = np.asarray(g, np.float64), table[group]
        expected = -0.1 * rule.lr_mult * (g / (np.abs(g) + 1e-3 * rule.eps_mult) + 0.3 * rule.wd_mult * np.asarray(w))
        np.testing.assert_allclose(got, expected, rtol=2e-5, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["olion", "muon"])
def test_matrices_get_the_direction_and_the_rest_adam(inner):
    start = params(WIDE)
    tx = transfer_optimizer(BASE, WIDE, inner, orthogonalizer="svd")
    updates = trajectory(tx, start, 1)[0]
    keys = iter(jax.random.split(jax.random.key(0), 99))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), start)
    make = {"olion": scale_by_olion, "muon": muon_direction}[inner](orthogonalizer="svd")
    direction = make.update(grads, make.init(start), start)[0]
    table = optimizer_rules(BASE, WIDE, inner)
    for module, name, group in (
        (("moe", "experts"), "up", "expert_up"),
        (("moe", "experts"), "down", "expert_down"),
        (("moe",), "router", "router"),
        (("attention",), "value", "value"),
    ):
        got, want = updates, direction
        for part in (*module, name, "kernel"):
            got, want = got[part], want[part]
        np.testing.assert_allclose(got, -0.1 * table[group].lr_mult * want, rtol=1e-4, atol=1e-6)
    adam = trajectory(transfer_optimizer(BASE, WIDE, "adam"), start, 1)[0]
    np.testing.assert_allclose(updates["embed"]["embedding"], adam["embed"]["embedding"], rtol=1e-6)


def test_nnx_states_work_and_other_models_are_refused():
    layer = SparseMoE(16, 32, 4, 1, rngs=nnx.Rngs(0))
    state = nnx.state(layer, nnx.Param)
    tx = transfer_optimizer(BASE, SMALL)
    updates, _ = tx.update(state, tx.init(state), state)
    assert jax.tree.structure(updates) == jax.tree.structure(state)
    for inner in ("adam", "olion"):
        with pytest.raises(ValueError, match="experts/down/kernel"):
            transfer_optimizer(BASE, WIDE, inner).init(state)
        with pytest.raises(ValueError, match="strange"):
            transfer_optimizer(BASE, SMALL, inner).init({"strange": jnp.ones((16, 4))})


def test_runs_vmapped_over_learning_rates():
    start = params(SMALL)

    def run(rate):
        tx = transfer_optimizer(BASE, SMALL, schedule=rate)
        return tx.update(start, tx.init(start))[0]["norm"]["scale"]

    found = jax.vmap(run)(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(found[1], 2 * found[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transfer_optimizer(BASE, dataclasses.replace(WIDE, num_active=1)), "κ"),
        (lambda: transfer_optimizer(BASE, SMALL, "sgd"), "optimizer"),
        (lambda: transfer_optimizer(dataclasses.replace(BASE, weight_decay=0.1), SMALL, "adam"), "no weight decay"),
        (lambda: transfer_optimizer(BASE, SMALL, "adam", ns_steps=3), "ns_steps"),
        (lambda: scale_by_adam_grouped(b1=1.0), "b1"),
        (lambda: scale_by_adam_grouped(eps_tree=-1.0).init({"a": jnp.ones(2)}), "eps_tree"),
        (lambda: scale_by_adam_grouped(eps_tree={"b": 1.0, "c": 1.0}).init({"a": jnp.ones(2)}), "eps_tree"),
    ],
)
def test_misuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_decay_needs_parameters():
    tx = transfer_optimizer(dataclasses.replace(BASE, weight_decay=0.1), SMALL, "adamw")
    start = params(SMALL)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(start, tx.init(start))
