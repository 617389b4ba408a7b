"""Keeps loops over (batch, key head) local to the devices that hold them when `jit` partitions a program."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array

from kernels_pallas import dispatch


def partitioned(
    operation: Callable, operands: Sequence[str], results: Sequence[str], on_tpu: Callable | None = None
) -> Callable:
    """`operation`, run by every device on its own batch elements and heads.

    Without this the partitioner gathers all arrays of a loop that slices sharded axes. Axes other than batch
    and heads are gathered. With explicit sharding the same is done by `jax.shard_map`. Nothing changes on a
    single device or inside a `jax.shard_map`.

    Args:
      operation: Function of arrays, one for each entry of `operands`, to a tuple of arrays.
      operands: One letter per dimension of every operand: "b" is batch, "h" query heads, "g" key heads, "." a
        dimension that is not split. The first two operands are (batch, seq, heads, dim) queries and keys.
      results: The same for every result.
      on_tpu: What takes the place of `operation` in programs for TPUs; None: nothing does.

    Returns:
      A function with the signature of `operation`; vmap and differentiation belong outside of it.
    """
    wrapped = custom_partitioning(operation)

    def partition(mesh: jax.sharding.Mesh, arg_infos: Any, result_infos: Any) -> tuple:
        query, key = arg_infos[:2]
        batch = _evenly(mesh, query, 0)
        heads = _evenly(mesh, key, 2)  # query heads are split only together with the key heads they read
        split = {"b": batch, "h": heads, "g": heads}

        def sharding(dims: str) -> jax.sharding.NamedSharding:
            spec = jax.sharding.PartitionSpec(*(split.get(dim) for dim in dims))
            return jax.sharding.NamedSharding(mesh, spec)

        return mesh, operation, tuple(map(sharding, results)), tuple(map(sharding, operands))

    wrapped.def_partition(partition=partition, sharding_rule=_rule(operands, results))

    def call(*arrays: Array) -> Any:
        query, key = (jax.typeof(x).sharding for x in arrays[:2])
        explicit = _explicit_axes(query.mesh)
        if not explicit:
            if not dispatch.may_compile("pallas_tpu"):
                return wrapped(*arrays)
            # TPUs do not compile custom partitioning (jax-ml/jax#38196): XLA partitions the loops there as it can.
            return jax.lax.platform_dependent(*arrays, tpu=on_tpu or operation, default=wrapped)
        heads = key.spec[2] if key.spec[2] == query.spec[2] else None
        split = {"b": query.spec[0], "h": heads, "g": heads}
        specs = [jax.sharding.PartitionSpec(*map(split.get, dims)) for dims in (*operands, *results)]
        arrays = tuple(jax.sharding.reshard(x, spec) for x, spec in zip(arrays, specs, strict=False))
        in_specs, out_specs = tuple(specs[: len(operands)]), tuple(specs[len(operands) :])
        local = operation
        if on_tpu is not None:
            local = functools.partial(jax.lax.platform_dependent, tpu=on_tpu, default=operation)
        return jax.shard_map(local, axis_names=explicit, in_specs=in_specs, out_specs=out_specs)(*arrays)

    return call


def _explicit_axes(mesh: Any) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit}


def _evenly(mesh: jax.sharding.Mesh, info: Any, dim: int) -> Any:
    """The mesh axes that split dimension `dim` of an array, or None where they do not divide it."""
    spec = tuple(info.sharding.spec) if info.sharding is not None else ()
    axes = spec[dim] if dim < len(spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return axes if info.shape[dim] % math.prod(mesh.shape[name] for name in names) == 0 else None


def _rule(operands: Sequence[str], results: Sequence[str]) -> str:
    """The rule through which shardings spread: only the batch factor, and key heads among key-head arrays."""
    counter = itertools.count()

    def factors(dims: str) -> str:
        return " ".join(f"x{next(counter)}" if dim == "." else dim for dim in dims)

    return f"{', '.join(map(factors, operands))} -> {', '.join(map(factors, results))}"
