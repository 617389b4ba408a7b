"""Whole blocks: exact with all experts, close with a few."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.prism_convert import ConvertedFFN, convert_ffn, partition_units
from jaxlib_icml.moe.prism_moe import (
    PrismConfig,
    accumulate_stats,
    split_ffn,
    trajectory_profiles,
    trajectory_stats,
)
from tests.moe.prism_problems import dense, planted


@pytest.mark.slow
@pytest.mark.parametrize(("gated", "biases"), list(itertools.product((False, True), repeat=2)))
def test_all_experts_are_the_dense_block(gated, biases):
    ffn = dense(gated=gated, biases=biases)
    units = np.random.default_rng(0).permutation(64)
    x = jax.random.normal(jax.random.key(1), (20, 16))
    for shared, experts in ((16, 12), (0, 8), (32, 4)):
        split = split_ffn(ffn, jnp.asarray(units[:shared]), jnp.asarray(units[shared:].reshape(experts, -1)))
        router = jax.random.normal(jax.random.key(2), (16, experts))
        converted = ConvertedFFN(split, router, jnp.zeros(experts), ffn.down_bias)
        np.testing.assert_allclose(converted(x, experts), ffn(x), rtol=1e-5, atol=2e-5)
        sizes = [x.size for x in jax.tree.leaves(split)]
        assert sum(sizes) == sum(x.size for x in jax.tree.leaves(ffn)) - (16 if biases else 0)


def test_all_experts_are_the_dense_block_in_float64():
    with jax.enable_x64(True):
        ffn = jax.tree.map(lambda x: x.astype(jnp.float64), dense(gated=True))
        units = jnp.asarray(np.random.default_rng(1).permutation(64))
        split = split_ffn(ffn, units[:16], units[16:].reshape(12, 4))
        converted = ConvertedFFN(split, jnp.ones((16, 12)), jnp.zeros(12), None)
        x = jax.random.normal(jax.random.key(1), (20, 16), jnp.float64)
        assert float(jnp.abs(converted(x, 12) - ffn(x)).max()) < 1e-12


@pytest.mark.slow
def test_the_layer_computes_what_the_conversion_says():
    ffn = dense(gated=True)
    x = jax.random.normal(jax.random.key(3), (200, 16))
    units = jnp.arange(64)
    converted, _ = convert_ffn(ffn, units[:16], units[16:].reshape(6, 8), x, PrismConfig(num_experts=6))
    layer = SparseMoE(16, 8, 6, 2, gate="cosine", shared_expert_width=16, router_delta_width=4, rngs=nnx.Rngs(0))
    layer.router.kernel[...] = converted.router
    layer.expert_bias[...] = converted.bias
    for module, part in ((layer.experts, converted.split.experts), (layer.shared, converted.split.shared)):
        module.gate.kernel[...], module.up.kernel[...] = part.inputs
        module.down.kernel[...] = part.down
    np.testing.assert_allclose(layer(x)[0], converted(x, 2), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_example(seed):
    """What units do over the trajectory groups them better than importance or chance, and repair helps."""
    ffn, (x, kinds), (test, _) = planted(seed)
    config = PrismConfig(min_tokens=64)
    stats = accumulate_stats(trajectory_stats(128, 8), ffn.hidden(x), kinds)
    profiles, _ = trajectory_profiles(stats, ffn.down)
    importance = jnp.sum(jnp.expm1(profiles), axis=1)
    shared, groups = partition_units(ffn, importance, stats, config)
    rest = np.setdiff1d(np.arange(128), shared)
    contiguous = rest[np.argsort(-np.asarray(importance)[rest])].reshape(12, -1)
    random = np.random.default_rng(seed).permutation(rest).reshape(12, -1)
    want = ffn(test)

    def error(groups, **options):
        converted, report = convert_ffn(ffn, shared, jnp.asarray(groups), x, config, **options)
        assert report.error <= report.cut_error < report.shared_error
        return float(jnp.linalg.norm(converted(test, 2) - want) / jnp.linalg.norm(want)), converted

    cut, converted = error(groups, compensate=False)
    assert cut < error(contiguous, compensate=False)[0] - 0.05
    assert cut < error(random, compensate=False)[0] - 0.08
    assert error(groups)[0] < 0.92 * cut

    # An oracle that knows which experts are loudest.
    outputs = jax.lax.map(lambda expert: expert(test), converted.split.experts)
    loudest = jax.lax.top_k(jnp.linalg.norm(outputs, axis=-1).T, 2)[1]
    chosen = jnp.take_along_axis(jnp.moveaxis(outputs, 0, 1), loudest[..., None], axis=1).sum(1)
    oracle = float(jnp.linalg.norm(chosen + converted.split.shared(test) - want) / jnp.linalg.norm(want))
    assert cut < oracle + 0.03


def test_nothing_to_calibrate_on():
    with pytest.raises(ValueError, match="no tokens"):
        convert_ffn(dense(), jnp.arange(16), jnp.arange(16, 64).reshape(12, 4), jnp.zeros((0, 16)), PrismConfig())
    silent = dense()._replace(down=jnp.zeros((64, 16)))
    with pytest.raises(ValueError, match="puts out nothing"):
        convert_ffn(silent, jnp.arange(16), jnp.arange(16, 64).reshape(12, 4), jnp.ones((9, 16)), PrismConfig())
