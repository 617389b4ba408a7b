"""fake_quant against ml_dtypes' formats, its error bounds, its gradients, and what it refuses."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.quant import FORMATS, fake_quant

MINIFLOATS = {"e2m1": ml_dtypes.float4_e2m1fn, "fp8_e4m3": ml_dtypes.float8_e4m3fn}
INTEGERS = {"e1m2": 7, "int4": 7, "int8": 127}


@cache
def compiled(fmt, axis=None, ste=True):
    return jax.jit(partial(fake_quant, fmt=fmt, axis=axis, ste=ste))


def values_of(dtype):
    """Every finite value of a small float type, from its bit patterns."""
    bits = 2 ** (4 if dtype is ml_dtypes.float4_e2m1fn else 8)
    values = np.arange(bits, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("fmt", "dtype"), MINIFLOATS.items())
def test_grid_is_that_of_ml_dtypes(fmt, dtype):
    grid = values_of(dtype)
    assert grid.max() == FORMATS[fmt].largest
    np.testing.assert_array_equal(compiled(fmt)(grid), grid)


@pytest.mark.parametrize(("fmt", "dtype"), MINIFLOATS.items())
def test_rounding_is_that_of_ml_dtypes(fmt, dtype):
    grid = values_of(dtype)
    rng = np.random.default_rng(1)
    spread = np.exp2(rng.uniform(-12, np.log2(grid.max()), 4000)) * rng.choice([-1, 1], 4000)
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([[grid.max()], ties, spread]).astype(np.float32)  # the first fixes the scale at 1
    np.testing.assert_array_equal(compiled(fmt)(x), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(("fmt", "largest"), INTEGERS.items())
def test_integer_grids_round_to_nearest_even(fmt, largest):
    halves = np.arange(-2 * largest, 2 * largest + 1, dtype=np.float32) / 2
    np.testing.assert_array_equal(compiled(fmt)(halves), np.rint(halves))
    x = largest * np.tanh(normal(2000))
    x[0] = largest
    np.testing.assert_array_equal(compiled(fmt)(x), np.rint(x))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_is_kept_and_twice_is_once(fmt, dtype):
    x = jnp.asarray(normal((16, 32)), dtype)
    once = compiled(fmt, axis=1)(x)
    assert once.dtype == x.dtype
    np.testing.assert_array_equal(compiled(fmt, axis=1)(once), once)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal(100))
        out = fake_quant(x, "int8")
        assert out.dtype == jnp.float64
        scale = np.abs(np.asarray(x)).max() / 127
        np.testing.assert_allclose(out, scale * np.rint(np.asarray(x) / scale), rtol=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(-100, 120), st.integers(0, 1000))
def test_error_is_at_most_half_a_step(fmt, power, seed):
    """Down to 2^-100: at smaller scales some steps are subnormal numbers, which XLA flushes to zero."""
    x = np.ldexp(normal((4, 50), seed), power)
    out = np.asarray(compiled(fmt, axis=1)(x), np.float64)
    grid = FORMATS[fmt]
    scale = np.abs(x).astype(np.float64).max(axis=1, keepdims=True) / grid.largest
    y = np.abs(x) / scale
    if grid.mantissa_bits is None:
        step = np.ones_like(y)
    else:
        step = 2.0 ** (np.maximum(np.floor(np.log2(y)), grid.min_exponent) - grid.mantissa_bits)
    assert np.all(np.abs(out - x) <= 0.5 * step * scale * (1 + 1e-5))
    np.testing.assert_array_equal(np.abs(out).max(axis=1), np.abs(x).max(axis=1))


def test_each_slice_along_the_axis_has_its_own_scale():
    x = normal((3, 4, 5)) * np.array([1.0, 100.0, 1e-4], np.float32)[:, None, None]
    whole = compiled("e1m2", axis=(-1, 1))(x)
    apart = jnp.stack([compiled("e1m2")(slice_) for slice_ in x])
    np.testing.assert_array_equal(whole, apart)
    # With one scale for all, the small slice vanishes.
    assert not np.any(compiled("e1m2")(x)[2])


@pytest.mark.parametrize("fmt", FORMATS)
def test_scaling_by_a_power_of_two_commutes(fmt):
    x = normal((8, 8))
    np.testing.assert_array_equal(compiled(fmt)(x * 2.0**-100), compiled(fmt)(x) * 2.0**-100)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_slices_stay_zero_and_empty_arrays_pass(fmt):
    x = np.concatenate([np.zeros((1, 6), np.float32), normal((1, 6))])
    out = compiled(fmt, axis=1)(x)
    assert np.all(out[0] == 0)
    assert np.any(out[1] != 0)
    chex.assert_shape(fake_quant(jnp.zeros((0, 3)), fmt), (0, 3))
    assert fake_quant(jnp.float32(-3.0), fmt) == -3.0


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_show_in_their_whole_slice(fmt, bad):
    x = normal((2, 6))
    x[0, 3] = bad
    out = np.asarray(compiled(fmt, axis=1)(x))
    assert np.all(np.isnan(out[0]))
    assert np.all(np.isfinite(out[1]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_straight_through_gradient_is_the_identity(fmt):
    x, weights = normal((6, 7)), normal((6, 7), 1)
    value, pull = jax.vjp(compiled(fmt, axis=0), x)
    np.testing.assert_array_equal(pull(jnp.asarray(weights))[0], weights)
    np.testing.assert_array_equal(value, compiled(fmt, axis=0, ste=False)(x))
    _, tangent = jax.jvp(compiled(fmt, axis=0), (x,), (weights,))
    np.testing.assert_array_equal(tangent, weights)
    stacked = jax.vmap(jax.grad(lambda row: (fake_quant(row, fmt) ** 2).sum()))(jnp.asarray(x))
    rows = jnp.stack([fake_quant(jnp.asarray(row), fmt) for row in x])
    np.testing.assert_allclose(stacked, 2 * rows, rtol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_the_estimator_the_gradient_is_the_functions_own(fmt):
    x, weights = np.array([0.31, -2.0, 0.77, 1.13], np.float32), np.array([1.0, 0.3, -2.0, 5.0])
    with jax.enable_x64(True):
        at = lambda v: fake_quant(jnp.asarray(v, jnp.float64), fmt, ste=False) @ weights  # noqa: E731
        # Numbers whose rounding does not change in the neighbourhood, so that differences are exact.
        step = 1e-6
        eye = np.eye(4) * step
        differences = [(at(x + e) - at(x - e)) / (2 * step) for e in eye]
        gradient = jax.grad(at)(jnp.asarray(x, jnp.float64))
    np.testing.assert_allclose(gradient, differences, atol=1e-6)
    assert np.count_nonzero(gradient) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "fp4"}, "fmt must be one of e1m2, .*'fp4'"),
        ({"axis": 2}, r"axis must lie in \[-2, 2\)"),
        ({"axis": (0, -3)}, r"axis must lie in \[-2, 2\)"),
        ({"axis": (1, -1)}, "axis names an axis twice"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(fake_quant, **arguments), jnp.zeros((2, 3)))


def test_integers_are_refused():
    # The tests' run-time checker of annotations would refuse them first.
    with pytest.raises(ValueError, match="x must be floating point, got int32"):
        fake_quant.__wrapped__(jnp.arange(3))
