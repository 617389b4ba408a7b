import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.nn import apply_rotary, contract, dot_general, logical_param, rotary_angles


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axes", [1, 2])
def test_contract_and_its_gradients_equal_float64(dtype, axes):
    x = jax.random.normal(jax.random.key(0), (3, 5, 4, 6), dtype)
    w = jax.random.normal(jax.random.key(1), (6, 7, 2) if axes == 1 else (4, 6, 7), dtype)
    bar = jax.random.normal(jax.random.key(2), (3, 5, 4, 7, 2) if axes == 1 else (3, 5, 7), dtype)
    out, vjp = jax.vjp(lambda x, w: contract(x, w, axes), x, w)
    x_bar, w_bar = vjp(bar)
    x64, w64, bar64 = (np.asarray(a, np.float64) for a in (x, w, bar))
    free = w.ndim - axes
    expected = (
        np.tensordot(x64, w64, axes),
        np.tensordot(bar64, w64, (range(bar.ndim - free, bar.ndim), range(axes, w.ndim))),
        np.tensordot(x64, bar64, (range(x.ndim - axes), range(x.ndim - axes))),
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-2}
    for got, want in zip((out, x_bar, w_bar), expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, **tolerance)


def test_half_precision_products_accumulate_in_float32():
    # 4096 ones and a 1: adding one by one in bfloat16 stops at 256.
    x = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(contract(x, x.T)[0, 0]) == 4096.0


def test_contract_and_dot_general_refuse_what_they_cannot_do():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match="contract"):
        contract(x, w.T)
    with pytest.raises(ValueError, match="dtypes"):
        contract(x, w.astype(jnp.bfloat16))
    chex.assert_trees_all_close(dot_general(x, w, (((1,), (0,)), ((), ()))), x @ w)
    with pytest.raises(ValueError, match="dimension_numbers"):
        dot_general(x, x, (((1,), (1,)), ((), ())))


def test_rotary_scores_depend_on_distances_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(i, j):
        turned = [apply_rotary(a, *rotary_angles(jnp.array([p]), 16)) for a, p in ((q, i), (k, j))]
        return float(jnp.vdot(*turned))

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3
    assert score(0, 0) == pytest.approx(float(jnp.vdot(q, k)), abs=1e-5)
    with pytest.raises(ValueError, match="head_dim"):
        rotary_angles(jnp.arange(3), 5)


def test_logical_names_must_match_the_rank():
    assert logical_param(jnp.zeros((2, 3)), "embed", None).get_metadata()["out_sharding"] == ("embed", None)
    with pytest.raises(ValueError, match="names"):
        logical_param(jnp.zeros((2, 3)), "embed")
