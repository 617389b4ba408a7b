import doctest
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

from jaxlib_icml.optim import (
    MatrixSpec,
    ScaleByOlionState,
    default_matrix_specs,
    olion,
    olion_diagnostics,
    scale_by_olion,
)
from tests.optim.olion_helpers import (
    by_path,
    first_direction,
    gaussian,
    newton_schulz,
    polar,
    run,
    transformer,
)


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.olion"])
    assert result.attempted > 0
    assert result.failed == 0


# Sizes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_entry_of_a_dense_update_is_the_rms_target(dtype):
    shapes = [(1, 1), (1, 7), (16, 16), (5, 33), (64, 12)]
    for d in first_direction([jnp.asarray(gaussian(shape), dtype) for shape in shapes]):
        assert d.dtype == dtype
        np.testing.assert_array_equal(jnp.abs(d), jnp.asarray(0.2, dtype))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (24, 24)])
@pytest.mark.parametrize("orthogonalizer", ["auto", "svd", "identity"])
def test_rms_for_every_pattern_of_zeros(shape, orthogonalizer):
    rng = np.random.default_rng(3)
    for rows_kept, cols_kept in [(1, 1), (5, 3), (shape[0], 1), (7, shape[1])]:
        g = gaussian(shape)
        g[rng.permutation(shape[0])[rows_kept:]] = 0
        g[:, rng.permutation(shape[1])[cols_kept:]] = 0
        d = np.asarray(first_direction(jnp.asarray(g), orthogonalizer=orthogonalizer), np.float64)
        assert abs(np.sqrt(np.mean(d**2)) - 0.2) < 1e-6
        np.testing.assert_array_equal(d != 0, g != 0)


def test_rms_is_per_matrix():
    g = gaussian((3, 8, 12))
    g[0, :4] = 0
    d = np.asarray(first_direction(jnp.asarray(g)), np.float64)
    np.testing.assert_allclose(np.sqrt(np.mean(d**2, axis=(1, 2))), 0.2, atol=1e-6)
    np.testing.assert_allclose(np.abs(d[0, 4:]), 0.2 * np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(np.abs(d[1:]), 0.2, rtol=1e-6)


def test_step_of_the_parameters():
    eta, decay = 0.03, 0.1
    x, g = jnp.asarray(gaussian((16, 24))), jnp.asarray(gaussian((16, 24), 1))
    new, _ = run(olion(eta, weight_decay=decay), {"w": x}, {"w": g})
    np.testing.assert_allclose(jnp.max(jnp.abs(new["w"] - (1 - decay * eta) * x)), 0.2 * eta, rtol=1e-4)


def test_rms_target_eps_and_alternations_are_used():
    g = jnp.asarray(gaussian((16, 16)))
    np.testing.assert_allclose(jnp.abs(first_direction(g, rms_target=0.7)), 0.7, rtol=1e-6)
    np.testing.assert_allclose(jnp.abs(first_direction(g, eps=16.0)), 0.1, rtol=1e-6)
    twice = np.sign(polar(np.sign(polar(gaussian((16, 16)).astype(np.float64)))))
    np.testing.assert_array_equal(jnp.sign(first_direction(g, orthogonalizer="svd", alternations=2)), twice)


# Invariances


@pytest.mark.parametrize("shape", [(24, 24), (16, 48)])
def test_positive_rescaling_changes_nothing(shape):
    g = gaussian(shape)
    g /= np.linalg.norm(g)
    d = first_direction(jnp.asarray(g))
    for exponent in (-60, -40, -1, 1, 40, 60):
        np.testing.assert_array_equal(first_direction(jnp.asarray(g * np.float32(2.0**exponent))), d)
    for scale in (1e-12, 0.3, 1e6):
        assert np.mean(first_direction(jnp.asarray(g * np.float32(scale))) == d) >= 0.999


@pytest.mark.parametrize("orthogonalizer", ["auto", "svd"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transposition_permutation_and_sign_flips(orthogonalizer, dtype):
    rng = np.random.default_rng(5)
    with jax.enable_x64(dtype == np.float64):
        direction = partial(first_direction, orthogonalizer=orthogonalizer)
        for shape in [(48, 48), (32, 80)]:
            g = gaussian(shape, 1, dtype)
            d = np.asarray(direction(jnp.asarray(g)))
            assert d.dtype == dtype
            rows, cols = rng.permutation(shape[0]), rng.permutation(shape[1])
            flip_rows, flip_cols = (rng.choice([-1.0, 1.0], n).astype(dtype) for n in shape)
            pairs = [
                (direction(jnp.asarray(g.T)).T, d),
                (direction(jnp.asarray(g[rows][:, cols])), d[rows][:, cols]),
                (
                    direction(jnp.asarray(flip_rows[:, None] * g * flip_cols)),
                    flip_rows[:, None] * d * flip_cols,
                ),
            ]
            for got, wanted in pairs:
                share = np.mean(np.asarray(got) == wanted)
                assert share == 1 if dtype == np.float64 else share >= 0.999


# Momentum


def test_first_step_mixes_seven_percent_of_the_gradient():
    # G = (1 - b1 b2) g when M₀ = 0; seen without the sign through Lion's limit of one entry per block.
    g = jnp.asarray(gaussian((6, 9)))
    tx = scale_by_olion()
    _, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(state.mu, 0.02 * g, rtol=1e-6)
    mixed = 0.05 * g + 0.95 * state.mu
    np.testing.assert_allclose(mixed, (1 - 0.95 * 0.98) * g, rtol=1e-5)


def test_constant_gradient_gives_constant_signs():
    g = jnp.asarray(gaussian((16, 40)))
    tx = scale_by_olion()
    state, update, first = tx.init(g), jax.jit(tx.update), None
    for _ in range(6):
        d, state = update(g, state)
        first = d if first is None else first
        assert np.mean(d == first) >= 0.999


@pytest.mark.parametrize("shape", [(24, 64), (32, 32)])
@pytest.mark.parametrize(
    ("orthogonalizer", "reference"), [("auto", newton_schulz), ("svd", polar), ("identity", lambda g: g)]
)
def test_ten_steps_against_float64(shape, orthogonalizer, reference):
    grads = gaussian((10, *shape))
    tx = scale_by_olion(orthogonalizer=orthogonalizer)
    state, update = tx.init(jnp.asarray(grads[0])), jax.jit(tx.update)
    m, agreement = np.zeros(shape), []
    for g in grads:
        d, state = update(jnp.asarray(g), state)
        g = g.astype(np.float64)
        # With identity this is Lion at RMS 0.2: sign of 0.069 g + 0.931 M of the step before.
        mixed = (1 - 0.95 * 0.98) * g + 0.95 * 0.98 * m
        m = 0.98 * m + 0.02 * g
        agreement.append(np.mean(np.sign(d) == np.sign(reference(mixed))))
    assert np.mean(agreement) >= 0.999
    np.testing.assert_allclose(state.mu, m, atol=1e-6)
    assert state.count == 10


def test_identity_is_rms_matched_lion_of_optax():
    # Lion mixes with the old momentum: optax.lion(b1 = 0.931, b2 = 0.98) is the identity limit.
    tx, lion = scale_by_olion(orthogonalizer="identity"), optax.scale_by_lion(b1=0.95 * 0.98, b2=0.98)
    grads = jnp.asarray(gaussian((8, 12, 10)))
    state, lion_state = tx.init(grads[0]), lion.init(grads[0])
    for g in grads:
        d, state = tx.update(g, state)
        wanted, lion_state = lion.update(g, lion_state)
        assert np.mean(np.asarray(d) == 0.2 * np.asarray(wanted)) >= 0.999


# Limits and geometry


def test_hadamard_matrix_is_attained():
    h = scipy.linalg.hadamard(64).astype(np.float32)
    d = first_direction(jnp.asarray(3e-4 * h))
    np.testing.assert_array_equal(jnp.sign(d), h)
    np.testing.assert_allclose(np.linalg.norm(np.sign(d), 2), 8, rtol=1e-6)


@pytest.mark.parametrize("orthogonalizer", ["ns", "gram", "polar_express", "svd"])
def test_rank_one(orthogonalizer):
    u, v = gaussian(24), gaussian(40, 1)
    d = first_direction(jnp.asarray(np.outer(u, v)), orthogonalizer=orthogonalizer)
    np.testing.assert_array_equal(jnp.sign(d), np.sign(np.outer(u, v)))


def test_spectral_control():
    for seed in range(3):
        u, v, noise = gaussian((256, 4), seed), gaussian((4, 256), seed + 10), gaussian((256, 256), seed + 20)
        g = 3 * u @ v + noise
        assert np.linalg.norm(np.sign(g), 2) / 16 > 5
        assert np.linalg.norm(np.sign(first_direction(jnp.asarray(g))), 2) / 16 < 2


def test_descent_inequality():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((20, 12)), rng.standard_normal((20, 16))
        smoothness = np.linalg.norm(a, 2) ** 2
        x, eta = jnp.asarray(rng.standard_normal((12, 16))), 0.01
        tx = scale_by_olion(0.0, 0.0, orthogonalizer="svd", rms_target=1.0)

        @jax.jit
        def step(x):
            residual = a @ x - b
            g = a.T @ residual
            signs = tx.update(g, tx.init(g))[0]
            descent = olion_diagnostics(g)[""]["descent"] * jnp.linalg.norm(g)
            return x - eta * signs, 0.5 * jnp.sum(residual**2), descent

        start = 0.5 * np.sum((a @ np.asarray(x) - b) ** 2)
        for _ in range(100):
            new, f, descent = step(x)
            f_new = 0.5 * np.sum((a @ np.asarray(new) - b) ** 2)
            bound = f - eta * descent + smoothness / 2 * eta**2 * x.size
            assert f_new <= bound + 1e-9 * f
            x = new
        assert f_new < start / 2


# Blocks


def test_fused_split_heads_and_stacks_equal_separate_leaves():
    g = gaussian((32, 96))
    fused = first_direction({"w": jnp.asarray(g)}, matrix_specs={"w": MatrixSpec(0, 1, (32, 32, 32))})["w"]
    parts = [first_direction(jnp.asarray(block)) for block in np.split(g, 3, axis=1)]
    assert np.mean(fused == np.concatenate(parts, axis=1)) >= 0.9999

    heads = {"attn": {"query": {"kernel": jnp.asarray(gaussian((32, 4, 8)))}}}
    specs = default_matrix_specs(heads, per_head=True)
    per_head = first_direction(heads, matrix_specs=specs)["attn"]["query"]["kernel"]
    for i in range(4):
        single = first_direction(heads["attn"]["query"]["kernel"][:, i])
        assert np.mean(per_head[:, i] == single) >= 0.999
    together = first_direction(heads)["attn"]["query"]["kernel"]
    flat = first_direction(heads["attn"]["query"]["kernel"].reshape(32, 32))
    np.testing.assert_array_equal(together, flat.reshape(32, 4, 8))


def test_leaves_without_a_spec_pass_unchanged():
    g = {"kernel": jnp.asarray(gaussian((4, 6))), "bias": jnp.asarray(gaussian(6))}
    tx = scale_by_olion()
    state = tx.init(g)
    assert isinstance(state, ScaleByOlionState)
    assert isinstance(state.mu["bias"], optax.MaskedNode)
    np.testing.assert_array_equal(tx.update(g, state)[0]["bias"], g["bias"])


# Degenerate


def test_zero_gradient():
    params = transformer()
    new, state = run(olion(0.1, weight_decay=0.0), params, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(new, params)
    chex.assert_tree_all_finite(state)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("orthogonalizer", ["auto", "svd", "identity"])
def test_zero_rows_stay_zero_and_the_rest_grows(eps, orthogonalizer):
    g = jnp.asarray(gaussian((10, 20))).at[3].set(0)
    d = first_direction(g, eps=eps, orthogonalizer=orthogonalizer)
    np.testing.assert_array_equal(d[3], 0)
    np.testing.assert_allclose(jnp.abs(jnp.delete(d, 3, axis=0)), 0.2 * np.sqrt(10 / 9), rtol=1e-6)
    np.testing.assert_array_equal(first_direction(0 * g, eps=eps, orthogonalizer=orthogonalizer), 0 * g)


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("orthogonalizer", ["svd", "identity"])
def test_a_broken_gradient_shows_in_its_leaf_only(broken, orthogonalizer):
    params = {name: {"kernel": jnp.ones((3, 4))} for name in ("a", "b", "head")}
    good = jax.tree.map(jnp.ones_like, params)
    bad = {**good, "b": {"kernel": good["b"]["kernel"].at[1, 2].set(broken)}}
    plain = olion(0.1, orthogonalizer=orthogonalizer)
    update = jax.jit(plain.update)
    updates, state = update(bad, plain.init(params), params)
    assert {path for path, u in by_path(updates).items() if not jnp.isfinite(u).all()} == {"b/kernel"}
    # The state remembers: a later good gradient does not hide it.
    updates, _ = update(good, state, params)
    assert not jnp.isfinite(updates["b"]["kernel"][1, 2])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"b1": 1.0}, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": -0.1}, r"b2 must be in \[0, 1\), got -0.1"),
        ({"b2": float("nan")}, r"b2 must be in \[0, 1\), got nan"),
        ({"ns_steps": 0}, "number of steps must be at least 1, got 0"),
        ({"alternations": 0}, "must be at least 1, got 0"),
        ({"orthogonalizer": "newton"}, "orthogonalizer must be one of"),
        ({"ns_coeffs": (1.0,)}, "triple or a sequence of triples"),
        ({"rms_target": 0.0}, r"rms_target must be in \(0, inf\), got 0.0"),
        ({"eps": -1e-8}, "eps must be in"),
        ({"learning_rate": float("inf")}, r"learning_rate must be in \[0, inf\)"),
        ({"weight_decay": -1.0}, "weight_decay must be in"),
        ({"fallback_learning_rate": -1.0}, "fallback_learning_rate must be in"),
        ({"clip_norm": 0.0}, r"clip_norm must be in \(0, inf\), got 0.0"),
        ({"fallback": optax.sgd(0.1), "fallback_learning_rate": 0.1}, "a given fallback has its own rate"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        olion(**{"learning_rate": 0.1, **kwargs})


def test_bad_leaves_are_named_at_init():
    params = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"at least two axes.*'dense/bias'"):
        olion(0.1, matrix_specs={"dense": {"kernel": None, "bias": MatrixSpec(0, 1)}}).init(params)
    with pytest.raises(ValueError, match=r"no spec for \['dense/bias'\]"):
        olion(0.1, matrix_specs={"dense": {"kernel": None}}).init(params)
    with pytest.raises(ValueError, match="leaf 'dense/kernel' has dtype complex64"):
        olion(0.1).init({"dense": {"kernel": jnp.ones((3, 4), jnp.complex64)}})
    with pytest.raises(ValueError, match=r"weight_decay_mask must hold a boolean.*'dense/bias'"):
        olion(0.1, weight_decay_mask={"dense": {"kernel": True}}).init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        olion(0.1).update(params, olion(0.1).init(params))
