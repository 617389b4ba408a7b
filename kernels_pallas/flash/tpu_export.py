"""Lets `jax.export` to several platforms keep TPU kernels.

A program for several platforms holds a branch for each. JAX lowers the operations of every branch for all of them, and
refuses a kernel on any but its own; here a branch is lowered for its platform only.
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
