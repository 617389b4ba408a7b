"""Mean-field predictions against simulations of the layer."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from jaxlib_icml.moe import (
    UNIT_CONSTANTS,
    BaseSpec,
    MoEShape,
    SparseMoE,
    advise,
    alpha_star,
    init_params,
    init_stream_variance,
    rules,
    selection_threshold,
)
from jaxlib_icml.moe.mean_field import gate_moment

SHAPE = MoEShape(width=256, num_layers=2, expert_width=512, num_experts=4, num_active=1)


@pytest.mark.parametrize(("kappa", "value"), [(1 / 4, 0.66251), (1 / 8, 0.75957), (1 / 12, 0.79947)])
def test_threshold_in_closed_form(kappa, value):
    assert selection_threshold(kappa, 0.5) == pytest.approx(value, abs=5e-6)
    assert selection_threshold(kappa, 1.0) == 0.5


def test_threshold_with_selection_biases():
    rng = np.random.default_rng(0)
    gates = 1 / (1 + np.exp(-rng.standard_normal(400_000)))
    for std in (0.05, 0.5, 3.0):
        scores = gates + std * rng.standard_normal(gates.size)
        assert selection_threshold(0.25, 0.5, std) == pytest.approx(np.quantile(scores, 0.75), abs=0.01 * (1 + std))


def test_gate_moment_against_sampling():
    z = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    for gamma, width in ((0.5, None), (0.75, 64)):
        std = 1.0 if width is None else width ** (0.5 - gamma)
        selected = 1 / (1 + np.exp(-std * z[int(0.75 * z.size) :]))
        assert gate_moment(0.25, gamma, width=width) == pytest.approx(np.mean(selected**2), rel=1e-3)


def largest_gates(experts, draws, width=256):
    """The a-th largest of `experts` gates of one unit-RMS token, κ = 1/4, γ = 1/2."""

    def one(key):
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (width,))
        x = x / jnp.sqrt(jnp.mean(x**2))
        gates = jax.nn.sigmoid(x @ jax.random.normal(keys[1], (width, experts)) * width**-0.5)
        return jax.lax.top_k(gates, experts // 4)[0][-1]

    return np.asarray(jax.lax.map(one, jax.random.split(jax.random.key(experts), draws)))


@pytest.mark.slow
def test_selection_becomes_a_threshold():
    assert largest_gates(4096, 20).mean() == pytest.approx(selection_threshold(1 / 4), abs=0.006)
    experts = np.array([64, 256, 1024, 4096])
    spread = [largest_gates(int(n), 100).std() for n in experts]
    assert np.polyfit(np.log(experts), np.log(spread), 1)[0] == pytest.approx(-0.5, abs=0.12)


def measured_variance(shape, draws=24, seed=0):
    """Variance of h_L - h_0 per coordinate and the selected gates' second moment, over draws of tokens and weights."""
    base = BaseSpec(shape, constants=UNIT_CONSTANTS)
    branch = rules(base, shape)["expert_down"].fwd_mult
    layer = SparseMoE(
        shape.width,
        shape.expert_width,
        shape.num_experts,
        shape.num_active,
        gate="sigmoid",
        activation="gelu",
        path="dense",
        rngs=nnx.Rngs(0),
    )
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def one(key):
        start = h = jax.random.normal(jax.random.fold_in(key, 0), (4, shape.width))
        moments = []
        for i in range(shape.num_layers):
            made = init_params(params, jax.random.fold_in(key, i + 1), base, shape)
            x = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True))
            model = nnx.merge(graphdef, made, rest)
            h = h + branch * model(x)[0]
            moments.append(jnp.mean((model.route(x).weights * shape.num_active) ** 2))
        return jnp.mean((h - start) ** 2), jnp.mean(jnp.array(moments))

    found = np.array([one(jax.random.fold_in(jax.random.key(seed), i)) for i in range(draws)])
    return found.mean(axis=0)


GELU_MOMENT = float(np.mean(jax.nn.gelu(stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000)) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "sizes", "slope", "tolerance"),
    [
        ("num_layers", (1, 2, 4, 8), -1, 0.08),
        ("num_active", (1, 2, 4, 8), -1, 0.08),
        ("expert_width", (256, 512, 1024, 2048), -1, 0.08),
        ("width", (64, 128, 256), 0, 0.1),
    ],
)
def test_stream_variance_scales_as_predicted(field, sizes, slope, tolerance):
    found = []
    for size in sizes:
        with_it = {"num_active": {"num_experts": 4 * size}, "width": {"expert_width": 2 * size}}.get(field, {})
        shape = dataclasses.replace(SHAPE, **{field: size}, **with_it)
        variance, moment = measured_variance(shape)
        found.append(variance)
        if shape.width >= 256:
            exact = GELU_MOMENT * moment / (shape.num_layers * shape.num_active * shape.alpha)
            assert variance == pytest.approx(exact, rel=0.12)
            base = BaseSpec(shape, constants=UNIT_CONSTANTS)
            assert init_stream_variance(base, shape) == pytest.approx(variance, rel=0.12)
    assert np.polyfit(np.log(sizes), np.log(found), 1)[0] == pytest.approx(slope, abs=tolerance)


def test_large_width_constant_of_relu():
    wide = dataclasses.replace(SHAPE, width=64_000, expert_width=128_000)
    base = BaseSpec(SHAPE, constants=UNIT_CONSTANTS)
    expected = 1 / (8 * wide.num_layers * wide.num_active * wide.alpha)
    assert init_stream_variance(base, wide, activation="relu") == pytest.approx(expected, rel=0.02)
    assert init_stream_variance(BaseSpec(SHAPE), wide, activation="relu") == pytest.approx(expected / 16, rel=0.02)


@pytest.mark.slow
def test_equal_alpha_star_means_equal_spread():
    one = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=16, num_active=4)
    other = dataclasses.replace(one, num_layers=4, num_experts=8, num_active=2)
    assert alpha_star(one) == alpha_star(other) == 1 / 64
    assert measured_variance(one, 48)[0] == pytest.approx(measured_variance(other, 48)[0], rel=0.1)


def test_advice():
    base = BaseSpec(SHAPE)
    assert advise(base, SHAPE).warnings == ()
    narrow = dataclasses.replace(SHAPE, expert_width=256)
    assert "target model has alpha = 1" in advise(base, narrow).warnings[0]
    other = advise(base, dataclasses.replace(SHAPE, num_experts=8))
    assert "kappa" in other.warnings[0]
    assert math.isnan(other.init_variance[0])
    assert any("alpha*" in text for text in advise(BaseSpec(dataclasses.replace(SHAPE, num_layers=16)), SHAPE).warnings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selection_threshold(0.0), "kappa"),
        (lambda: selection_threshold(0.5, 0.4), "gamma"),
        (lambda: selection_threshold(0.5, 0.5, -1.0), "bias_std"),
        (lambda: init_stream_variance(BaseSpec(SHAPE), SHAPE, activation="tanh"), "activation"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
