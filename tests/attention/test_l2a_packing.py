"""Decisions and their packing: `route` and `pack_routed` of `l2a`."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.attention import L2AConfig, pack_routed, rate_controller, route

pack = jax.jit(pack_routed, static_argnames=("capacity", "overflow", "train"))
SEQ = 12


@st.composite
def masks(draw):
    rows = st.lists(st.booleans(), min_size=SEQ, max_size=SEQ)
    return np.array(draw(st.tuples(rows, rows)))


# --- packing


@settings(deadline=None, max_examples=60)
@given(masks(), st.sampled_from([1, 5, SEQ, SEQ + 3]))
def test_drop_late_keeps_the_first_routed_positions(mask, capacity):
    idx, n_routed, n_overflow = pack(mask, capacity)
    assert idx.dtype == jnp.int32
    for row, positions, kept, dropped in zip(mask, idx, n_routed, n_overflow, strict=True):
        wanted = np.flatnonzero(row)[:capacity]
        assert positions.tolist() == [*wanted.tolist(), *[SEQ] * (capacity - len(wanted))]
        assert (kept, dropped) == (len(wanted), row.sum() - len(wanted))


@settings(deadline=None, max_examples=60)
@given(
    masks(),
    st.sampled_from([1, 5, SEQ, SEQ + 3]),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=2 * SEQ, max_size=2 * SEQ),
)
def test_topk_keeps_the_most_probable_ones_in_order(mask, capacity, prob):
    prob = np.array(prob, np.float32).reshape(2, SEQ)
    idx, n_routed, n_overflow = pack(mask, capacity, prob=prob, overflow="topk", train=True)
    for row, p, positions, kept, dropped in zip(mask, prob, idx, n_routed, n_overflow, strict=True):
        ranked = sorted(np.flatnonzero(row).tolist(), key=lambda t, p=p: (-p[t], t))[:capacity]
        assert positions.tolist() == [*sorted(ranked), *[SEQ] * (capacity - len(ranked))]
        assert (kept, dropped) == (len(ranked), row.sum() - len(ranked))


@settings(deadline=None, max_examples=30)
@given(masks(), masks(), st.integers(0, SEQ))
def test_the_fate_of_a_token_depends_on_earlier_ones_only(mask, other, cut):
    changed = np.where(np.arange(SEQ) < cut, mask, other)
    kept = [[{t for t in row.tolist() if t < cut} for row in pack(m, 5)[0]] for m in (mask, changed)]
    assert kept[0] == kept[1]


def test_packing_under_vmap_is_packing_each():
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, (3, 2, SEQ))
    together = jax.vmap(functools.partial(pack, capacity=5))(mask)
    for i in range(3):
        for one, all_of_them in zip(pack(mask[i], 5), together, strict=True):
            np.testing.assert_array_equal(one, all_of_them[i])


# --- decisions


@pytest.mark.parametrize("threshold", [0.5, 0.1, 0.95])
def test_without_noise_the_probability_is_compared_with_the_threshold(threshold):
    logits = 3 * jax.random.normal(jax.random.key(0), (4, 200))
    mask, prob = route(logits, threshold=threshold)
    expected = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    assert mask.tolist() == (expected >= threshold).tolist()
    np.testing.assert_allclose(prob, expected, rtol=1e-5)


def test_the_threshold_itself_is_routed():
    assert route(jnp.zeros((1, 1))).mask.all()


@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_noise_of_temperature_one_routes_with_the_probability_of_the_shifted_logit(threshold):
    # P(z + ℓ ≥ logit θ) = sigmoid(z - logit θ) for logistic ℓ; p itself at θ = 1/2.
    number = 40_000
    for z in (-2.0, 0.0, 1.5):
        mask, _ = route(jnp.full((1, number), z), key=jax.random.key(3), temperature=1.0, threshold=threshold)
        p = 1 / (1 + math.exp(-(z - math.log(threshold / (1 - threshold)))))
        assert abs(float(mask.mean()) - p) < 5 * math.sqrt(p * (1 - p) / number)


def test_a_traced_temperature_of_zero_is_noiseless():
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    noisy = jax.jit(lambda logits, t: route(logits, key=jax.random.key(1), temperature=t).mask)
    np.testing.assert_array_equal(noisy(logits, 0.0), route(logits).mask)
    assert (noisy(logits, 1.0) != route(logits).mask).any()


def test_half_precision_logits_are_decided_in_float32():
    mask, prob = route(jnp.array([[0.3, -0.3]], jnp.bfloat16))
    assert prob.dtype == jnp.float32
    np.testing.assert_allclose(prob, jax.nn.sigmoid(jnp.bfloat16([[0.3, -0.3]]).astype("float32")), rtol=1e-6)
    assert mask.tolist() == [[True, False]]


def test_gradients_reach_the_probability_and_not_the_mask():
    z = jnp.array([[0.3, -1.2]])
    grad = jax.grad(lambda z: jnp.sum(route(z, key=jax.random.key(0), temperature=1.0).prob))(z)
    p = 1 / (1 + np.exp(-np.asarray(z, np.float64)))
    np.testing.assert_allclose(grad, p * (1 - p), rtol=1e-5)
    assert not jax.grad(lambda z: jnp.sum(route(z).mask.astype(float)))(z).any()


def test_the_controller_reaches_a_stochastic_target():
    # Logits are all the loss's to move: with noise, the rate of the mask follows the mean probability.
    init, update = rate_controller(L2AConfig(window=4).target_rate, eta=0.2)

    def step(carry, key):
        z, state = carry
        mask, _ = route(z, key=key, temperature=1.0)
        multiplier, state = update(mask.mean(), state)
        p = jax.nn.sigmoid(z)
        return (z - 2.0 * multiplier * p * (1 - p) + 0.05 * (1 - p), state), mask.mean()

    start = (jnp.full((4, 256), 2.0), init())
    rates = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), 3000))[1]
    assert float(rates[-500:].mean()) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: route(jnp.zeros((1, 2)), temperature=1.0), "key"),
        (lambda: jax.jit(lambda t: route(jnp.zeros((1, 2)), temperature=t))(0.0), "key"),
        (lambda: route(jnp.zeros((1, 2)), temperature=-1.0, key=jax.random.key(0)), "temperature"),
        (lambda: route(jnp.zeros((1, 2)), temperature=math.nan, key=jax.random.key(0)), "temperature"),
        (lambda: route(jnp.zeros((1, 2)), threshold=1.0), "threshold"),
        (lambda: pack_routed(jnp.ones((1, 2), bool), 0), "capacity"),
        (lambda: pack_routed(jnp.ones((1, 2), bool), 1, overflow="topk"), "causality"),
        (lambda: pack_routed(jnp.ones((1, 2), bool), 1, overflow="topk", train=True), "prob"),
        (lambda: pack_routed(jnp.ones((1, 2), bool), 1, overflow="first"), "overflow"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
