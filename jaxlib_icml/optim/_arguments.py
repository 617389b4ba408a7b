"""Scalars that may be numbers, schedules or traced values, and their checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

ScalarOrSchedule = ArrayLike | Callable[[Any], Any]
Number = int | float


def scalar_at(value: ScalarOrSchedule, count: Int[Array, "*units"]) -> Float[Array, "*v"]:
    """The value, or the schedule's value at step `count`, in float32."""
    return jnp.asarray(value(count) if callable(value) else value, jnp.float32)


def check_range(name: str, value: Any, is_valid: Callable[[float], bool], allowed: str) -> None:
    """Raises ValueError if a concrete value is not valid; None, schedules and traced values pass."""
    number = concrete(value)
    if number is not None and not is_valid(number):
        raise ValueError(f"{name} must be {allowed}, got {number}")


def concrete(value: Any) -> float | None:
    """The value as a float, or None for None, schedules and traced values, which cannot be checked."""
    if value is None or callable(value):
        return None
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        return None
