"""Choosing the implementation of an operation."""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

import jax

Name: TypeAlias = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Implementation: TypeAlias = Name | Sequence[Name] | None

KERNELS: Mapping[str, tuple[str, str]] = {"pallas_tpu": ("tpu", "tpu"), "pallas_gpu": ("gpu", "cuda")}
"""Kernels by name: the backend they run on, and the platform that programs for it are compiled for."""


class UnsupportedError(NotImplementedError):
    """The implementation asked for cannot run this call on this platform."""


def module(operation: str, name: str) -> ModuleType:
    """The module of one implementation of an operation, imported where it is needed."""
    return importlib.import_module(f"kernels_pallas.{operation}.{name}")


def select(
    operation: str, implementation: Implementation, unsupported: Callable[[ModuleType], str | None]
) -> Name | dict[str, ModuleType]:
    """Returns what runs a call of `operation`.

    Args:
      operation: Its folder in this package.
      implementation: None for the kernels of every platform; a name takes that implementation or fails; a sequence
        takes the first of its names that can run.
      unsupported: Given a module of kernels, says why it cannot run this call, None if it can.

    Returns:
      For None, the modules of kernels that can run this call, by the platform that a program is compiled for ("xla" is
      for all others), see `for_every_platform`; else a name that can run here.

    Raises:
      ValueError: A name that no operation has, or an empty sequence.
      UnsupportedError: None of the names asked for can run this call here.
    """
    if implementation is None:
        found = {platform: module(operation, name) for name, (_, platform) in KERNELS.items() if may_compile(name)}
        return {
            platform: kernels
            for platform, kernels in found.items()
            if unsupported(kernels) is None and kernels.unsupported_device() is None
        }
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    allowed = get_args(Name)
    if not names or any(name not in allowed for name in names):
        raise ValueError(f"implementation must be None, one of {allowed} or a sequence of them, got {implementation!r}")
    reasons = {}
    for name in names:
        reasons[name] = _reason(operation, name, unsupported)
        if reasons[name] is None:
            return name
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(f"{operation} cannot run this call as {why}")


@contextlib.contextmanager
def for_every_platform() -> Iterator[None]:
    """Keeps the kernels of all platforms in programs traced in this context, for `jax.export` to other platforms.

    Otherwise a program has kernels for the platform it runs on, and for those whose compilers are installed
    (`kernels_pallas.aot`): tracing kernels that nothing can compile would only cost time.

    >>> with for_every_platform():
    ...     exported = jax.export.export(jax.jit(abs), platforms=("cpu", "tpu"))(1.0)
    """
    token = _EVERY_PLATFORM.set(True)
    try:
        yield
    finally:
        _EVERY_PLATFORM.reset(token)


_EVERY_PLATFORM: contextvars.ContextVar[bool] = contextvars.ContextVar("every_platform", default=False)


def may_compile(name: str) -> bool:
    """Whether programs that are traced now may be compiled for the platform of these kernels."""
    return jax.default_backend() == KERNELS[name][0] or _EVERY_PLATFORM.get() or _compiler_installed(name)


@functools.cache
def _compiler_installed(name: str) -> bool:
    from kernels_pallas import aot  # which imports this module

    return aot.missing({"pallas_tpu": "v5e", "pallas_gpu": "h100"}[name]) is None


def _reason(operation: str, name: Name, unsupported: Callable[[ModuleType], str | None]) -> str | None:
    if name not in KERNELS:
        return None
    backend = KERNELS[name][0]
    if jax.default_backend() != backend:
        return f"needs a {backend.upper()}, running on {jax.default_backend()}"
    kernels = module(operation, name)
    return unsupported(kernels) or kernels.unsupported_device()


def supported(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Which implementations can run a call on this platform.

    Args:
      operation: A public function of this package.
      *args: Its arrays, or anything with shape and dtype.
      **kwargs: Its other arguments.

    Returns:
      For every name None, or why it cannot run the call.

    Raises:
      ValueError: Arguments that no implementation takes.

    >>> from kernels_pallas import symmetric_product
    >>> supported(symmetric_product, jax.ShapeDtypeStruct((8, 8), "float32"))["xla"] is None
    True
    """
    reasons: dict[str, str | None] = {}
    for name in get_args(Name):
        try:
            jax.eval_shape(functools.partial(operation, **kwargs, implementation=name), *args)
            reasons[name] = None
        except UnsupportedError as error:
            reasons[name] = str(error)
    return reasons
