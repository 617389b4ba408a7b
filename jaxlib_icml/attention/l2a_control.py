"""What steers L2A: the price of global attention, exploration, capacity, and which layers can do without it.

"Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

__all__ = [
    "CAPACITY_RATES",
    "CapacityLadder",
    "CapacityLadderState",
    "RateController",
    "RateControllerState",
    "capacity_ladder",
    "rate_controller",
    "routing_temperature",
    "sparsity_loss",
]

CAPACITY_RATES = (1.0, 0.7, 0.5, 0.35, 0.25)
"""Values of `L2AConfig.capacity_rate` that a training goes through."""


class RateControllerState(NamedTuple):
    """State of `rate_controller`.

    Attributes:
      multiplier: λ, float32.
      price: what routing costs until the next update: λ, and more or less of it where there is damping.
    """

    multiplier: Float[Array, ""]
    price: Float[Array, ""]


class RateController(NamedTuple):
    """A pair of functions, as in Optax.

    Attributes:
      init: `(multiplier=0.0) -> state`.
      update: `(rate, state) -> (price, state)`; `rate` is ρ̂_hard, one number or one per layer.
    """

    init: Callable[..., RateControllerState]
    update: Callable[[Array, RateControllerState], tuple[Array, RateControllerState]]


def rate_controller(target: float, eta: float = 0.05, lam_max: float = 10.0, damping: float = 0.0) -> RateController:
    """Dual ascent on the mean routing rate: λ ← clip(λ + η (ρ̂_hard - ρ), 0, λ_max).

    The rate is averaged over layers, so that layers are free to specialise; one that is not finite leaves λ as it is.
    Pure, for use inside `jit`; no gradient passes.

    Routers follow the price with a delay. λ rises by up to η (1 - ρ) but falls by at most η ρ an update, so it goes on
    pushing the rate down long after it has passed its target. With `damping` κ the price is that of an augmented
    Lagrangian, clip(λ + κ (ρ̂_hard - ρ), 0, λ_max), which vanishes at once where the rate is below target. Keep κ small
    beside the gain of routing: optimizers that normalise gradients shut routers that see little but the price.

    Args:
      target: ρ, the rate aimed at, above 0 and at most 1.
      eta: η, step per update.
      lam_max: largest λ, and largest price.
      damping: κ, at least 0; 0 is plain dual ascent.

    Returns:
      `init` and `update`; λ starts at 0 unless `init` is given another value in [0, lam_max].

    Raises:
      ValueError: a number out of range.

    >>> init, update = rate_controller(0.2)
    >>> price, state = update(jnp.array([1.0, 0.6]), init())
    >>> round(float(price), 6)
    0.03
    """
    if not 0 < target <= 1:
        raise ValueError(f"target must be above 0 and at most 1, got {target}")
    for name, value in (("eta", eta), ("lam_max", lam_max)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be at least 0 and finite, got {damping}")

    def init(multiplier: float = 0.0) -> RateControllerState:
        if not 0 <= multiplier <= lam_max:
            raise ValueError(f"multiplier must be between 0 and lam_max = {lam_max}, got {multiplier}")
        multiplier_array = jnp.asarray(multiplier, jnp.float32)
        return RateControllerState(multiplier_array, multiplier_array)

    def update(rate: Array, state: RateControllerState) -> tuple[Array, RateControllerState]:
        excess = jax.lax.stop_gradient(jnp.mean(jnp.asarray(rate, jnp.float32))) - target
        raised = jnp.clip(state.multiplier + eta * excess, 0.0, lam_max)
        price = jnp.clip(raised + damping * excess, 0.0, lam_max)
        known = jnp.isfinite(excess)
        new = RateControllerState(jnp.where(known, raised, state.multiplier), jnp.where(known, price, state.price))
        return new.price, new

    return RateController(init, update)


def sparsity_loss(
    prob_mean: Float[Array, "*layers"], multiplier: float | Float[Array, ""], target: float
) -> Float[Array, ""]:
    """L_sparse = λ (ρ̂ - ρ), to be added to the training loss.

    Args:
      prob_mean: `L2AAux.prob_mean`, of one layer or of all.
      multiplier: λ, the price of `rate_controller`; constant for the gradient.
      target: ρ.

    Returns:
      A scalar, differentiable in `prob_mean`.

    >>> round(float(sparsity_loss(jnp.array([0.5, 0.3]), 2.0, 0.2)), 6)
    0.4
    """
    return jax.lax.stop_gradient(multiplier) * (jnp.mean(prob_mean) - target)


def routing_temperature(total_steps: int, anneal: float = 0.2) -> Callable[[ArrayLike], Array]:
    """Schedule of the noise's temperature τ: 1, then linearly to 0 over the last steps.

    Args:
      total_steps: Steps of the training.
      anneal: Fraction of them, at the end, in which τ falls; above 0 and at most 1.

    Returns:
      A function of the step, as Optax's schedules; 0 from `total_steps` on.

    Raises:
      ValueError: a number out of range.

    >>> schedule = routing_temperature(100)
    >>> [round(float(schedule(step)), 3) for step in (0, 80, 90, 100)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 < anneal <= 1:
        raise ValueError(f"anneal must be above 0 and at most 1, got {anneal}")

    def schedule(step: ArrayLike) -> Array:
        return jnp.clip((total_steps - jnp.asarray(step, jnp.float32)) / (anneal * total_steps), 0.0, 1.0)

    return schedule


class CapacityLadderState(NamedTuple):
    """State of `capacity_ladder`, plain numbers of the host.

    Attributes:
      rung: Index of the present rate.
      calm: Consecutive updates in which every layer was below the next one.
    """

    rung: int
    calm: int


class CapacityLadder(NamedTuple):
    """A pair of functions.

    Attributes:
      init: `() -> state`.
      update: `(layer_rates, state) -> (capacity_rate, state)`.
    """

    init: Callable[[], CapacityLadderState]
    update: Callable[[Array | Sequence[float], CapacityLadderState], tuple[float, CapacityLadderState]]


def capacity_ladder(rates: Sequence[float] = CAPACITY_RATES, patience: int = 100) -> CapacityLadder:
    """Lowers the capacity rate once every layer's ρ̂_hard has stayed below the next value.

    For the host: the rate is static, so each change costs a compilation. It never rises again.

    Args:
      rates: Descending values in (0, 1].
      patience: Consecutive updates below the next value before it is taken.

    Returns:
      `init` and `update`, which returns the rate to use from now on.

    Raises:
      ValueError: rates that do not descend or are out of range, `patience` below 1, or layer rates that are not finite.

    >>> init, update = capacity_ladder(patience=2)
    >>> rate, state = update([0.9, 0.1], init())
    >>> rate, state = update([0.4, 0.1], state)
    >>> rate, state = update([0.4, 0.1], state)
    >>> rate
    0.7
    """
    rungs = tuple(float(rate) for rate in rates)
    if not rungs or not all(0 < rate <= 1 for rate in rungs) or any(np.diff(rungs) >= 0):
        raise ValueError(f"rates must be descending values above 0 and at most 1, got {rates}")
    if patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience}")

    def init() -> CapacityLadderState:
        return CapacityLadderState(0, 0)

    def update(layer_rates: Array | Sequence[float], state: CapacityLadderState) -> tuple[float, CapacityLadderState]:
        busiest = float(np.max(np.asarray(layer_rates, np.float64)))
        if not math.isfinite(busiest):
            raise ValueError(f"layer_rates must be finite, got {layer_rates}")
        rung, calm = state
        calm = calm + 1 if rung + 1 < len(rungs) and busiest < rungs[rung + 1] else 0
        if calm >= patience:
            rung, calm = rung + 1, 0
        return rungs[rung], CapacityLadderState(rung, calm)

    return CapacityLadder(init, update)
