"""Where a TPU kernel may stand in a program, which is known only when the program is lowered.

A program for several platforms holds a branch for each. JAX lowers the operations of every branch for all of them, and
refuses a kernel on any but its own: `only_on` lowers a branch for its platform only. In a program that XLA partitions
over several TPUs JAX refuses kernels as well: `unless_partitioned` takes something else there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Array

_only_on = Primitive("only_on")
_only_on.multiple_results = True


def only_on(platform: str, function: Callable[..., list[Array]], *args: Array) -> list[Array]:
    """`function(*args)`, in a program that never runs it elsewhere than on `platform`.

    Derivatives and `vmap` belong outside of it.
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    return _only_on.bind(*args, jaxpr=jaxpr, platform=platform)


@_only_on.def_abstract_eval
def _(*args: Any, jaxpr: ClosedJaxpr, platform: str) -> list[Any]:
    del args, platform
    return jaxpr.out_avals


@_only_on.def_impl
def _(*args: Array, jaxpr: ClosedJaxpr, platform: str) -> list[Array]:
    del platform
    return jaxpr_as_fun(jaxpr)(*args)


def _lower(ctx: Any, *args: Any, jaxpr: ClosedJaxpr, platform: str) -> Any:
    ctx = ctx.replace(module_context=ctx.module_context.replace(platforms=(platform,)))
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


mlir.register_lowering(_only_on, _lower)


_unless_partitioned = Primitive("unless_partitioned")
_unless_partitioned.multiple_results = True


def unless_partitioned(kernel: Callable[..., Any], default: Callable[..., Any], *args: Array) -> Any:
    """`kernel(*args)`; in a program that XLA partitions over several devices `default(*args)`, of the same type.

    Derivatives and `vmap` belong outside of it.
    """
    jaxpr, shapes = jax.make_jaxpr(kernel, return_shape=True)(*args)
    results = _unless_partitioned.bind(*args, kernel=jaxpr, default=jax.make_jaxpr(default)(*args))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@_unless_partitioned.def_abstract_eval
def _(*args: Any, kernel: ClosedJaxpr, default: ClosedJaxpr) -> list[Any]:
    del args, default
    return kernel.out_avals


@_unless_partitioned.def_impl
def _(*args: Array, kernel: ClosedJaxpr, default: ClosedJaxpr) -> list[Array]:
    spread = any(len(x.devices()) > 1 for x in args)
    return jaxpr_as_fun(default if spread else kernel)(*args)


def _is_partitioned(axis_context: Any) -> bool:
    if hasattr(axis_context, "manual_axes"):  # inside `jax.shard_map`
        manual = set(axis_context.manual_axes) | set(axis_context.mesh.manual_axes)
        return manual != set(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", 1) > 1


def _lower_unless_partitioned(ctx: Any, *args: Any, kernel: ClosedJaxpr, default: ClosedJaxpr) -> Any:
    taken = default if _is_partitioned(ctx.module_context.axis_context) else kernel
    return mlir.lower_fun(jaxpr_as_fun(taken), multiple_results=True)(ctx, *args)


mlir.register_lowering(_unless_partitioned, _lower_unless_partitioned)
