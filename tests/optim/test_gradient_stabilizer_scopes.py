import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlib_icml.optim import gradient_stabilizer
from jaxlib_icml.optim.gradient_stabilizer import (
    StabilizerState,
    recovery_steps,
    stabilizer_bound,
    stabilizer_metrics,
)
from tests.optim.stabilizer_helpers import norm64, random_tree, rho_float64

# 10: scopes


def test_layer_scope_equals_leaf_scope_of_the_unrolled_model():
    layers, steps = 4, 3
    rng = np.random.default_rng(0)
    shapes = {"layers": {"kernel": (layers, 3, 5), "bias": (layers, 3), "gate": (layers,)}, "embed": (6, 2)}
    grads = jax.tree.map(
        lambda shape: rng.normal(size=(steps, *shape)).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    for t in range(steps):  # layers without gradient: only their own statistics stand still
        grads["layers"]["kernel"][t, t] = 0

    def unroll(t):
        return {**t, "layers": [jax.tree.map(lambda x, i=i: x[i], t["layers"]) for i in range(layers)]}

    def run(tx, change):
        def step(state, g):
            out, state = tx.update(change(g), state)
            return state, out

        params = change(jax.tree.map(lambda g: g[0], grads))
        return jax.lax.scan(step, tx.init(params), grads)

    @jax.jit
    def compare():
        layer = gradient_stabilizer(scope="layer")
        state, out = run(layer, lambda g: g)
        per_layer = jax.vmap(unroll)(out), StabilizerState(*map(unroll, state))
        unrolled, leaf = (run(tx, unroll) for tx in (layer, gradient_stabilizer()))
        return state, per_layer, unrolled[::-1], leaf[::-1]

    state, per_layer, unrolled, leaf = compare()
    assert state.mean_norm["layers"]["kernel"].shape == (layers,)
    assert state.mean_norm["embed"].shape == ()
    np.testing.assert_array_equal(state.skipped["layers"]["kernel"], [1, 1, 1, 0])
    chex.assert_trees_all_close(per_layer, leaf, rtol=1e-6)
    chex.assert_trees_all_close(unrolled, leaf, rtol=1e-6)


@pytest.mark.parametrize(
    "stacked",
    [
        "blocks",
        ["blocks", "tower"],
        lambda path: path.startswith("net/blocks"),
        {"net": True, "blocks_": False},
    ],
)
def test_which_leaves_are_stacked(stacked):
    tx = gradient_stabilizer(scope="layer", stacked=stacked)
    state = tx.init({"net": {"blocks": {"w": jnp.ones((3, 2))}}, "blocks_": jnp.ones((3, 2))})
    assert state.count["net"]["blocks"]["w"].shape == (3,)
    assert state.count["blocks_"].shape == ()


def test_global_scope_shares_one_norm():
    tx = gradient_stabilizer(scope="global")
    history = []
    update, state = jax.jit(tx.update), tx.init(random_tree())
    assert state.mean_norm.shape == ()
    for seed in range(4):
        grads = jax.tree.map(lambda g, s=seed: g * (s + 1), random_tree(seed))
        out, state = update(grads, state)
        history.append(math.hypot(*map(norm64, jax.tree.leaves(grads))))
    factor = rho_float64(history)[-1] / history[-1]
    chex.assert_trees_all_close(out, jax.tree.map(lambda g: g * factor, grads), rtol=1e-5)
    spoiled = jax.tree.map(lambda g: g.at[...].set(jnp.nan) if g.ndim == 1 else g, grads)
    out, _ = update(spoiled, state)
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(out))


@pytest.mark.parametrize("labels", [{"a": "x", "b": "y"}, {"a": 7, "b": {"c": 3, "d": 3}}, "function"])
def test_labels_share_norms(labels):
    if labels == "function":
        labels = lambda tree: {k: f"group {k}" for k in tree}  # noqa: E731
    tx = gradient_stabilizer(scope=labels)
    grads = random_tree()
    out, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert len(state.count) == 2
    norm_b = math.hypot(norm64(grads["b"]["c"]), norm64(grads["b"]["d"]))
    expected = {
        "a": grads["a"] / norm64(grads["a"]),
        "b": {"c": grads["b"]["c"] / norm_b, "d": grads["b"]["d"] / norm_b},
    }
    chex.assert_trees_all_close(out, expected, rtol=1e-5)


# In company


def test_inject_hyperparams_traces_once():
    traces = []

    def factory(gamma1, gamma2, winsorize, eps):
        traces.append(1)
        return gradient_stabilizer(gamma1, gamma2, winsorize=winsorize, eps=eps)

    tx = optax.inject_hyperparams(factory)(gamma1=0.6, gamma2=0.999, winsorize=5.0, eps=1e-12)
    state = tx.init(jnp.zeros(2))
    update = jax.jit(tx.update)
    norms = [1.0, 4.0, 2.0]
    traces.clear()
    for step, norm in enumerate(norms):
        state.hyperparams["gamma1"] = jnp.float32([0.6, 0.6, 0.3][step])
        out, state = update(jnp.array([0.6, 0.8]) * norm, state)
    assert len(traces) == 1
    # By hand: bias correction with the current gamma1.
    m = 0.3 * (0.6 * (0.4 * 1) + 0.4 * 4) + 0.7 * 2
    v = 0.001 * (0.999**2 * 1 + 0.999 * 16 + 4)
    rho = m / (1 - 0.3**3) / math.sqrt(v / (1 - 0.999**3))
    assert norm64(out) == pytest.approx(rho, rel=1e-4)


def test_a_sharded_leaf_with_tiny_gradients():
    tx = gradient_stabilizer()
    make = lambda s: {  # noqa: E731
        "layers": np.random.default_rng(s).normal(size=(4, 6, 8)).astype(np.float32),
        "w": np.random.default_rng(s + 9).normal(size=(8, 2)).astype(np.float32) * np.float32(1e-20),
    }
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    shardings = {"layers": NamedSharding(mesh, P(None, None, "x")), "w": NamedSharding(mesh, P("x"))}
    update = jax.jit(tx.update)
    state = sharded_state = tx.init(make(0))
    for seed in range(2):
        out, state = update(make(seed), state)
        sharded_out, sharded_state = update(jax.device_put(make(seed), shardings), sharded_state)
        chex.assert_trees_all_close(sharded_out, out, rtol=1e-6)
        assert sharded_out["w"].sharding.is_equivalent_to(shardings["w"], 2)
    chex.assert_trees_all_close(sharded_state, state, rtol=1e-6)


def test_vmap_over_trees():
    tx = gradient_stabilizer()
    grads = jnp.stack([jnp.array([3.0, 4.0]), jnp.array([0.0, 0.0]), jnp.array([1e30, 0.0])])
    out, state = jax.jit(jax.vmap(tx.update))(grads, jax.vmap(tx.init)(grads))
    np.testing.assert_allclose(out, [[0.6, 0.8], [0, 0], [1, 0]], rtol=1e-5)
    np.testing.assert_array_equal(state.count, [1, 0, 1])


class Tower(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, "model"))
        self.layers = nnx.Dict(kernel=nnx.Param(init(rngs.params(), (3, 4, 4))))
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        for i in range(3):
            x = x + jnp.tanh(x @ self.layers["kernel"][i])
        return self.head(x)


def test_nnx_models_train():
    with nnx.use_eager_sharding(False):
        model = Tower(nnx.Rngs(0))
    tx = optax.chain(gradient_stabilizer(scope="layer"), optax.sgd(0.05))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (16, 4))
    y = x.sum(-1, keepdims=True)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]

    params = nnx.state(model, nnx.Param)
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    out, state = jax.jit(tx.update)(grads, state)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    stats = state[0].mean_norm
    assert stats["layers"]["kernel"].shape == (3,)
    # Scalars carry no sharding of the matrices they describe.
    assert not any(
        isinstance(x, nnx.Variable) for x in jax.tree.leaves(stats, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def test_metrics():
    tx = optax.chain(gradient_stabilizer(0.5, 0.9), optax.sgd(0.1))
    norms = np.random.default_rng(7).lognormal(0, 0.5, 30)
    state = tx.init({"w": jnp.zeros(1)})
    empty = stabilizer_metrics(state, 0.5, 0.9)
    assert (float(empty.rho["w"]), float(empty.coefficient_of_variation["w"])) == (0, 0)
    update = jax.jit(tx.update)
    for norm in norms:
        _, state = update({"w": jnp.array([norm], jnp.float32)}, state)
    _, state = update({"w": jnp.array([jnp.nan])}, state)
    metrics = stabilizer_metrics(state, 0.5, 0.9)
    rho = rho_float64(norms, 0.5, 0.9)[-1]
    assert float(metrics.rho["w"]) == pytest.approx(rho, rel=1e-5)
    assert float(metrics.coefficient_of_variation["w"]) == pytest.approx(math.sqrt(max(rho**-2 - 1, 0)), abs=1e-3)
    assert int(metrics.skipped["w"]) == 1
    with pytest.raises(ValueError, match="exactly one StabilizerState, got 0"):
        stabilizer_metrics(optax.sgd(0.1).init(jnp.zeros(1)))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma1": 1.0}, r"gamma1 must be in \[0, 1\), got 1.0"),
        ({"gamma1": -0.1}, "gamma1 must be"),
        ({"gamma2": math.nan}, "gamma2 must be"),
        ({"gamma2": jnp.float32(1.5)}, "gamma2 must be"),
        ({"eps": 0.0}, "eps must be a positive number, got 0.0"),
        ({"winsorize": 1.0}, "winsorize must be None or a number above 1"),
        ({"scope": "layers"}, "scope must be"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        gradient_stabilizer(**options)


def test_unbounded_decays_warn():
    with pytest.warns(UserWarning, match="no uniform bound"):
        gradient_stabilizer(0.9, 0.81)
    assert stabilizer_bound(0.9, 0.8) == math.inf
    assert stabilizer_bound(0.9, 0.81, t=5, bias_correction=False) == pytest.approx(
        0.1 / math.sqrt(0.19) * math.sqrt(5)
    )


def test_bad_trees():
    with pytest.raises(ValueError, match="int32 at b/c"):
        gradient_stabilizer().init({"a": jnp.ones(2), "b": {"c": jnp.ones(2, jnp.int32)}})
    with pytest.raises(ValueError, match="layers/gate has no leading axis"):
        gradient_stabilizer(scope="layer").init({"layers": {"gate": jnp.ones(())}})
    with pytest.raises(ValueError, match="stacked must be"):
        gradient_stabilizer(scope="layer", stacked={"a": 1.5}).init({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="prefix of the gradients' tree"):
        gradient_stabilizer(scope={"x": "g"}).init({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="labels that are all strings or all ints"):
        gradient_stabilizer(scope={"a": "g", "b": 1}).init({"a": jnp.ones(2), "b": jnp.ones(2)})
    tx = gradient_stabilizer()
    with pytest.raises(ValueError, match="init and update must see the same tree"):
        tx.update({"a": jnp.ones(2)}, tx.init({"a": jnp.ones(2), "b": jnp.ones(2)}))


@pytest.mark.parametrize(
    "call",
    [
        lambda: stabilizer_bound(1.0),
        lambda: stabilizer_bound(t=0),
        lambda: recovery_steps(-1.0),
        lambda: recovery_steps(10.0, 1.0),
        lambda: recovery_steps(10.0, rho=1.0),
    ],
)
def test_bad_arguments_of_the_formulas(call):
    with pytest.raises(ValueError, match="must be"):
        call()
