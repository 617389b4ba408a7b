"""Choosing the implementation of an operation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar, get_args

import jax

Name: TypeAlias = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Implementation: TypeAlias = Name | Sequence[Name] | None

F = TypeVar("F", bound=Callable)


class UnsupportedError(NotImplementedError):
    """The implementation asked for cannot run this call on this platform."""


def choose(
    operation: str,
    implementation: Implementation,
    available: Mapping[str, F],
    default: F,
) -> F:
    """Returns the function that runs `operation`.

    Args:
      operation: Name used in error messages.
      implementation: None takes `default`; a name takes that implementation or fails; a sequence takes the
        first of its names that is available.
      available: Implementations that exist, by name.
      default: What None means on the present platform.

    Returns:
      One of the values of `available`, or `default`.

    Raises:
      ValueError: A name that no operation has, or an empty sequence.
      UnsupportedError: None of the names asked for is available.
    """
    if implementation is None:
        return default
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    allowed = get_args(Name)
    if not names or any(name not in allowed for name in names):
        raise ValueError(f"implementation must be None, one of {allowed} or a sequence of them, got {implementation!r}")
    for name in names:
        if name in available:
            return available[name]
    raise UnsupportedError(
        f"{operation} has no implementation {' or '.join(map(repr, names))} yet (running on "
        f"{jax.default_backend()}); available: {', '.join(map(repr, available))}"
    )
