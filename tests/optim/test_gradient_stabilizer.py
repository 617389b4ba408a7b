import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from jaxlib_icml.optim import gradient_stabilizer
from jaxlib_icml.optim._norm_units import NormUnits
from jaxlib_icml.optim.gradient_stabilizer import (
    recovery_steps,
    stabilizer_bound,
)
from tests.optim.stabilizer_helpers import emitted_norms, norm64, random_tree, rho_float64

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
