"""Polar factors: exactness, agreement of the iterations, scale, degenerate and bad inputs."""

import doctest
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.optim import (
    NEWTON_SCHULZ_COEFFS,
    ORTHOGONALIZERS,
    POLAR_EXPRESS_COEFFS,
    orthogonalize,
)

jit_orthogonalize = jax.jit(orthogonalize, static_argnames=("method", "steps", "coeffs", "dtype"))


def gaussian(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def iterate_in_float64(g, coeffs, steps=5, margin=1.0):
    """The textbook iteration on one matrix."""
    z = np.asarray(g, np.float64)
    tall = z.shape[0] > z.shape[1]
    z = z.T if tall else z
    z = z / np.linalg.norm(z) / margin
    for i in range(steps):
        a, b, c = coeffs[min(i, len(coeffs) - 1)]
        A = z @ z.T
        z = a * z + (b * A + c * A @ A) @ z
    return z.T if tall else z


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.orthogonalize"])
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_iterations_follow_their_polynomials(shape):
    g = gaussian(shape)
    ns = iterate_in_float64(g, [NEWTON_SCHULZ_COEFFS])
    for method in ("ns", "gram", "auto"):
        np.testing.assert_allclose(jit_orthogonalize(jnp.asarray(g), method), ns, atol=2e-5)
    express = iterate_in_float64(g, POLAR_EXPRESS_COEFFS, margin=1.01)
    np.testing.assert_allclose(jit_orthogonalize(jnp.asarray(g), "polar_express"), express, atol=2e-4)


@pytest.mark.parametrize("method", ["ns", "gram"])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), pytest.param((768, 1600), marks=pytest.mark.slow)])
def test_symmetric_products_give_the_same_polynomials(monkeypatch, method, shape):
    """With one triangle of every symmetric product, as large matrices have it."""
    monkeypatch.setattr(sys.modules["jaxlib_icml.optim.orthogonalize"], "_SMALLEST_SYMMETRIC", {32: 1})
    g = gaussian(shape)
    got = jax.jit(lambda x: orthogonalize(x, method))(g)
    np.testing.assert_allclose(got, iterate_in_float64(g, [NEWTON_SCHULZ_COEFFS]), atol=2e-5)


@pytest.mark.parametrize("shape", [(20, 20), (12, 30), (30, 12)])
def test_svd_is_the_polar_factor(shape):
    g = gaussian(shape)
    u, _, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(jit_orthogonalize(jnp.asarray(g), "svd"), u @ vt, atol=1e-5)


def test_svd_of_deficient_rank_is_the_partial_isometry():
    u, v = gaussian((30, 3), 1), gaussian((20, 3), 2)
    g = u @ v.T
    q = np.asarray(jit_orthogonalize(jnp.asarray(g), "svd"))
    np.testing.assert_allclose(np.linalg.svd(q, compute_uv=False), [1.0] * 3 + [0.0] * 17, atol=1e-5)
    np.testing.assert_allclose(np.trace(q.T @ g), np.linalg.svd(g, compute_uv=False).sum(), rtol=1e-5)


def test_singular_values_after_five_steps_lie_in_the_documented_interval():
    # From singular values of 0.05 to 1 (Frobenius norm included) the default polynomial ends in [0.6, 1.3].
    u, _, vt = np.linalg.svd(gaussian((48, 48)).astype(np.float64))
    g = (u * np.linspace(0.2, 1.0, 48)) @ vt
    for method in ("ns", "gram"):
        sigma = np.linalg.svd(np.asarray(jit_orthogonalize(jnp.float32(g), method)), compute_uv=False)
        assert sigma.min() > 0.6
        assert sigma.max() < 1.3
    sigma = np.linalg.svd(np.asarray(jit_orthogonalize(jnp.float32(g), "polar_express")), compute_uv=False)
    assert sigma.min() > 0.85
    assert sigma.max() < 1.15


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (128, 1024)])
def test_gram_equals_newton_schulz(shape):
    g = gaussian(shape)
    difference = jit_orthogonalize(jnp.asarray(g), "gram") - jit_orthogonalize(jnp.asarray(g), "ns")
    assert float(jnp.abs(difference).max()) < 1e-4
    with jax.enable_x64(True):
        g = jnp.asarray(g, jnp.float64)
        difference = jit_orthogonalize(g, "gram") - jit_orthogonalize(g, "ns")
        assert difference.dtype == jnp.float64
        assert float(jnp.abs(difference).max()) < 1e-12


@pytest.mark.parametrize("method", ["ns", "gram", "polar_express", "svd"])
def test_a_stack_equals_its_matrices(method):
    g = jnp.asarray(gaussian((3, 2, 32, 96)))
    stack = jit_orthogonalize(g, method)
    single = jnp.stack([jnp.stack([jit_orthogonalize(m, method) for m in row]) for row in g])
    np.testing.assert_allclose(stack, single, atol=1e-5)
    mapped = jax.vmap(jax.vmap(partial(orthogonalize, method=method)))(g)
    np.testing.assert_allclose(stack, mapped, atol=1e-5)


@pytest.mark.slow
def test_a_large_stack_equals_its_matrices():
    g = jnp.asarray(gaussian((24, 256, 1024)))
    stack = jit_orthogonalize(g, "auto")
    for matrix, q in zip(g, stack, strict=True):
        single = jit_orthogonalize(matrix, "auto")
        np.testing.assert_allclose(q, single, atol=1e-5)
        assert float(jnp.mean(jnp.sign(q) == jnp.sign(single))) >= 0.9999


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e-12, 1.0, 1e30])
def test_any_scale(method, scale):
    g = gaussian((16, 40))
    q = jit_orthogonalize(jnp.asarray(g), method)
    if method == "identity":
        np.testing.assert_array_equal(q, g)
        return
    scaled = jit_orthogonalize(jnp.asarray(g * np.float32(scale)), method)
    np.testing.assert_allclose(scaled, q, atol=3e-4)


@settings(deadline=None, max_examples=25)
@given(exponent=st.integers(-100, 100), seed=st.integers(0, 5))
def test_powers_of_two_change_no_bit(exponent, seed):
    g = jnp.asarray(gaussian((8, 24), seed))
    scaled = g * jnp.float32(2.0**exponent)
    for method in ("ns", "gram", "svd"):
        np.testing.assert_array_equal(jit_orthogonalize(scaled, method), jit_orthogonalize(g, method))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("method", ["ns", "gram", "polar_express", "svd"])
def test_half_precision_neither_overflows_nor_loses_the_factor(dtype, method):
    # float16 ends at 65504: squares overflow unless the norm is taken after scaling.
    g = jnp.asarray(gaussian((24, 72)))
    g = (g * (5e4 / jnp.abs(g).max())).astype(dtype)
    q = jit_orthogonalize(g, method, dtype=dtype)
    assert q.dtype == dtype
    coeffs, margin = (POLAR_EXPRESS_COEFFS, 1.01) if method == "polar_express" else ([NEWTON_SCHULZ_COEFFS], 1.0)
    wanted = np.asarray(g, np.float64)
    if method == "svd":
        u, _, vt = np.linalg.svd(wanted, full_matrices=False)
        wanted = u @ vt
    else:
        wanted = iterate_in_float64(wanted, coeffs, margin=margin)
    error = np.linalg.norm(np.asarray(q, np.float64) - wanted) / np.linalg.norm(wanted)
    # Unit roundoff is 2⁻¹¹ and 2⁻⁸; five steps of slope up to 8 amplify it.
    assert error < (0.02 if dtype == jnp.float16 else 0.15)


@pytest.mark.parametrize("method", ["ns", "gram", "polar_express"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_traced_steps_and_coefficients(method, dtype):
    g = jnp.asarray(gaussian((12, 36)))
    traces = []

    @jax.jit
    def traced(g, steps, coeffs):
        traces.append(1)
        return orthogonalize(g, method, steps, coeffs, dtype)

    table = jnp.asarray(POLAR_EXPRESS_COEFFS)
    for steps in (1, 2, 3, 5, 7):
        static = orthogonalize(g, method, steps, POLAR_EXPRESS_COEFFS, dtype)
        np.testing.assert_allclose(
            traced(g, jnp.int32(steps), table), static, atol=1e-5 if dtype == jnp.float32 else 0.1
        )
    assert len(traces) == 1


def test_coefficient_tables_are_used_in_order_and_the_last_is_repeated():
    g = gaussian((12, 12))
    for steps in (1, 3, 5, 6):
        wanted = iterate_in_float64(g, POLAR_EXPRESS_COEFFS, steps)
        got = jit_orthogonalize(jnp.asarray(g), "ns", steps, POLAR_EXPRESS_COEFFS)
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    triple = (2.0, -1.5, 0.5)
    got = jit_orthogonalize(jnp.asarray(g), "ns", 12, triple)
    u, _, vt = np.linalg.svd(g.astype(np.float64))
    np.testing.assert_allclose(got, iterate_in_float64(g, [triple], 12), atol=1e-4)
    # (2, -1.5, 0.5) fixes 1 with slope 0: twelve steps converge to the polar factor where σ is not tiny.
    assert np.sum(np.asarray(got) * (u @ vt)) / 12 > 0.95


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
@pytest.mark.parametrize("shape", [(6, 6), (4, 16)])
def test_zero_and_nan(method, shape):
    zero = jnp.zeros((2, *shape))
    np.testing.assert_array_equal(jit_orthogonalize(zero, method), zero)
    for broken in (jnp.nan, jnp.inf):
        g = jnp.asarray(gaussian((2, *shape))).at[0, 1, 2].set(broken)
        q = jit_orthogonalize(g, method)
        assert not bool(jnp.isfinite(q[0, 1, 2]))
        assert method == "identity" or bool(jnp.isnan(q[0]).all())
        assert bool(jnp.isfinite(q[1]).all())


def test_zero_rows_and_columns_stay_zero():
    g = jnp.asarray(gaussian((10, 14))).at[3].set(0).at[:, 5].set(0)
    for method in ORTHOGONALIZERS:
        q = jit_orthogonalize(g, method)
        np.testing.assert_array_equal(q[3], 0)
        np.testing.assert_array_equal(q[:, 5], 0)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4)])
def test_empty(shape):
    assert orthogonalize(jnp.zeros(shape)).shape == shape


def test_default_dtype_is_wide_on_cpu():
    g = jnp.asarray(gaussian((32, 32)))
    np.testing.assert_array_equal(jit_orthogonalize(g, "ns"), jit_orthogonalize(g, "ns", dtype=jnp.float32))
    assert float(jnp.abs(jit_orthogonalize(g, "ns") - jit_orthogonalize(g, "ns", dtype=jnp.bfloat16)).max()) > 1e-4


def test_gradient_flows():
    g = jnp.asarray(gaussian((4, 6)))

    def loss(g):
        return jnp.sum(orthogonalize(g, "ns") ** 2)

    h = 1e-2 * jnp.asarray(gaussian((4, 6), 1))
    numeric = (loss(g + h) - loss(g - h)) / 2
    np.testing.assert_allclose(jnp.sum(jax.grad(loss)(g) * h), numeric, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "qr"}, "orthogonalizer must be one of .*'qr'"),
        ({"steps": 0}, "at least 1, got 0"),
        ({"steps": jnp.int32(-3)}, "at least 1, got -3"),
        ({"steps": 2.5}, "must be an integer scalar, got 2.5"),
        ({"steps": True}, "must be an integer scalar"),
        ({"steps": jnp.ones(2, int)}, "must be an integer scalar"),
        ({"coeffs": (1.0, 2.0)}, r"triples, got \(1.0, 2.0\)"),
        ({"coeffs": jnp.ones((2, 2))}, r"triples, got shape \(2, 2\)"),
        ({"coeffs": (1.0, float("nan"), 0.0)}, "coefficients must be finite"),
        ({"method": "svd", "coeffs": (1.0, 1.0, 1.0)}, "no meaning for the orthogonalizer 'svd'"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(jnp.eye(3), **kwargs)
