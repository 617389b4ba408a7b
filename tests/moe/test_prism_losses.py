"""What teaches a converted block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.moe.prism_losses import (
    dynamic_bias,
    information_density,
    neighbour_loss,
    output_distillation,
    prism_losses,
    reconstruction_scores,
    token_weights,
)


def problem(experts=5, tokens=30, width=7):
    keys = jax.random.split(jax.random.key(0), 4)
    outputs = jax.random.normal(keys[0], (experts, tokens, width))
    gap = jax.random.normal(keys[1], (tokens, width))
    logits = jax.random.normal(keys[2], (tokens, experts))
    return outputs, gap, logits, jax.random.uniform(keys[3], (tokens,))


def test_score_is_the_error_removed():
    outputs, gap, _, _ = problem()
    removed = np.sum(np.asarray(gap) ** 2, -1)[:, None] - np.sum((np.asarray(gap) - np.asarray(outputs)) ** 2, -1).T
    scores = reconstruction_scores(outputs, gap)
    np.testing.assert_allclose(scores, removed, atol=1e-5)
    best = np.argmin(np.sum((np.asarray(gap) - np.asarray(outputs)) ** 2, -1), axis=0)
    np.testing.assert_array_equal(jnp.argmax(scores, -1), best)


def test_density_and_weights():
    sure, unsure = jnp.array([50.0, 0, 0, 0]), jnp.zeros(4)
    np.testing.assert_allclose(information_density(jnp.stack([sure, unsure])), [0, 1], atol=1e-6)
    weights = token_weights(jnp.array([0.2, 0.6]))
    np.testing.assert_allclose(weights, [0.75, 1.25])
    np.testing.assert_array_equal(token_weights(jnp.array([0.2, 0.6]), 0.0), 1)
    with pytest.raises(ValueError, match="mixing"):
        token_weights(jnp.ones(2), 1.5)


def test_perfect_experts_leave_nothing_to_combine():
    outputs, _, logits, density = problem()
    indices = jax.lax.top_k(logits, 2)[1].astype(jnp.int32)
    chosen = jnp.take_along_axis(jnp.moveaxis(outputs, 0, 1), indices[..., None], axis=1).sum(1)
    losses = prism_losses(outputs, chosen, logits, indices, jnp.ones(indices.shape), density)
    assert float(losses.combination) < 1e-10
    assert float(losses.total()) > 0


def test_routing_is_taught_towards_the_best_expert_and_sharper_where_sure():
    outputs, gap, _, _ = problem()

    def loss(logits, density):
        indices = jnp.zeros((30, 1), jnp.int32)
        return prism_losses(outputs, gap, logits, indices, jnp.ones((30, 1)), density, mixing=0.0).routing

    learned = {}
    for u in (0.0, 1.0):
        logits = jnp.zeros((30, 5))
        step = jax.jit(jax.grad(loss))
        for _ in range(300):
            logits = logits - 20 * step(logits, jnp.full(30, u))
        learned[u] = jax.nn.softmax(logits)
    best = jnp.argmax(reconstruction_scores(outputs, gap), -1)
    for probs in learned.values():
        np.testing.assert_array_equal(jnp.argmax(probs, -1), best)
    assert np.all(learned[0.0].max(-1) > learned[1.0].max(-1))


def test_gradients_reach_router_and_experts_but_not_the_targets():
    outputs, gap, logits, density = problem()
    indices = jax.lax.top_k(logits, 2)[1].astype(jnp.int32)
    grads = jax.grad(
        lambda outputs, gap, logits: prism_losses(
            outputs, gap, logits, indices, jnp.ones(indices.shape), density
        ).total(),
        argnums=(0, 1, 2),
    )(outputs, gap, logits)
    assert float(jnp.abs(grads[1]).max()) == 0
    chosen = (indices[:, :, None] == jnp.arange(5)).any(1).T
    assert bool(jnp.all((jnp.abs(grads[0]).max(-1) > 0) == chosen))
    assert float(jnp.abs(grads[2]).max()) > 0


def test_balance_and_z():
    outputs, gap, _, density = problem()
    equal = prism_losses(outputs, gap, jnp.zeros((30, 5)), jnp.zeros((30, 1), jnp.int32), jnp.ones((30, 1)), density)
    assert float(equal.balance) == pytest.approx(0, abs=1e-6)
    assert float(equal.z) == pytest.approx(np.log(5) ** 2, rel=1e-5)
    crowded = jnp.zeros((30, 5)).at[:, 0].set(50.0)
    assert float(
        prism_losses(outputs, gap, crowded, jnp.zeros((30, 1), jnp.int32), jnp.ones((30, 1)), density).balance
    ) == pytest.approx(1, abs=1e-5)
    same = prism_losses(jnp.ones((5, 30, 7)), gap, crowded, jnp.zeros((30, 1), jnp.int32), jnp.ones((30, 1)), density)
    assert bool(jnp.isfinite(same.routing))


def test_neighbours():
    logits = jnp.array([[9.0, 0], [9.0, 0], [0, 9.0]])
    pairs = jnp.array([[0, 1], [1, 2]])
    flat = jnp.zeros(3)
    full = float(neighbour_loss(logits, flat, pairs))
    assert full == pytest.approx(1.0, abs=0.01)
    assert float(neighbour_loss(logits, flat, pairs, jnp.array([True, False]))) == pytest.approx(0, abs=1e-6)
    assert float(neighbour_loss(logits, jnp.array([0, 0, 1.0]), pairs)) == pytest.approx(0, abs=1e-6)


def test_distillation():
    teacher = jax.random.normal(jax.random.key(0), (4, 9))
    assert float(output_distillation(teacher, teacher)) == pytest.approx(0, abs=1e-6)
    student = jax.random.normal(jax.random.key(1), (4, 9))
    p, q = (np.asarray(jax.nn.softmax(x / 2), np.float64) for x in (teacher, student))
    expected = 4 * np.mean(np.sum(p * np.log(p / q), -1))
    assert float(output_distillation(student, teacher)) == pytest.approx(expected, rel=1e-4)
    assert float(jnp.abs(jax.grad(output_distillation, argnums=1)(student, teacher)).max()) == 0
    with pytest.raises(ValueError, match="temperature"):
        output_distillation(student, teacher, 0.0)


def test_dynamic_bias():
    moved = dynamic_bias(jnp.array([0.0, 0.0, 1.99]), jnp.array([90, 10, 0]), rate=1.0)
    np.testing.assert_allclose(moved, [-0.1, 0.1, 2.0], atol=1e-6)
