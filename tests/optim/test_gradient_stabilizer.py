"""GradientStabilizer against a float64 recursion, and as a citizen of Optax, Flax and Orbax."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlib_icml.optim import gradient_stabilizer
from jaxlib_icml.optim.gradient_stabilizer import (
    StabilizerState,
    recovery_steps,
    stabilizer_bound,
    stabilizer_metrics,
)
from jaxlib_icml.optim.norm_units import NormUnits


def rho_float64(norms, gamma1=0.6, gamma2=0.999, eps=0.0, bias_correction=True, winsorize=None):
    """ρ_t by the paper's recursion on v itself, in float64; norms (time, ...)."""
    norms = np.asarray(norms, np.float64)
    m = v = np.zeros(norms.shape[1:])
    out = np.empty_like(norms)
    previous = None
    for t, r in enumerate(norms, start=1):
        fed = r if winsorize is None or previous is None else np.minimum(r, winsorize * previous)
        m = gamma1 * m + (1 - gamma1) * fed
        v = gamma2 * v + (1 - gamma2) * fed**2
        c1, c2 = (1 - gamma1**t, 1 - gamma2**t) if bias_correction else (1, 1)
        previous = m / c1
        out[t - 1] = m / c1 / (np.sqrt(v / c2) + eps)
    return out


@functools.cache
def emitted_norms(**options):
    """A jitted function from norms (time,) to the lengths of the transform's outputs, one per step."""
    tx = gradient_stabilizer(**options)
    direction = jnp.array([0.6, -0.8])

    @jax.jit
    def run(norms):
        def step(state, norm):
            out, state = tx.update(direction * norm, state)
            return state, jnp.linalg.norm(out)

        return jax.lax.scan(step, tx.init(direction), norms)[1]

    return lambda norms: np.asarray(run(jnp.asarray(norms, jnp.float32)), np.float64)


def random_tree(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"a": normal(17, 5), "b": {"c": normal(9), "d": normal()}}


def norm64(x):
    return np.linalg.norm(np.asarray(x).astype(np.complex128).ravel())


# 1, 2, 3: direction, scale, values


def test_keeps_the_direction_and_sets_the_length():
    tx = gradient_stabilizer()
    update = jax.jit(tx.update)
    state = tx.init(random_tree())
    history = []
    for seed in range(6):
        grads = jax.tree.map(lambda g, s=seed: g * 10.0 ** (s - 2), random_tree(seed))
        out, state = update(grads, state)
        history.append([norm64(g) for g in jax.tree.leaves(grads)])
    for g, o, rho in zip(*map(jax.tree.leaves, (grads, out)), rho_float64(history, eps=1e-12)[-1], strict=True):
        g, o = np.asarray(g, np.float64), np.asarray(o, np.float64)
        assert np.vdot(g, o) / norm64(g) / norm64(o) == pytest.approx(1, abs=1e-6)
        assert norm64(o) == pytest.approx(rho, rel=1e-5)
        np.testing.assert_array_equal(np.sign(o), np.sign(g))


@functools.cache
def three_steps():
    tx = gradient_stabilizer()

    @jax.jit
    def run(scale):
        state = tx.init(random_tree())
        outs = []
        for seed in range(3):
            grads = jax.tree.map(lambda g: g / jnp.sqrt(g.size) * scale, random_tree(seed))
            out, state = tx.update(grads, state)
            outs.append(out)
        return outs

    return run


@pytest.mark.parametrize("scale", [1e-6, 3e-3, 7.0, 1e6])
def test_outputs_do_not_depend_on_the_scale(scale):
    chex.assert_trees_all_close(three_steps()(scale), three_steps()(1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exponent", [-10, -3, 1, 16, 17, 40])
def test_powers_of_two_change_no_bit(exponent):
    chex.assert_trees_all_equal(three_steps()(2.0**exponent), three_steps()(1.0))


@pytest.mark.parametrize(
    ("bias_correction", "expected"),
    [(True, [1.0, 1.02759, 0.90991, 0.59524]), (False, [12.64911, 14.70929, 13.03075, 8.19796])],
)
def test_values_of_the_specification(bias_correction, expected):
    norms = [2.0, 4.0, 100.0, 3.0]
    np.testing.assert_allclose(rho_float64(norms, bias_correction=bias_correction), expected, atol=1e-5)
    np.testing.assert_allclose(emitted_norms(bias_correction=bias_correction)(norms), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"winsorize": 3.0},
        {"winsorize": 2.0, "bias_correction": False},
        {"gamma1": 0.0},
        {"gamma1": 0.0, "gamma2": 0.0},
        {"gamma1": 0.9, "gamma2": 0.99, "eps": 1e-3},
    ],
)
def test_recursion_against_float64(options):
    norms = np.random.default_rng(1).lognormal(0, 2, size=60)
    expected = rho_float64(norms, **{"eps": 1e-12, **options})
    expected *= norms / np.maximum(norms, options.get("eps", 1e-12))
    np.testing.assert_allclose(emitted_norms(**options)(norms), expected, rtol=1e-4)


# 4, 5, 6: bounds and limits


@pytest.mark.parametrize(
    ("t", "expected"), [(1, 1.0), (2, 1.0307), (10, 1.5876), (100, 4.880), (1000, 12.576), (None, 15.816)]
)
def test_bound_of_the_specification(t, expected):
    assert stabilizer_bound(t=t) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("gamma1", "gamma2"), [(0.6, 0.999), (0.9, 0.85), (0.5, 0.95), (0.95, 0.9), (0.3, 0.09)])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_bound_is_attained_and_never_exceeded(gamma1, gamma2, bias_correction):
    # The bound is the norm of a linear functional: compare with the dual vector, computed from the weights.
    for t in (1, 2, 7, 40):
        k = np.arange(1, t + 1)
        worst = (gamma1 / gamma2) ** (t - k).astype(float)
        rho = rho_float64(worst, gamma1, gamma2, bias_correction=bias_correction)[-1]
        bound = stabilizer_bound(gamma1, gamma2, t, bias_correction)
        assert rho == pytest.approx(bound, rel=1e-9)
        assert bound <= stabilizer_bound(gamma1, gamma2) * (1 + 1e-12)


def adversarial_norms(rng, sequences, steps):
    """Norms within 1e-12..1e12: scattered, spiky, growing, shrinking, and near the extremal sequence."""
    share = sequences // 5
    time = np.arange(steps)[:, None]
    log = lambda *shape: 10 ** rng.uniform(-12, 12, shape)  # noqa: E731
    spiky = np.where(rng.random((steps, share)) < 0.05, log(steps, share), 1.0)
    growth = rng.choice([-1, 1], share) * rng.uniform(0, 24 / steps, share)
    ramps = 10.0 ** (growth * (time - steps / 2)) * rng.lognormal(0, 0.1, (steps, share))
    at = rng.integers(0, steps, share)
    extremal = np.where(time <= at, (0.6 / 0.999) ** np.clip(at - time, 0, 50).astype(float), 1e-12)
    bursts = np.where(np.sin(time * rng.uniform(0.01, 1, share)) > 0.9, log(share), log(share))
    parts = [log(steps, share), spiky, ramps, extremal * rng.lognormal(0, 0.01, (steps, share)), bursts]
    return np.clip(np.concatenate(parts, axis=1), 1e-12, 1e12)


def test_no_sequence_of_norms_exceeds_the_bounds():
    norms = adversarial_norms(np.random.default_rng(2), 100_000, 60)
    exact = np.array([stabilizer_bound(t=t) for t in range(1, 61)])[:, None]
    largest = rho_float64(norms) / exact
    assert largest.max() <= 1 + 1e-9
    assert largest.max() > 0.99  # the adversary is a real one
    assert rho_float64(norms, bias_correction=False).max() <= stabilizer_bound() * (1 + 1e-9)
    assert rho_float64(norms[:, ::10], gamma1=0.9, gamma2=0.9).max() <= 1 + 1e-9


def test_the_transform_itself_stays_below_the_bounds():
    norms = adversarial_norms(np.random.default_rng(3), 100, 200).T
    run = emitted_norms()
    exact = np.array([stabilizer_bound(t=t) for t in range(1, 201)])
    for sequence in norms[::10]:
        assert np.all(run(sequence) <= exact * (1 + 1e-5))


@settings(deadline=None, max_examples=40)
@given(
    norms=st.lists(st.floats(2**-20, 2**34, width=32), min_size=8, max_size=8),
    winsorize=st.sampled_from([None, 1.5, 5.0]),
)
def test_winsorised_or_not_the_output_matches_float64_and_the_bound(norms, winsorize):
    lengths = emitted_norms(winsorize=winsorize)(norms)
    np.testing.assert_allclose(lengths, rho_float64(norms, eps=1e-12, winsorize=winsorize), rtol=1e-4)
    assert all(x <= stabilizer_bound(t=t) * (1 + 1e-5) for t, x in enumerate(lengths, start=1))


def test_bound_is_attained_in_the_long_run():
    t = 20_000
    worst = (0.6 / 0.999) ** np.minimum(np.arange(t)[::-1], 600).astype(float)
    with np.errstate(under="ignore"):
        assert rho_float64(worst)[-1] == pytest.approx(stabilizer_bound(t=t), rel=1e-6)
        assert rho_float64(worst, bias_correction=False)[-1] == pytest.approx(stabilizer_bound(), rel=1e-6)


def test_a_spike_has_the_same_length_whatever_its_size():
    t = 5000
    base = np.random.default_rng(4).lognormal(0, 0.3, t)
    ceiling = (1 - 0.6) / math.sqrt(1 - 0.999)
    lengths = {}
    for spike in (10.0, 1e3, 1e6, 1e9, 1e12):
        norms = np.append(base, spike)
        lengths[spike] = emitted_norms()(norms)[-1]
        # The kappa bound of the paper's lemma, for the averages without bias correction (t is large).
        m = rho_mean(base)
        assert lengths[spike] <= (ceiling + 0.6 / (spike / m * math.sqrt(1 - 0.999))) * (1 + 1e-4)
    assert abs(lengths[1e6] - lengths[1e12]) < 1e-4
    assert lengths[1e12] == pytest.approx(ceiling * math.sqrt(1 - 0.999 ** (t + 1)), rel=1e-4)


def rho_mean(norms, gamma1=0.6):
    return float(np.sum((1 - gamma1) * gamma1 ** np.arange(len(norms))[::-1] * norms))


def test_stationary_norms_have_the_length_of_their_variability():
    norms = np.random.default_rng(5).lognormal(0, 0.5, 200_000)
    lengths = emitted_norms(gamma1=0.999, gamma2=0.999)(norms)
    target = math.exp(-(0.5**2) / 2)  # E R / sqrt(E R^2) of a lognormal
    assert target == pytest.approx(0.8825, abs=1e-4)
    assert lengths[5000:].mean() == pytest.approx(target, rel=3e-3)


# 7: what it does for Adam


@pytest.mark.parametrize("concentrated", [True, False])
def test_adam_moments_stay_bounded(concentrated):
    """Coordinates of m and v stay below ρ̄(1 - b1^t) and ρ̄²(1 - b2^t); raw gradients exceed them by far."""
    steps, dim, b1, b2 = 2000, 100, 0.9, 0.999
    rng = np.random.default_rng(6)
    grads = rng.normal(size=(steps, dim)) / math.sqrt(dim)
    shape = np.eye(dim)[0] if concentrated else rng.choice([-1, 1], dim) / math.sqrt(dim)
    grads[[500, 1200, 1201]] = 1e8 * shape
    grads = jnp.asarray(grads, jnp.float32)

    def largest(*before):
        tx = optax.chain(*before, optax.scale_by_adam(b1, b2))

        def step(state, g):
            _, state = tx.update(g, state)
            return state, (jnp.abs(state[-1].mu).max(), state[-1].nu.max())

        return map(np.asarray, jax.jit(lambda: jax.lax.scan(step, tx.init(grads[0]), grads)[1])())

    t = np.arange(1, steps + 1)
    bound = stabilizer_bound()
    bound_m, bound_v = bound * (1 - b1**t), bound**2 * (1 - b2**t)
    m, v = largest(gradient_stabilizer(bias_correction=False))
    assert np.all(m <= bound_m * (1 + 1e-5))
    assert np.all(v <= bound_v * (1 + 1e-4))
    m, v = largest()
    assert (v / bound_v).max() > 1e6
    assert (m / bound_m).max() > (1e4 if concentrated else 1e3)


# 8: memory of a spike


def test_recovery_after_a_spike():
    norms = np.ones(21_500)
    norms[499] = 1e6
    lengths = emitted_norms()(norms)
    spike = (1 - 0.6) / math.sqrt(1 - 0.999) * math.sqrt(1 - 0.999**500)
    assert lengths[499] == pytest.approx(spike, rel=1e-4)
    steps = int(np.flatnonzero(lengths[500:] <= 0.5)[-1]) + 2
    assert 19_000 < steps < 21_000
    assert steps == pytest.approx(recovery_steps(1e6, 0.999, rho=0.5), rel=2e-3)
    assert recovery_steps(1e6, 0.999) == pytest.approx(20_723, abs=1)
    assert emitted_norms(winsorize=5.0)(norms).min() > 0.9
    exact = int(np.flatnonzero(rho_float64(norms)[500:] <= 0.5)[-1]) + 2
    assert exact == pytest.approx(recovery_steps(1e6, rho=0.5), abs=2)


def test_recovery_is_immediate_for_small_spikes():
    assert recovery_steps(2.0) == 0
    assert recovery_steps(2.0, rho=0.9) == 0


# 9: numerics and non-finite gradients


@pytest.mark.parametrize("exponent", [-25, -20, -13, -6, 0, 6, 13, 19, 25, 30])
def test_norms_neither_overflow_nor_underflow(exponent):
    x = jax.random.normal(jax.random.key(0), (1000,)) * 10.0**exponent
    leaves = {"x": x, "y": x[:10], "scalar": x[3]}
    units = NormUnits(leaves, "leaf", ())
    # Both the path of the CPU, and the one of other back ends.
    for compute in (units.norms, lambda: units._norms(*units.leaves)):
        norms = np.asarray(jax.jit(compute)(), np.float64)
        np.testing.assert_allclose(norms, [norm64(leaf) for leaf in units.leaves], rtol=1e-5)
    units = NormUnits({"layers": x}, "layer", "layers")
    np.testing.assert_allclose(jax.jit(units.norms)(), np.abs(x), rtol=1e-5)


def test_small_and_large_leaves_in_one_tree():
    x = jax.random.normal(jax.random.key(0), (100,))
    tree = [x * 1e25, x * 1e-24, x, x * 0]
    for scope in ("leaf", "global"):
        units = NormUnits(tree, scope, ())
        expected = [norm64(leaf) for leaf in tree]
        if scope == "global":
            expected = [math.hypot(*expected)]
        np.testing.assert_allclose(np.asarray(units.norms(), np.float64), expected, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(units._norms(*units.leaves), np.float64), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_dtypes(dtype):
    tx = gradient_stabilizer()
    grads = random_tree()
    scale = {jnp.bfloat16: 1e20, jnp.float16: 1e4, jnp.float32: 1e20, jnp.complex64: 1e20 * (0.6 + 0.8j)}[dtype]
    grads = jax.tree.map(lambda g: (g * scale).astype(dtype), grads)
    out, state = jax.jit(tx.update)(grads, tx.init(grads))
    chex.assert_trees_all_equal_dtypes(out, grads)
    chex.assert_trees_all_equal_shapes(out, grads)
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(state))
    tolerance = 10 * float(jnp.finfo(dtype).eps)
    for g, o, norm in zip(*map(jax.tree.leaves, (grads, out, state.mean_norm)), strict=True):
        assert norm64(o) == pytest.approx(1, rel=tolerance)
        assert float(norm) == pytest.approx(0.4 * norm64(g), rel=1e-5)
        g, o = np.asarray(g).astype(np.complex128), np.asarray(o).astype(np.complex128)
        np.testing.assert_allclose(o, g / np.linalg.norm(g), atol=tolerance)


def test_float64_when_it_is_enabled():
    with jax.enable_x64(True):
        tx = gradient_stabilizer()
        grads = {"w": jnp.asarray([3e-9, 4e-9], jnp.float64)}
        out, state = jax.jit(tx.update)(grads, tx.init(grads))
        assert out["w"].dtype == jnp.float64
        assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
        np.testing.assert_allclose(out["w"], [0.6, 0.8], rtol=1e-3)


def test_a_huge_finite_gradient_and_the_steps_after_it():
    tx = gradient_stabilizer(winsorize=5.0)
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros(2))
    for _ in range(20):
        _, state = update(jnp.array([0.6, 0.8]), state)
    out, state = update(jnp.array([6e24, -8e24]), state)
    expected = rho_float64([1.0] * 20 + [1e25, 1, 1], winsorize=5.0)[20:]
    np.testing.assert_allclose(out, expected[0] * np.array([0.6, -0.8]), rtol=1e-5)
    for rho in expected[1:]:
        out, state = update(jnp.array([0.6, 0.8]), state)
        assert norm64(out) == pytest.approx(rho, rel=1e-5)
    # The plain statistics too stay finite, and forget.
    lengths = emitted_norms()([1.0, 1e25, 1.0] + [1e25] * 100)
    assert np.all(np.isfinite(lengths))
    assert lengths[-1] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("on_nonfinite", ["zero", "skip"])
def test_a_bad_leaf_changes_no_statistics_and_no_other_leaf(bad, on_nonfinite):
    tx = gradient_stabilizer(on_nonfinite=on_nonfinite)
    update = jax.jit(tx.update)
    good = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0]])}
    _, state = update(good, tx.init(good))
    spoiled = {"a": jnp.zeros(2).at[1].set(bad), "b": good["b"] * 2}
    out, new = update(spoiled, state)
    _, alone = update({"a": good["a"], "b": spoiled["b"]}, state)
    if on_nonfinite == "skip":
        np.testing.assert_array_equal(out["a"], spoiled["a"])
    else:
        np.testing.assert_array_equal(out["a"], [0.0, 0.0])
    for field in ("count", "mean_norm", "rms_norm"):
        before, after, other = (getattr(s, field) for s in (state, new, alone))
        assert after["a"] == before["a"]
        assert after["b"] == other["b"] != before["b"]
    assert (new.skipped["a"], new.skipped["b"]) == (1, 0)
    np.testing.assert_allclose(out["b"], [[rho_float64([3.0, 6.0])[-1]]], rtol=1e-5)


def test_a_bad_first_step_is_no_step():
    tx = gradient_stabilizer()
    update = jax.jit(tx.update)
    out, state = update(jnp.array([jnp.nan, 1.0]), tx.init(jnp.zeros(2)))
    np.testing.assert_array_equal(out, [0, 0])
    out, state = update(jnp.array([3.0, 4.0]), state)
    np.testing.assert_allclose(out, [0.6, 0.8], rtol=1e-5)
    assert (int(state.count), int(state.skipped)) == (1, 1)


def test_raise_names_the_leaf():
    tx = gradient_stabilizer(on_nonfinite="raise")
    grads = {"good": jnp.ones(2), "bad": jnp.ones(2)}
    state = tx.init(grads)
    update = jax.jit(checkify.checkify(tx.update))
    error, (out, _) = update(grads, state)
    assert error.get() is None
    assert norm64(out["bad"]) == pytest.approx(1, rel=1e-5)
    error, _ = update({**grads, "bad": jnp.array([1.0, jnp.nan])}, state)
    with pytest.raises(Exception, match="the gradient of bad is not finite"):
        error.throw()


def test_other_back_ends_do_not_branch():
    tree = random_tree()
    units = NormUnits(tree, "leaf", ())
    assert "cond" not in str(jax.make_jaxpr(units._norms)(*units.leaves))


def test_loss_scale_reaches_the_statistics_only():
    plain, scaled = gradient_stabilizer(), gradient_stabilizer(loss_scale=True)

    @jax.jit
    def both(grads, scale, state, scaled_state):
        big = jax.tree.map(lambda g: g * scale, grads)
        return plain.update(grads, state), scaled.update(big, scaled_state, loss_scale=scale)

    state, scaled_state = plain.init(random_tree()), scaled.init(random_tree())
    for seed, scale in enumerate((2.0**15, 2.0**14, 2.0**-3)):
        (out, state), (scaled_out, scaled_state) = both(random_tree(seed), scale, state, scaled_state)
        chex.assert_trees_all_close(scaled_out, out, rtol=1e-6)
    chex.assert_trees_all_close(scaled_state, state, rtol=1e-6)
    with pytest.raises(ValueError, match="loss_scale=True needs"):
        scaled.update(random_tree(), scaled_state)


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


def test_inject_hyperparams_directly_with_a_schedule_and_a_label_function():
    factory = optax.inject_hyperparams(gradient_stabilizer, static_args=("scope",))
    schedule = optax.linear_schedule(0.2, 0.8, 3)
    injected = factory(gamma1=schedule, scope=lambda tree: {"a": "x", "b": "y"})
    own = gradient_stabilizer(gamma1=schedule, scope={"a": "x", "b": "y"})
    s, o = injected.init(random_tree()), own.init(random_tree())
    updates = jax.jit(injected.update), jax.jit(own.update)
    for seed in range(4):
        (a, s), (b, o) = updates[0](random_tree(seed), s), updates[1](random_tree(seed), o)
        chex.assert_trees_all_close(a, b, rtol=1e-5)


@pytest.mark.parametrize("tree", [{}, (), None, {"a": None, "b": optax.MaskedNode()}])
@pytest.mark.parametrize("scope", ["leaf", "layer", "global", {}])
def test_trees_without_leaves(tree, scope):
    if scope == {} and tree != {}:
        scope = tree
    tx = gradient_stabilizer(scope=scope)
    state = tx.init(tree)
    out, new = jax.jit(tx.update)(tree, state)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    chex.assert_trees_all_equal(new, state)


@pytest.mark.parametrize("scope", ["leaf", "layer", "global", {"a": "x", "b": "y"}])
def test_masked_and_missing_leaves(scope):
    mask = {"a": True, "b": {"c": False, "d": True}}
    tx = optax.masked(gradient_stabilizer(scope=scope), mask)
    grads = random_tree()
    out, _ = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_array_equal(out["b"]["c"], grads["b"]["c"])
    small = {"a": grads["a"], "b": {"c": None, "d": grads["b"]["d"]}}
    inner = gradient_stabilizer(scope=scope)
    expected, _ = jax.jit(inner.update)(small, inner.init(small))
    chex.assert_trees_all_close((out["a"], out["b"]["d"]), (expected["a"], expected["b"]["d"]), rtol=1e-6)


def test_multi_steps_sees_the_accumulated_gradient():
    tx = optax.MultiSteps(optax.chain(gradient_stabilizer(), optax.sgd(1.0)), every_k_schedule=2)
    params = jnp.zeros(2)
    state = tx.init(params)
    update = jax.jit(tx.update)
    out, state = update(jnp.array([4.0, 0.0]), state, params)
    np.testing.assert_array_equal(out, [0, 0])
    out, state = update(jnp.array([0.0, 2.0]), state, params)
    np.testing.assert_allclose(out, -np.array([2.0, 1.0]) / math.sqrt(5), rtol=1e-5)


def test_apply_if_finite_and_partition():
    tx = optax.apply_if_finite(
        optax.partition({"s": gradient_stabilizer(), "n": optax.identity()}, {"a": "s", "b": "n"}), 3
    )
    grads = random_tree()
    state = tx.init(grads)
    update = jax.jit(tx.update)
    out, state = update(grads, state)
    chex.assert_trees_all_close(out["a"], grads["a"] / norm64(grads["a"]), rtol=1e-5)
    chex.assert_trees_all_equal(out["b"], grads["b"])
    bad = {**grads, "a": grads["a"].at[0, 0].set(jnp.nan)}
    _, rejected = update(bad, state)
    chex.assert_trees_all_equal(rejected.inner_state, state.inner_state)


@pytest.mark.parametrize("scope", ["leaf", "layer", "global"])
def test_sharded_equals_unsharded(scope):
    tx = gradient_stabilizer(scope=scope)
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


@pytest.mark.parametrize("scope", ["leaf", "layer", "global", {"a": "x", "b": "y"}])
def test_orbax_round_trip(tmp_path, scope):
    tx = gradient_stabilizer(scope=scope)
    grads = random_tree()
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(grads))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, grads))
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(update(grads, restored), update(grads, state))


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
