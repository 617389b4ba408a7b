"""Clipping baselines against a plain float64 transcription of their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlib_icml.optim import agc, scale_by_spam, value_clip, zclip


def zclip_float64(norms, alpha=0.97, z=2.5, warmup=25, eps=1e-6):
    """The clipped norms, following the definition with a list of warm-up norms."""
    seen, mean, var, out = [], None, None, []
    for norm in norms:
        if mean is None:
            seen.append(norm)
            out.append(norm)
            if len(seen) == warmup:
                mean, var = np.mean(seen), np.var(seen)
            continue
        score = (norm - mean) / (math.sqrt(var) + eps)
        clipped = mean + z * math.sqrt(var) / (score / z) if score > z else norm
        out.append(norm * clipped / (norm + eps) if score > z else norm)
        mean = alpha * mean + (1 - alpha) * clipped
        var = alpha * var + (1 - alpha) * (clipped - mean) ** 2
    return np.array(out)


def run(tx, norms, dtype=jnp.float32):
    """The norms that tx emits for gradients of the given norms, spread over two leaves."""
    direction = {"a": jnp.array([2.0, 1.0], dtype) / 3, "b": jnp.array([[2.0]], dtype) / 3}

    @jax.jit
    def scan(norms):
        def step(state, norm):
            out, state = tx.update(jax.tree.map(lambda d: (d * norm).astype(dtype), direction), state)
            assert all(x.dtype == dtype for x in jax.tree.leaves(out))
            return state, jnp.sqrt(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out)))

        return jax.lax.scan(step, tx.init(direction), norms)

    state, out = scan(jnp.asarray(norms, jnp.float32))
    return state, np.asarray(out, np.float64)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.9, "z": 1.5, "warmup": 5}, {"warmup": 1}])
def test_zclip_follows_its_definition(options):
    rng = np.random.default_rng(0)
    norms = rng.lognormal(0, 0.3, 150)
    norms[[60, 61, 100]] = [50.0, 20.0, 1e6]
    state, out = run(zclip(**options), norms)
    expected = zclip_float64(norms, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-3)
    assert out[100] < 10  # it clipped
    assert int(state.count) == 150


def test_zclip_ignores_non_finite_norms_and_survives_huge_ones():
    norms = np.ones(40) + 0.1 * np.sin(np.arange(40))
    with_bad = np.insert(norms, [10, 30], [np.nan, np.inf])
    state, out = run(zclip(), with_bad)
    clean_state, clean = run(zclip(), norms)
    np.testing.assert_allclose(np.delete(out, [10, 31]), clean, rtol=1e-6)
    np.testing.assert_allclose(state, clean_state, rtol=1e-6)
    _, out = run(zclip(), np.append(norms, 1e25))
    assert 0 < out[-1] < 2


def test_value_clip_and_agc_are_those_of_optax():
    grads = {"w": jnp.array([[0.05, -3.0], [0.2, 0.1]])}
    out, _ = value_clip().update(grads, value_clip().init(grads))
    np.testing.assert_array_equal(out["w"], np.clip(np.asarray(grads["w"]), -0.1, 0.1))
    assert agc is optax.adaptive_grad_clip


def spam_float64(gradients, b1, b2, eps, threshold, reset_every, warmup):
    """The updates, step by step."""
    out, m, v = [], np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for step, g in enumerate(gradients):
        since = step % reset_every
        if since == 0:
            m, v = 0 * m, 0 * v
        elif step:
            spikes = (v > 0) & (g**2 > threshold * v)
            g = np.where(spikes, np.sign(g) * np.sqrt(threshold * v), g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        update = (m / (1 - b1 ** (since + 1))) / (np.sqrt(v / (1 - b2 ** (since + 1))) + eps)
        if step >= reset_every and since + 1 < warmup:
            update = update * (1 - math.cos(math.pi * (since + 1) / warmup)) / 2
        out.append(update)
    return np.array(out)


@pytest.mark.parametrize(("reset_every", "warmup"), [(7, 3), (7, 0), (1000, 300), (1, 0)])
def test_spam_follows_its_definition(reset_every, warmup):
    gradients = np.random.default_rng(0).normal(size=(30, 4))
    gradients[:, 3] = 0.0
    gradients[[3, 18]] *= 1e3
    gradients[20, 3] = 2.0  # the first of its kind: nothing to compare it with
    options = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "threshold": 100.0, "reset_every": reset_every, "warmup": warmup}
    tx = scale_by_spam(**options)
    state = tx.init(jnp.zeros(4))
    _, out = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, jnp.asarray(gradients, jnp.float32))
    np.testing.assert_allclose(out, spam_float64(gradients, **options), rtol=2e-4, atol=1e-6)


def test_spam_without_spikes_and_resets_is_adam():
    ours, adam = scale_by_spam(threshold=math.inf, reset_every=10**6), optax.scale_by_adam()
    gradients = jax.random.normal(jax.random.key(0), (20, 3))
    results = [
        jax.lax.scan(lambda s, g, tx=tx: tx.update(g, s)[::-1], tx.init(jnp.zeros(3)), gradients)[1]
        for tx in (ours, adam)
    ]
    np.testing.assert_allclose(*results, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zclip(alpha=1.0), r"alpha must be in \[0, 1\), got 1.0"),
        (lambda: zclip(z=0.0), "z must be positive"),
        (lambda: zclip(warmup=0), "warmup must be at least 1"),
        (lambda: scale_by_spam(b2=1.0), r"b2 must be in \[0, 1\), got 1.0"),
        (lambda: scale_by_spam(threshold=0.0), "threshold must be positive"),
        (lambda: scale_by_spam(reset_every=10, warmup=10), "warmup must be at least 0 and below reset_every"),
        (lambda: scale_by_spam().init({"n": jnp.ones(2, jnp.int32)}), "int32 at n"),
        (lambda: value_clip(-1.0), "threshold must be positive"),
        (lambda: zclip().init({"n": jnp.ones(2, jnp.int32)}), "int32 at n"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
