"""One set of rules for every attention operation: reverse mode, second derivatives, vmap and partitioned programs.

An implementation is two functions of arrays, `forward(query, key, value, *extras) -> (out, lse)` and
`backward(query, key, value, *extras, out, lse, grad_out) -> (dquery, dkey, dvalue)`. `lse`, the log-sum-exp of a row's
scores, is float32 of shape (batch, heads, rows) and `NOTHING` for a row that sees no key, whose output is zero. Extras
are integer arrays or None.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas import _compat, dispatch
from kernels_pallas.flash.sharding import partitioned
from kernels_pallas.flash.tpu_export import unless_partitioned

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a key out of sight: finite, so that a row of nothing else has no NaN."""

NOTHING = 0.7 * float(jnp.finfo(jnp.float32).max)
"""Log-sum-exp of a row that sees no key: exp(score - lse) is 0 for every score."""

_QUERY, _KEY, _LSE = "b.h.", "b.g.", "bh."


@functools.lru_cache(maxsize=512)
def attention(
    forward: "Callable[..., Any] | ByPlatform",
    backward: "Callable[..., Any] | ByPlatform",
    plain: Callable[..., Any],
    extras: tuple[str, ...],
    statics: tuple[tuple[str, Any], ...],
) -> Callable[..., Array]:
    """An attention operation with all its rules, as a function `(query, key, value, *extras) -> out`.

    Args:
      forward: See above; also takes `statics` by keyword.
      backward: See above; also takes `statics` by keyword.
      plain: `forward` in formulas that JAX can differentiate as often as it likes.
      extras: Dimensions of the further operands, named as in `partitioned`.
      statics: Names and values of what does not change between calls.

    Returns:
      The operation, jitted.
    """
    given = dict(statics)
    forward, backward = (bound(f, given) for f in (forward, backward))
    plain = functools.partial(plain, **given)
    operands = (_QUERY, _KEY, _KEY, *extras)
    number = len(operands)

    # Both passes may be loops that fill buffers, or kernels. Differentiating them once more takes the formulas.

    @jax.custom_jvp
    def forward_pass(*args):
        return _call(forward, operands, (_QUERY, _LSE), args)

    @forward_pass.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *qkv: plain(*qkv, *primals[3:]), primals[:3], tangents[:3])

    @jax.custom_jvp
    def backward_pass(*args):
        return _call(backward, (*operands, _QUERY, _LSE, _QUERY), (_QUERY, _KEY, _KEY), args)

    @backward_pass.defjvp
    def _(primals, tangents):
        def gradients(query, key, value, grad_out):  # recomputes out and lse: their tangents are not needed
            return jax.vjp(lambda *qkv: plain(*qkv, *primals[3:number])[0], query, key, value)[1](grad_out)

        return jax.jvp(gradients, (*primals[:3], primals[-1]), (*tangents[:3], tangents[-1]))

    @jax.custom_vjp
    def operation(*args):
        return forward_pass(*args)[0]

    def operation_fwd(*args):
        out, lse = forward_pass(*args)
        return out, (args, out, lse)

    def operation_bwd(residuals, grad_out):
        args, out, lse = residuals
        return (*backward_pass(*args, out, lse, grad_out), *(None for _ in extras))

    operation.defvjp(operation_fwd, operation_bwd)
    # Inside `jax.shard_map` gradients of what does not vary must be summed: the cast is outside of the rules.
    return jax.jit(lambda *args: operation(*_compat.same_varying(args)))


class ByPlatform(NamedTuple):
    """`kernels` by the platform that a program is compiled for ("tpu", "cuda"), `default` on every other."""

    default: Callable[..., Any]
    kernels: tuple[tuple[str, Callable[..., Any]], ...]


def bound(function: Callable[..., Any] | ByPlatform, statics: Mapping[str, Any]) -> Any:
    """`function` with these keyword arguments."""
    if not isinstance(function, ByPlatform):
        return functools.partial(function, **statics)
    kernels = tuple((platform, functools.partial(kernel, **statics)) for platform, kernel in function.kernels)
    return ByPlatform(functools.partial(function.default, **statics), kernels)


def _call(
    function: Callable[..., Any] | ByPlatform, operands: Sequence[str], results: Sequence[str], args: Sequence[Any]
) -> Any:
    """`function` with its vmap and sharding rules."""
    run, arrays = localized(function, operands, results, args)
    return _fold_vmap(run)(*arrays)


def localized(
    function: Callable[..., Any] | ByPlatform, operands: Sequence[str], results: Sequence[str], args: Sequence[Any]
) -> tuple[Callable[..., Any], list[Array]]:
    """`function` with its sharding rules, and its operands: the arguments that are not None.

    Args:
      function: Returns a tuple of arrays.
      operands: Dimensions of all arguments, named as in `partitioned`.
      results: Dimensions of the results.
      args: Arrays or None.

    Returns:
      A function of arrays, and those arrays.
    """
    given = [i for i, x in enumerate(args) if x is not None]

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays):
            full: list[Any] = [None] * len(args)
            for i, x in zip(given, arrays, strict=True):
                full[i] = x
            return function(*full)

        return call

    on_tpu: Callable[..., Any] | None = None
    if isinstance(function, ByPlatform):
        kernels: dict[str, Any] = {platform: of_arrays(kernel) for platform, kernel in function.kernels}
        operation = default = of_arrays(function.default)
        if "tpu" in kernels:  # XLA cannot partition a kernel
            on_tpu = functools.partial(unless_partitioned, kernels.pop("tpu"), default)
        if kernels:
            operation = lambda *arrays: jax.lax.platform_dependent(*arrays, default=default, **kernels)  # noqa: E731
    else:
        operation = of_arrays(function)
    dims = [operands[i] for i in given]
    return partitioned(operation, dims, results, on_tpu), [args[i] for i in given]


def _fold_vmap(operation: Callable) -> Callable:
    """Makes `vmap` of `operation` one call with a larger leading axis."""
    folded = jax.custom_batching.custom_vmap(operation)

    @folded.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        def fold(x, batched):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = _fold_vmap(operation)(*jax.tree.map(fold, args, tuple(in_batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return unfolded, jax.tree.map(lambda _: True, out)

    return folded


def choose(
    operation: str,
    implementation: dispatch.Implementation,
    unsupported: Callable[[ModuleType], str | None],
    extras: tuple[str, ...],
    **statics: Any,
) -> Callable[..., Array]:
    """The function that runs a call of an attention operation.

    Args:
      operation: Its folder, with modules `reference` (`forward`), `xla` and those of kernels (`forward`, `backward`).
      implementation: As users give it.
      unsupported: As for `dispatch.select`.
      extras: As for `attention`.
      **statics: What the passes take by keyword.

    Returns:
      A function `(query, key, value, *extras) -> out`.

    Raises:
      ValueError, UnsupportedError: As `dispatch.select`.
    """
    found = dispatch.select(operation, implementation, unsupported)
    plain = dispatch.module(operation, "reference").forward
    if found == "reference":  # JAX differentiates it, also in forward mode
        return lambda *args: plain(*args, **statics)[0]
    default = dispatch.module(operation, "xla")
    if isinstance(found, dict):
        kernels = sorted(found.items())
        forward = ByPlatform(default.forward, tuple((platform, module.forward) for platform, module in kernels))
        backward = ByPlatform(default.backward, tuple((platform, module.backward) for platform, module in kernels))
    else:
        chosen = dispatch.module(operation, found)
        forward, backward = chosen.forward, chosen.backward
    return attention(forward, backward, plain, extras, tuple(sorted(statics.items())))
