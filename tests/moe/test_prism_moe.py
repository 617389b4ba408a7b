"""Cutting a dense block into experts: exactness, statistics, grouping, routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.prism_moe import (
    PrismConfig,
    accumulate_stats,
    balance_bias,
    balanced_kmeans,
    expert_activity,
    fit_router,
    route_counts,
    select_shared,
    split_ffn,
    taylor_importance,
    trajectory_profiles,
    trajectory_stats,
    unit_features,
)
from tests.moe.prism_problems import dense


def test_active_share():
    assert PrismConfig().active_share == 0.375
    assert PrismConfig(num_active=8).active_share == 0.75
    assert PrismConfig().sizes(128) == (32, 8)


def test_every_unit_is_used_once():
    ffn = dense()
    with pytest.raises(ValueError, match="each of the 64 hidden units once"):
        split_ffn(ffn, jnp.arange(16), jnp.arange(15, 63).reshape(12, 4))
    with pytest.raises(ValueError, match="each of the 64 hidden units once"):
        split_ffn(ffn, jnp.arange(16), jnp.arange(16, 52).reshape(12, 3))


def test_importance_is_exact_for_a_linear_loss():
    """For a loss linear in every matrix entry, the change by removing a unit's row is known."""
    ffn = dense()
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), ffn)
    expected = np.abs(np.asarray(grads.inputs[0]) * np.asarray(ffn.inputs[0])).sum(0)
    expected += np.abs(np.asarray(grads.down) * np.asarray(ffn.down)).sum(1)
    np.testing.assert_allclose(taylor_importance([grads, grads], ffn), 2 * expected, rtol=1e-5)
    with pytest.raises(ValueError, match="no batches"):
        taylor_importance([], ffn)
    with pytest.raises(ValueError, match="not finite"):
        taylor_importance([jax.tree.map(lambda x: x * jnp.nan, grads)], ffn)


def test_a_unit_that_does_nothing_has_no_importance_and_is_not_shared():
    ffn = dense()
    ffn = ffn._replace(down=ffn.down.at[5].set(0))
    x = jax.random.normal(jax.random.key(1), (50, 16))

    def loss(ffn):
        return jnp.mean(jnp.sin(ffn(x)))

    grads = jax.grad(loss)(ffn)
    importance = taylor_importance([grads], ffn)
    assert float(importance[5]) == 0
    score = jnp.zeros(64).at[5].set(100.0)
    assert 5 not in select_shared(importance, score, 60).tolist()
    assert len(select_shared(importance, score, 64)) == 64


def test_selection_takes_the_best_scores_of_the_most_important():
    importance, score = jnp.array([9.0, 8, 7, 6, 1, 1]), jnp.array([0.0, 3, 2, 5, 9, 9])
    assert select_shared(importance, score, 2).tolist() == [1, 3]
    assert select_shared(importance, score, 2, 1.0).tolist() == [0, 1]
    assert select_shared(importance, score, 2, 3.0).tolist() == [4, 5]
    with pytest.raises(ValueError, match="n: must be at most 6"):
        select_shared(importance, score, 7)
    with pytest.raises(ValueError, match="multiplier"):
        select_shared(importance, score, 2, 0.5)


def test_profiles_against_numpy():
    ffn = dense()
    rng = np.random.default_rng(0)
    h, steps = rng.standard_normal((300, 64)), rng.integers(0, 3, 300)
    stats = trajectory_stats(64, 3)
    for part in np.array_split(np.arange(300), 4):
        stats = accumulate_stats(stats, jnp.asarray(h[part], jnp.float32), jnp.asarray(steps[part], jnp.int32))
    norms = (np.asarray(ffn.down, np.float64) ** 2).sum(1)
    energy = np.stack([(h[steps == s] ** 2).mean(0) for s in range(3)], axis=1) * norms[:, None]
    profiles, score = trajectory_profiles(stats, ffn.down)
    np.testing.assert_allclose(profiles, np.log1p(energy), rtol=1e-4)
    np.testing.assert_allclose(score, np.log1p(energy.sum(1)), rtol=1e-4)
    stability = trajectory_profiles(stats, ffn.down, "stability")[1]
    np.testing.assert_allclose(stability, np.abs(h).mean(0) / (np.abs(h).std(0) + 1e-6), rtol=1e-3)
    with pytest.raises(ValueError, match="no tokens"):
        trajectory_profiles(trajectory_stats(64, 3), ffn.down)
    with pytest.raises(ValueError, match="not finite"):
        trajectory_profiles(accumulate_stats(stats, jnp.full((1, 64), jnp.inf), jnp.zeros(1, jnp.int32)), ffn.down)
    with pytest.raises(ValueError, match="score"):
        trajectory_profiles(stats, ffn.down, "norm")


def test_features_have_two_blocks_of_known_length():
    ffn = dense(gated=True)
    features = unit_features(ffn.inputs, jax.random.uniform(jax.random.key(0), (64, 5)), 0.5, 1.0)
    assert features.shape == (64, 37)
    read, active = jnp.linalg.norm(features[:, :32], axis=1), jnp.linalg.norm(features[:, 32:], axis=1)
    np.testing.assert_allclose(active / read, 2, rtol=1e-5)
    np.testing.assert_allclose(read**2 + active**2, 1, rtol=1e-5)


def test_grouping_finds_planted_groups():
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.standard_normal((20, 12)))[0].T
    truth = np.repeat(np.arange(12), 10)
    points = centres[truth] + 0.05 * rng.standard_normal((120, 20))
    order = rng.permutation(120)
    features = jnp.asarray(points[order] / np.linalg.norm(points[order], axis=1, keepdims=True), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.5, 2, 120), jnp.float32)
    groups = balanced_kmeans(features, 12, weights)
    assert groups.shape == (12, 10)
    assert sorted(groups.ravel().tolist()) == list(range(120))
    assert all(len(set(truth[order[group]])) == 1 for group in np.asarray(groups))
    np.testing.assert_array_equal(groups, balanced_kmeans(features, 12, weights))


def test_restarts_are_never_worse_and_sizes_always_equal():
    rng = np.random.default_rng(1)
    features = rng.standard_normal((48, 6))
    features = jnp.asarray(features / np.linalg.norm(features, axis=1, keepdims=True), jnp.float32)
    weights = jnp.asarray(rng.uniform(0, 1, 48), jnp.float32)

    def quality(groups):
        return sum(float(jnp.linalg.norm((weights[g, None] * features[g]).sum(0))) for g in groups)

    one, many = (balanced_kmeans(features, 6, weights, restarts=n) for n in (1, 8))
    assert one.shape == many.shape == (6, 8)
    assert quality(many) >= quality(one) - 1e-4
    np.testing.assert_array_equal(np.sort(balanced_kmeans(features, 1, weights)[0]), np.arange(48))
    for options, message in (({"k": 5}, "do not divide"), ({"k": 6, "restarts": 0}, "restarts"), ({"k": 0}, "groups")):
        with pytest.raises(ValueError, match=message):
            balanced_kmeans(features, weights=weights, **options)
    with pytest.raises(ValueError, match="iterations"):
        balanced_kmeans(features, 6, weights, iterations=0)


def test_router_is_the_ridge_solution():
    ffn = dense()
    x = jax.random.normal(jax.random.key(1), (500, 16))
    h = ffn.hidden(x)
    groups = jnp.arange(64).reshape(8, 8)
    targets = np.asarray(expert_activity(h, ffn.down, groups), np.float64)
    np.testing.assert_allclose(targets.sum(1), 0, atol=1e-4)
    a = np.asarray(x, np.float64)
    gram = a.T @ a
    solution = np.linalg.solve(gram + 0.1 * np.diag(gram).mean() * np.eye(16), a.T @ targets)
    np.testing.assert_allclose(
        fit_router(x, h, ffn.down, groups, 0.1), solution / np.linalg.norm(solution, axis=0), atol=1e-4
    )
    for args, message in (
        ((x[:0], h[:0]), "no tokens"),
        ((x.at[0, 0].set(jnp.nan), h), "inputs are not finite"),
        ((x, h.at[0, 0].set(jnp.inf)), "activations are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_router(*args, ffn.down, groups)
    with pytest.raises(ValueError, match="ridge"):
        fit_router(x, h, ffn.down, groups, 0.0)


def test_one_step_of_balance():
    counts = jnp.array([500, 300, 200])
    step = 0.25 * (np.log(1 / 3 + 1e-3) - np.log(np.array([0.5, 0.3, 0.2]) + 1e-3))
    np.testing.assert_allclose(balance_bias(counts), step - step.mean(), rtol=1e-5)
    assert float(jnp.abs(balance_bias(jnp.array([10**6, 0, 0]), rate=50.0)).max()) == 2.0
    with pytest.raises(ValueError, match="nobody chose"):
        balance_bias(jnp.zeros(3))


def test_balance_converges_without_setbacks():
    logits = jax.random.normal(jax.random.key(0), (4000, 12)) + jnp.linspace(-0.5, 0.5, 12)
    bias, entropies = jnp.zeros(12), []
    for _ in range(20):
        counts = route_counts(logits, bias, 2)
        share = np.asarray(counts) / counts.sum()
        entropies.append(-np.sum(share * np.log(np.maximum(share, 1e-12))))
        bias = balance_bias(counts, bias)
    assert np.all(np.diff(entropies) > -1e-3)
    assert entropies[-1] >= 0.99 * np.log(12)


@pytest.mark.slow
def test_cosine_routing_sees_directions_only():
    layer = SparseMoE(16, 8, 6, 2, gate="cosine", router_delta_width=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (40, 16))
    before = layer.route(x)
    np.testing.assert_array_equal(layer.route(7.5 * x).indices, before.indices)
    layer.router.kernel[...] = layer.router.kernel[...] * jnp.linspace(0.1, 9, 6)
    np.testing.assert_array_equal(layer.route(x).indices, before.indices)
    # The correction starts as nothing, and learns.
    grad = nnx.grad(lambda layer: jnp.sum(layer.route(x).logits ** 2))(layer)
    assert float(jnp.abs(grad.router_delta.down.kernel[...]).max()) > 0
    layer.router_delta.down.kernel[...] += 1.0
    assert np.any(layer.route(x).logits != before.logits)
    layer.router_delta.scale[...] = jnp.zeros(())
    np.testing.assert_allclose(layer.route(x).logits, before.logits, atol=1e-5)
    with pytest.raises(ValueError, match="router_delta_width"):
        SparseMoE(16, 8, 6, 2, gate="softmax", router_delta_width=4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_ratio": 1.0}, "shared_ratio"),
        ({"num_active": 13}, "num_active"),
        ({"num_experts": 0}, "num_experts"),
        ({"score": "size"}, "score"),
        ({"candidate_multiplier": 0.5}, "candidate_multiplier"),
        ({"ridge": 0.0}, "ridge"),
        ({"balance_rate": -1.0}, "balance_rate"),
    ],
)
def test_bad_numbers(values, message):
    with pytest.raises(ValueError, match=message):
        PrismConfig(**values)


def test_units_that_do_not_divide():
    with pytest.raises(ValueError, match="45 hidden units beside 15 shared ones do not divide among 12"):
        PrismConfig().sizes(60)
