"""The controller on a response with a known fixed point, schedules and the ladder against their definitions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.attention import CAPACITY_RATES, capacity_ladder, rate_controller, routing_temperature, sparsity_loss

TARGET = 0.2

# --- the controller


@functools.partial(jax.jit, static_argnames=("start", "steps"))
def simulate(start, steps):
    """Rates and multipliers where a model answers λ with the rate sigmoid(2 - λ), as it does at once."""
    init, update = rate_controller(TARGET)

    def step(state, _):
        rate = jax.nn.sigmoid(2 - state.multiplier)
        multiplier, state = update(rate, state)
        return state, (rate, multiplier)

    return jax.lax.scan(step, init(start), length=steps)[1]


@pytest.mark.parametrize(("start", "first"), [(0.0, 348), (5.0, 383)])
def test_controller_reaches_the_target_rate(start, first):
    rates, multipliers = simulate(start, 700)
    inside = np.abs(np.asarray(rates) - TARGET) <= 0.02
    # The rate seen by update n + 1 is the answer to λ after n updates.
    assert np.flatnonzero(inside)[0] == first
    assert inside[first:].all()
    assert inside[600]
    assert ((multipliers >= 0) & (multipliers <= 10)).all()
    expected, rate = start, []
    for _ in range(700):  # the recursion in plain numbers
        rate.append(1 / (1 + math.exp(expected - 2)))
        expected = min(max(expected + 0.05 * (rate[-1] - TARGET), 0.0), 10.0)
    np.testing.assert_allclose(rates, rate, atol=1e-4)
    assert expected == pytest.approx(2 + math.log(4), abs=0.1)


def test_controller_comes_down_from_its_bound_no_faster_than_eta_rho():
    rates, multipliers = simulate(10.0, 1200)
    assert np.min(np.diff(multipliers)) >= -0.05 * TARGET - 1e-6
    inside = np.flatnonzero(np.abs(np.asarray(rates) - TARGET) <= 0.02)
    assert 900 < inside[0] < 1200


def test_controller_stays_within_its_bounds():
    init, update = rate_controller(0.5, eta=1.0, lam_max=2.0)
    state = init()
    multipliers = []
    for rate in (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0):
        multiplier, state = update(jnp.float32(rate), state)
        multipliers.append(float(multiplier))
    assert multipliers == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 1.5]


def simulate_router(damping, eta, speed, steps=800):
    """The rate, in plain numbers, of a router whose logit moves at most `speed` an update, against a task's wish."""
    logit, wish, rates = math.log(9), 0.1, []
    init, update = rate_controller(TARGET, eta, damping=damping)
    update, state = jax.jit(update), init()
    for _ in range(steps):
        rate = 1 / (1 + math.exp(-logit))
        rates.append(rate)
        logit -= speed * min(1.0, max(-1.0, 20 * (float(state.price) - wish)))
        state = update(jnp.float32(rate), state)[1]
    return np.array(rates)


@pytest.mark.parametrize("speed", [0.02, 0.05])
def test_damping_keeps_a_router_that_follows_slowly_from_falling_below_its_target(speed):
    plain, damped = simulate_router(0.0, 0.05, speed), simulate_router(20.0, 0.01, speed)
    assert plain.min() < 0.5 * TARGET
    assert damped.min() > 0.8 * TARGET
    assert abs(damped[-100:].mean() - TARGET) < 0.03


def test_damped_price():
    init, update = rate_controller(TARGET, 0.1, lam_max=3.0, damping=5.0)
    state = init(1.0)
    for rate, multiplier, price in ((0.4, 1.02, 2.02), (0.0, 1.0, 0.0), (1.0, 1.08, 3.0)):
        given, state = update(jnp.float32(rate), state)
        assert float(state.multiplier) == pytest.approx(multiplier)
        assert float(given) == float(state.price) == pytest.approx(price)
    with pytest.raises(ValueError, match=r"^damping must"):
        rate_controller(0.2, damping=-1.0)


def test_controller_averages_layers_and_passes_no_gradient():
    init, update = rate_controller(TARGET)
    rates = jnp.array([0.9, 0.1, 0.5])
    multiplier, state = update(rates, init(1.0))
    assert float(multiplier) == pytest.approx(1 + 0.05 * (0.5 - TARGET))
    assert state.multiplier == multiplier
    assert not jax.grad(lambda rates: update(rates, init(1.0))[0])(rates).any()


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_rates_that_are_not_finite_leave_the_multiplier(rate):
    init, update = rate_controller(TARGET)
    assert update(jnp.array([0.5, rate]), init(1.5))[1].multiplier == 1.5


def test_sparsity_loss_is_linear_in_the_mean_probability():
    probs = jnp.array([0.5, 0.1, 0.9])
    loss, (by_prob, by_multiplier) = jax.value_and_grad(sparsity_loss, (0, 1))(probs, 3.0, TARGET)
    assert float(loss) == pytest.approx(3 * (0.5 - TARGET))
    np.testing.assert_allclose(by_prob, np.full(3, 1.0), rtol=1e-6)
    assert by_multiplier == 0


# --- noise


@pytest.mark.parametrize(("total", "anneal"), [(1000, 0.2), (10, 1.0), (7, 0.5)])
def test_temperature_is_one_then_falls_linearly_to_zero(total, anneal):
    steps = np.arange(total + 5)
    expected = np.clip((total - steps) / (anneal * total), 0, 1)
    np.testing.assert_allclose(jax.jit(routing_temperature(total, anneal))(steps), expected, atol=1e-6)
    np.testing.assert_allclose(expected[-5:], 0)


# --- capacity


def test_ladder_goes_down_one_rung_after_enough_calm_updates_and_never_up():
    init, update = capacity_ladder(patience=3)
    state, rates = init(), []
    layers = [[0.9, 0.2]] * 2 + [[0.6, 0.2]] * 2 + [[0.7, 0.2]] + [[0.3, 0.1]] * 12 + [[1.0, 1.0]] * 4
    for layer_rates in layers:
        rate, state = update(layer_rates, state)
        rates.append(rate)
    # The two updates at 0.6 are cut short by one at 0.7, which is not below 0.7; then three per rung down to 0.35,
    # as 0.3 is not below 0.25.
    assert rates == [1.0] * 7 + [0.7] * 3 + [0.5] * 3 + [0.35] * 8
    assert CAPACITY_RATES == (1.0, 0.7, 0.5, 0.35, 0.25)


def test_ladder_rests_on_its_last_rung():
    init, update = capacity_ladder((0.5, 0.4), patience=1)
    state = init()
    assert [(update(jnp.array([0.1]), state))[0], update([0.1], update([0.1], state)[1])[0]] == [0.4, 0.4]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rate_controller(0.0), "target"),
        (lambda: rate_controller(1.5), "target"),
        (lambda: rate_controller(0.2, eta=0.0), "eta"),
        (lambda: rate_controller(0.2, lam_max=math.inf), "lam_max"),
        (lambda: rate_controller(0.2).init(11.0), "multiplier"),
        (lambda: routing_temperature(0), "total_steps"),
        (lambda: routing_temperature(10, 0.0), "anneal"),
        (lambda: capacity_ladder(()), "rates"),
        (lambda: capacity_ladder((0.5, 0.5)), "rates"),
        (lambda: capacity_ladder((1.5, 0.5)), "rates"),
        (lambda: capacity_ladder(patience=0), "patience"),
        (lambda: capacity_ladder().update([math.nan], capacity_ladder().init()), "layer_rates"),
    ],
)
def test_arguments_out_of_range_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
