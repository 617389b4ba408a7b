"""What every implementation of every operation must do, and TPU kernels checked for races on a CPU."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.spec import Spec

TOLERANCES: Mapping[str, tuple[float, float]] = {
    "float32": (1e-5, 2e-5),
    "bfloat16": (2e-2, 2e-2),
    "float16": (4e-3, 4e-3),
}
"""Of values and of gradients, relative to the largest entry, by dtype."""


def errors(spec: Spec, run: Callable[..., Any], *, seed: int = 0) -> dict[str, float]:
    """How far a computation is from the reference in float32.

    Args:
      spec: The case.
      run: Given the case's arrays and the cotangent of the output, the output and the gradients of
        `spec.gradients`: `spec.runs(implementation, gradient=True)`, or `interpreted(...)`.
      seed: Of the arrays.

    Returns:
      The largest difference over the largest entry: "value", and "gradient 0", ... by number of the array. nan where
      there is one.
    """
    arrays = spec.make(seed)
    out = jax.eval_shape(functools.partial(spec.call, implementation="reference"), *arrays)
    cotangent = jnp.asarray(np.random.default_rng(seed + 1).standard_normal(out.shape, np.float32), out.dtype)
    got = jax.jit(run)(*arrays, cotangent)
    want = jax.jit(spec.runs("reference", gradient=True))(*map(_wide, arrays), _wide(cotangent))
    names = ("value", *(f"gradient {i}" for i in spec.gradients))
    found = {}
    for name, a, b in zip(names, got, want, strict=False):
        a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (a, b))
        found[name] = float(np.abs(a - b).max() / max(np.abs(b).max(), 0.05))
    return found


def check(spec: Spec, run: Callable[..., Any], *, seed: int = 0) -> dict[str, float]:
    """`errors`, which must be within `TOLERANCES`.

    Raises:
      AssertionError: One is not, or is nan.
    """
    found = errors(spec, run, seed=seed)
    value, gradient = TOLERANCES[spec.dtype]
    for name, error in found.items():
        allowed = value if name == "value" else gradient
        assert error <= allowed, f"{spec.operation} [{spec.name}] {name}: relative error {error:.2e} > {allowed}"
    return found


def interpreted(spec: Spec, implementation: str, **options: Any) -> Callable[..., Any]:
    """The kernels of a case as `errors` takes them, with further arguments such as `interpret=`.

    Forward and backward kernels are called directly, so that the platform does not matter. Without a backward kernel
    only the output is given.

    Raises:
      ValueError: The kernels do not take this case.
    """
    passes = {p.name: functools.partial(p.function, **options) for p in spec.passes(implementation)}
    if not passes:
        raise ValueError(f"spec must be one that {implementation} takes, got {spec.operation} [{spec.name}]")

    def run(*args: Any) -> tuple[Any, ...]:
        *arrays, cotangent = args
        operands = spec.operands(*arrays)
        if "backward" not in passes:
            return (passes["forward"](*operands),)
        out, *residuals = passes["forward"](*operands)
        return out, *passes["backward"](*operands, out, *residuals, cotangent)

    return run


@contextmanager
def race_free() -> Iterator[pltpu.InterpretParams]:
    """Gives `interpret=` for TPU kernels that notices races, and memory read before it is written or out of bounds.

    Copies happen as late as the kernel allows, so one that is not waited for leaves nan behind.

    Raises:
      AssertionError: A kernel raced; newer versions of JAX raise where it happens.
      RuntimeError: This version of JAX does not say.
    """
    yield pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait", out_of_bounds_reads="raise"
    )
    assert not _races_found(), "the interpreter saw a race; it printed where"


def _races_found() -> bool:
    """Whether the last kernel that was interpreted raced: private to the interpreter."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = getattr(interpret_pallas_call, "races", None)
    found = getattr(races, "races_found", None)
    if found is None:
        raise RuntimeError("this version of JAX does not say whether an interpreted kernel raced, or none was run")
    return bool(found)


def _wide(x: Any) -> Any:
    is_narrow = x is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32) if is_narrow else x
