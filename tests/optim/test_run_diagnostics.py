import doctest
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.optim import (
    MatrixSpec,
    ScaleByOlionState,
    StabilizerState,
    default_matrix_specs,
    find_states,
    gradient_stabilizer,
    olion,
    olion_diagnostics,
    olion_run_metrics,
    scale_by_olion,
    stabilizer_run_metrics,
)
from tests.optim.olion_helpers import gaussian, newton_schulz

FIGURES = {"isotropy", "spread", "sign_agreement", "zero_share"}


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.run_diagnostics"])
    assert result.attempted > 0
    assert result.failed == 0


# OLion


def model():
    return {
        "embed": {"embedding": gaussian((7, 8), 9)},
        "layers": {"attention": {name: {"kernel": gaussian((3, 8, 2, 4), i)} for i, name in enumerate(("key", "out"))}},
        "mlp": {"up": {"kernel": gaussian((8, 24), 4), "bias": gaussian((24,), 5)}},
        "fused": {"kernel": gaussian((8, 20), 6)},
    }


def specs(params):
    return {**default_matrix_specs(params), "fused": {"kernel": MatrixSpec(0, 1, split=(8, 12))}}


def olion_state(params):
    """A state deep in an optimizer; the parameters are its momentum."""
    inner = optax.chain(gradient_stabilizer(), olion(0.1, matrix_specs=specs))
    state = jax.eval_shape(optax.MultiSteps(optax.inject_hyperparams(lambda: inner)(), 2).init, params)
    template = find_states(state, ScaleByOlionState)[0]
    momentum = jax.tree.map(
        lambda m, x: m if isinstance(m, optax.MaskedNode) else jnp.asarray(x),
        template.mu,
        params,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    is_state = lambda x: isinstance(x, ScaleByOlionState)  # noqa: E731
    return jax.tree.map(lambda x: x._replace(mu=momentum) if is_state(x) else x, state, is_leaf=is_state)


def test_the_figures_are_those_of_the_full_diagnostics():
    params = model()
    metrics = olion_run_metrics(olion_state(params), params, num_matrices=1000, matrix_specs=specs)
    full = jax.jit(lambda p: olion_diagnostics(p, specs))(params)
    wanted = {}
    for path, values in full.items():
        stack = values["isotropy"].size
        for i in range(stack):
            name = path if values["isotropy"].ndim == 0 else f"{path}[{i}]"
            wanted[name] = {figure: values[figure].ravel()[i] for figure in FIGURES}
    assert set(metrics.each) == set(wanted)
    assert len(wanted) == 3 + 3 + 1 + 2
    chex.assert_trees_all_close(dict(metrics.each), wanted, rtol=1e-3, atol=1e-5)
    for figure in FIGURES:
        mean = np.mean([values[figure] for values in wanted.values()])
        assert metrics.summary[figure] == pytest.approx(mean, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_against_numpy(shape):
    g = gaussian(shape).astype(np.float64)
    g[3] = 0
    params = {"w": jnp.asarray(g, jnp.float32)}
    _, state = scale_by_olion().update(params, scale_by_olion().init(params))  # the momentum is 0.02 g
    found = olion_run_metrics(state, params).summary
    u, sigma, vt = np.linalg.svd(g, full_matrices=False)
    rank = np.sum(sigma > 1e-9)
    u, sigma, vt = u[:, :rank], sigma[:rank], vt[:rank]
    q = np.where(np.abs(u @ vt) > 1e-9, u @ vt, 0)
    s = np.sign(q)
    m = np.array([u[:, k] @ s @ vt[k] for k in range(rank)])
    q1 = np.abs(q).sum()
    np.testing.assert_allclose(found["isotropy"], np.linalg.norm(m - q1 / rank) * np.sqrt(rank) / q1, rtol=1e-3)
    alpha = sigma.mean()
    np.testing.assert_allclose(found["spread"], np.linalg.norm(sigma - alpha) / alpha / np.sqrt(rank), rtol=1e-3)
    assert found["sign_agreement"] == pytest.approx(np.mean(np.sign(newton_schulz(g)) == s), abs=2.5 / g.size)
    assert found["zero_share"] == pytest.approx(1 / shape[0], rel=1e-6)


def test_calls_take_turns_and_cover_every_matrix():
    params = model()
    state = olion_state(params)
    everything = set(olion_run_metrics(state, params, num_matrices=99, matrix_specs=specs).each)
    for number in (1, 2, 4, 5, 7):
        seen = set()
        for call in range(-(-len(everything) // number)):
            each = olion_run_metrics(state, params, call=call, num_matrices=number, matrix_specs=specs).each
            assert 1 <= len(each) <= number
            seen |= set(each)
        assert seen == everything
    # Spread over the model, not the layers of one stack.
    each = olion_run_metrics(state, params, num_matrices=4, matrix_specs=specs).each
    assert len({name.split("[")[0] for name in each}) >= 3


def test_zero_and_nan_matrices():
    params = {"zero": jnp.zeros((4, 6)), "nan": jnp.full((4, 6), jnp.nan), "empty": jnp.zeros((0, 6))}
    state = ScaleByOlionState(jnp.int32(1), params)
    matrix_specs = {name: MatrixSpec(0, 1) for name in params}
    each = olion_run_metrics(state, params, matrix_specs=matrix_specs).each
    assert set(each) == {"zero", "nan"}
    zero = {name: float(value) for name, value in each["zero"].items()}
    assert zero == {"isotropy": 0, "spread": 0, "sign_agreement": 1, "zero_share": 1}
    assert all(np.isnan(value) for value in each["nan"].values())


def test_settings_are_used_and_checked():
    params = {"w": jnp.asarray(gaussian((24, 24)))}
    state = ScaleByOlionState(jnp.int32(1), params)
    assert olion_run_metrics(state, params, orthogonalizer="svd").summary["sign_agreement"] == 1
    few, more = (olion_run_metrics(state, params, ns_steps=n).summary["sign_agreement"] for n in (1, 6))
    assert few < more
    same = olion_run_metrics(state, params, ns_coeffs=[3.4445, -4.775, 2.0315], ns_dtype="float32").summary
    chex.assert_trees_all_close(same, olion_run_metrics(state, params).summary, rtol=1e-6)
    for changes, message in [
        ({"call": -1}, "call must be at least 0"),
        ({"num_matrices": 0}, "num_matrices at least 1"),
        ({"orthogonalizer": "qr"}, "orthogonalizer must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            olion_run_metrics(state, params, **changes)
    with pytest.raises(ValueError, match="must contain a ScaleByOlionState"):
        olion_run_metrics(optax.adam(0.1).init(params), params)


def test_sharded_momentum():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jnp.asarray(gaussian((2, 8, 12)))
    whole = olion_run_metrics(ScaleByOlionState(jnp.int32(1), w), w).each
    split = jax.device_put(w, jax.NamedSharding(mesh, jax.P(None, "x")))
    chex.assert_trees_all_close(olion_run_metrics(ScaleByOlionState(jnp.int32(1), split), split).each, whole, rtol=1e-4)


def test_nnx_optimizers():
    model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.chain(gradient_stabilizer(), olion(0.1)), wrt=nnx.Param)
    before = find_states(jax.tree.map(jnp.copy, optimizer.opt_state), StabilizerState)[0]
    params = nnx.state(model, nnx.Param)
    grads = jax.tree.map(lambda x: jnp.ones_like(x) * 3 + x, params)
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(model, optimizer, grads)
    metrics = olion_run_metrics(optimizer.opt_state, params, num_matrices=9)
    assert set(metrics.each) == {"layers/0/kernel", "layers/1/kernel"}
    stabilizer = stabilizer_run_metrics(before, optimizer.opt_state)
    assert {"layers/0/kernel", "layers/0/bias"} <= set(stabilizer.each)
    norm = np.linalg.norm(grads["layers"][0]["kernel"][...])
    assert stabilizer.each["layers/0/kernel"]["norm"] == pytest.approx(norm, rel=1e-5)


# GradientStabilizer


@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "global"}, {"scope": "layer"}, {"gamma1": 0.0, "bias_correction": False}, {"gamma1": 0.9}],
    ids=str,
)
def test_norms_lengths_and_spikes_against_the_gradients_themselves(options):
    tx = optax.chain(gradient_stabilizer(**options), optax.sgd(0.1))
    known = {name: value for name, value in options.items() if name != "scope"}
    scope = options.get("scope", "leaf")

    @jax.jit
    def step(grads, state):
        out, after = tx.update(grads, state)
        return out, after, stabilizer_run_metrics(state, after, **known)

    shapes = {"a": (4, 5), "layers": (3, 6)}
    rng = np.random.default_rng(0)
    state = tx.init({name: jnp.zeros(shape) for name, shape in shapes.items()})

    def norms(tree):
        a, layers = np.asarray(tree["a"], np.float64), np.asarray(tree["layers"], np.float64)
        each = {"a": np.linalg.norm(a), "layers": np.linalg.norm(layers, axis=1 if scope == "layer" else None)}
        return {"": np.hypot(each["a"], each["layers"])} if scope == "global" else each

    for t in range(8):
        scale = {"a": 100.0 if t == 5 else 1.0, "layers": 1.0}
        grads = {n: jnp.asarray(rng.normal(size=s) * scale[n], jnp.float32) for n, s in shapes.items()}
        out, state, metrics = step(grads, state)
        raw, sent = norms(grads), norms(jax.tree.map(lambda u: u / -0.1, out))
        assert set(metrics.each) == set(raw)
        for unit, figures in metrics.each.items():
            # After the spike the averages hide some digits of the small norms.
            np.testing.assert_allclose(figures["norm"], raw[unit], rtol=1e-3 if t > 5 else 2e-5)
            np.testing.assert_allclose(figures["length"], sent[unit], rtol=1e-5)
            np.testing.assert_allclose(figures["ratio"], sent[unit] / raw[unit], rtol=1e-3)
            assert not np.any(figures["skipped"])
            hit = t == 5 and unit in ("a", "")
            np.testing.assert_array_equal(figures["spike"], np.full_like(raw[unit], hit))
        total = np.linalg.norm(np.concatenate([np.ravel(x) for x in sent.values()]))
        total /= np.linalg.norm(np.concatenate([np.ravel(x) for x in raw.values()]))
        assert metrics.summary["norm_ratio"] == pytest.approx(total, rel=1e-3)
        assert metrics.summary["spikes"] == (t == 5)


def test_skipped_units_and_huge_norms():
    tx = gradient_stabilizer()
    grads = {"a": jnp.ones(4), "b": jnp.ones(9)}
    _, first = tx.update(grads, tx.init(grads))
    _, second = tx.update({"a": jnp.full(4, jnp.nan), "b": jnp.full(9, 1e24)}, first)
    metrics = stabilizer_run_metrics(first, second)
    chex.assert_trees_all_equal(
        metrics.each["a"], {**dict.fromkeys(metrics.each["a"], jnp.float32(0)), "skipped": jnp.float32(1)}
    )
    assert metrics.each["b"]["norm"] == pytest.approx(3e24, rel=1e-5)
    assert metrics.summary["norm_ratio"] == pytest.approx(float(metrics.each["b"]["length"]) / 3e24, rel=1e-4)
    assert (metrics.summary["spikes"], metrics.summary["skipped"]) == (1, 1)
    nothing = stabilizer_run_metrics(first, first).summary
    assert {name: float(value) for name, value in nothing.items()} == {"norm_ratio": 0, "spikes": 0, "skipped": 0}


def test_winsorised_spikes_are_seen():
    tx = gradient_stabilizer(winsorize=3.0)
    state, flags = tx.init(jnp.zeros(1)), []
    for norm in (1.0, 1.1, 0.9, 50.0, 1.0):
        before, (_, state) = state, tx.update(jnp.array([norm]), state)
        flags.append(float(stabilizer_run_metrics(before, state, spike_factor=3).summary["spikes"]))
    assert flags == [0, 0, 0, 1, 0]


def test_bad_states():
    tx = gradient_stabilizer()
    one, two = tx.init({"a": jnp.ones(2)}), tx.init({"a": jnp.ones(2), "b": jnp.ones(3)})
    with pytest.raises(ValueError, match="before and after must be states of the same optimizer"):
        stabilizer_run_metrics(one, two)
    with pytest.raises(ValueError, match="before must contain exactly one StabilizerState, got 2"):
        stabilizer_run_metrics((one, two), one)
    with pytest.raises(ValueError, match=r"spike_factor must be above 1, got 0\.5"):
        stabilizer_run_metrics(one, one, spike_factor=0.5)
    assert stabilizer_run_metrics(tx.init({}), tx.init({})) == ({}, {})
