"""Repair in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.moe.prism_compensation import capped_step, compensate_experts, compensate_shared
from jaxlib_icml.moe.prism_moe import DenseFFN, PrismConfig, split_ffn


def problem(tokens=400, hidden=12, width=6):
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (tokens, hidden))
    return h, jax.random.normal(keys[1], (tokens, width)), jax.random.normal(keys[2], (hidden, width))


def test_step_is_where_the_gradient_vanishes():
    h, missing, old = problem()
    step, length = capped_step(h, missing, old, 0.3, np.inf)
    a, b = np.asarray(h, np.float64), np.asarray(missing, np.float64)
    gram = a.T @ a
    gradient = (gram + 0.3 * np.diag(gram).mean() * np.eye(12)) @ np.asarray(step, np.float64) - a.T @ b
    assert np.abs(gradient).max() < 1e-5 * np.abs(a.T @ b).max()
    assert length == pytest.approx(np.linalg.norm(step) / np.linalg.norm(old), rel=1e-5)


def test_ridge_and_cap():
    h, missing, old = problem()
    assert capped_step(h, missing, old, 1e9, np.inf)[1] < 1e-8
    step, length = capped_step(h, missing, old, 1e-9, 0.01)
    assert length == pytest.approx(0.01, rel=1e-6)
    assert np.linalg.norm(step) == pytest.approx(0.01 * np.linalg.norm(old), rel=1e-5)
    with pytest.raises(ValueError, match="not finite"):
        capped_step(h.at[0, 0].set(jnp.nan), missing, old, 1.0, 1.0)


def parts(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    ffn = DenseFFN((jax.random.normal(keys[0], (8, 24)),), jax.random.normal(keys[1], (24, 8)))
    return ffn, split_ffn(ffn, jnp.arange(8), jnp.arange(8, 24).reshape(4, 4)), jax.random.normal(keys[2], (600, 8))


def output(split, x, indices, weights=None):
    outputs = jnp.stack([jax.tree.map(lambda m, e=e: m[e], split.experts)(x) for e in range(4)])
    chosen = jnp.take_along_axis(jnp.moveaxis(outputs, 0, 1), indices[..., None], axis=1)
    return split.shared(x) + (chosen if weights is None else weights[..., None] * chosen).sum(1)


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_said_to_be_missing_is_missing(weighted):
    ffn, split, x = parts()
    indices = jax.lax.top_k(jax.random.normal(jax.random.key(5), (600, 4)), 2)[1].astype(jnp.int32)
    weights = jax.random.uniform(jax.random.key(6), (600, 2)) if weighted else None
    config = PrismConfig(min_tokens=1)
    missing = ffn(x) - output(split, x, indices, weights)
    shared, left, first = compensate_shared(split.shared, x, missing, config)
    new, left, second = compensate_experts(split._replace(shared=shared), x, left, indices, config, weights)
    np.testing.assert_allclose(ffn(x) - output(new, x, indices, weights), left, atol=2e-4)
    assert first.before > first.after == pytest.approx(second.before, rel=1e-5)
    assert second.after < second.before
    assert first.relative_step[0] <= 0.05 + 1e-9
    assert np.all(second.relative_step[0] <= 0.02 + 1e-9)
    assert np.all(second.relative_step[1] <= 0.02 / 1.2 + 1e-9)


def test_without_ridge_and_cap_errors_never_grow():
    ffn, split, x = parts(1)
    indices = jax.lax.top_k(jax.random.normal(jax.random.key(5), (600, 4)), 1)[1].astype(jnp.int32)
    config = PrismConfig(min_tokens=1, expert_ridge=1e-9, expert_cap=1e9, shared_ridge=1e-9, shared_cap=1e9)
    missing = ffn(x) - output(split, x, indices)
    shared, left, first = compensate_shared(split.shared, x, missing, config)
    _, _, second = compensate_experts(split._replace(shared=shared), x, left, indices, config)
    assert first.before > first.after > second.after


def test_rare_experts_stay_as_they_are():
    ffn, split, x = parts()
    indices = jnp.where(jnp.arange(600) < 50, 0, 1)[:, None].astype(jnp.int32)
    missing = ffn(x) - output(split, x, indices)
    new, _, report = compensate_experts(split, x, missing, indices, PrismConfig(min_tokens=100))
    assert list(report.relative_step[0] > 0) == [False, True, False, False]
    np.testing.assert_array_equal(new.experts.down[0], split.experts.down[0])
    assert np.any(new.experts.down[1] != split.experts.down[1])
    for call in (compensate_shared, compensate_experts):
        args = (split.shared if call is compensate_shared else split, x[:0], missing[:0])
        with pytest.raises(ValueError, match="no tokens"):
            call(*args, *((indices[:0],) if call is compensate_experts else ()), PrismConfig())
