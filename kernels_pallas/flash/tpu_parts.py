"""Pieces of the TPU kernels of attention: operands, columns and rows of registers, products, masks."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from kernels_pallas import _compat
from kernels_pallas.flash.tpu_blocks import LANES, Gathered, Plan, Slice, both, iota
from kernels_pallas.flash.tpu_export import only_on

# It moved between the versions of JAX that are supported.
_approximate = pltpu.reciprocal if hasattr(pltpu, "reciprocal") else pl.reciprocal

MASKED = -1e30
"""Score of a key out of sight."""


class Operands:
    """Inputs, outputs and scratch of a kernel by name; the kernel sees them as attributes.

    The grid is (batch, key heads, outer blocks, query heads of a key head, steps).
    """

    def __init__(self, plan: Plan, limits: Array | None):
        self.plan = plan
        self.scalars = [] if limits is None else [limits]
        self._inputs: dict[str, tuple[Array, pl.BlockSpec]] = {}
        self._outputs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]] = {}
        self._scratch: dict[str, Any] = {}

    def outer(self, name: str, array: Array, size: int, head: Callable[[Any, Any], Any], axis: int = 2) -> None:
        """The outer block of an array (batch, heads, ...), `size` indices of `axis`; `head` of (key head, member)."""
        self._inputs[name] = array, self._outer_spec(array.shape, size, head, axis)

    def output(self, name: str, shape: Any, size: int, head: Callable[[Any, Any], Any], axis: int = 2) -> None:
        self._outputs[name] = shape, self._outer_spec(shape.shape, size, head, axis)

    def _outer_spec(self, shape: tuple[int, ...], size: int, head: Callable, axis: int) -> pl.BlockSpec:
        def index(b, g, i, member, j, *limits):
            return (b, head(g, member), *(i if dim == axis else 0 for dim in (2, 3)))

        return pl.BlockSpec((1, 1, *(size if dim == axis else shape[dim] for dim in (2, 3))), index)

    def inner(self, name: str, array: Array, head: Callable[[Any, Any], Any], axis: int = 2) -> None:
        """The inner blocks at hand, one operand for each slot."""
        shape = (1, 1, *(self.plan.inner if dim == axis else array.shape[dim] for dim in (2, 3)))
        for slot in range(self.plan.slots):

            def index(b, g, i, member, j, *limits, slot=slot):
                block = self.plan.inner_block(limits[0] if limits else None, b, i, j, slot)
                return (b, head(g, member), *(block if dim == axis else 0 for dim in (2, 3)))

            self._inputs[f"{name}_{slot}"] = array, pl.BlockSpec(shape, index)

    def first(self, name: str, array: Array, size: int) -> None:
        """The first `size` keys of a key head."""
        spec = pl.BlockSpec((1, 1, size, array.shape[3]), lambda b, g, i, member, j, *limits: (b, g, 0, 0))
        self._inputs[name] = array, spec

    def scratch(self, name: str, shape: tuple[int, int], dtype: Any = jnp.float32) -> None:
        self._scratch[name] = pltpu.VMEM(shape, dtype)

    def call(
        self,
        kernel: Callable[[SimpleNamespace], None],
        grid: tuple[int, ...],
        semantics: tuple[Literal["parallel", "arbitrary"], ...],
        name: str,
        flops: int,
        interpret: Any,
    ) -> list[Array]:
        """The outputs, in the order in which they were declared."""
        names = [*self._inputs, *self._outputs, *self._scratch]

        def body(*refs):
            limits, refs = (refs[0], refs[1:]) if self.scalars else (None, refs)
            kernel(SimpleNamespace(limits=limits, **dict(zip(names, refs, strict=True))))

        arrays = [array for array, _ in self._inputs.values()]
        arrays = _compat.same_varying([*self.scalars, *arrays])
        shapes = [shape for shape, _ in self._outputs.values()]
        size = sum(x.size * x.dtype.itemsize for x in [array for array, _ in self._inputs.values()] + shapes)
        call = pl.pallas_call(
            body,
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=grid,
                in_specs=[spec for _, spec in self._inputs.values()],
                out_specs=[spec for _, spec in self._outputs.values()],
                scratch_shapes=list(self._scratch.values()),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=size, transcendentals=0),
            name=name,
            interpret=interpret,
        )
        return list(call(*arrays)) if interpret else only_on("tpu", call, *arrays)


def query_head(group: int) -> Callable[[Any, Any], Any]:
    return lambda g, member: g * group + member


def key_head(g: Any, member: Any) -> Any:
    return g


def first_head(g: Any, member: Any) -> int:
    """Of arrays that are the same for all heads."""
    return 0


def product(a: Array, b: Array, transposed: bool = False) -> Float[Array, "rows columns"]:
    """a b, or a bᵀ, in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def over_lanes(combine: Callable[[Array, Array], Array], pieces: list[Array]) -> Float[Array, "rows lanes"]:
    """Combines all columns down to one register's width: only what is left has to cross lanes."""
    columns = [x[:, i : i + LANES] for x in pieces for i in range(0, x.shape[1], LANES)]
    return functools.reduce(combine, columns)


def total(pieces: list[Array]) -> Array:
    return functools.reduce(jnp.add, pieces)


def wide(column: Array, width: int) -> Array:
    """A column that is repeated over the lanes of one register, repeated further."""
    return column if width == LANES else jnp.tile(column, (1, width // LANES))


def column_of(row: Array) -> Array:
    """A row of n as n rows that repeat their entry over the lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row_of(column: Float[Array, "n lanes"]) -> Float[Array, "1 n"]:
    """The inverse of `column_of`: sums over the diagonals of squares, which are cheaper than a transpose."""
    diagonal = iota((LANES, LANES), 0) == iota((LANES, LANES), 1)
    squares = (column[i : i + LANES] for i in range(0, column.shape[0], LANES))
    rows = [jnp.where(diagonal, square, 0.0).sum(axis=0, keepdims=True) for square in squares]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def reciprocal(x: Array) -> Array:
    """1 / x of positive numbers: the approximate one, and Newton's steps to full precision."""
    guess: Array = _approximate(x, approx=True)
    for _ in range(2):
        guess = guess * (2.0 - x * guess)
    return guess


def add_places(operands: Operands, positions: Array | None, row_ids: Array | None, key_ids: Array | None) -> None:
    """Positions of rows, and segment ids; (batch, 1, 1, length) each.

    Those of outer indices are kept as columns in scratch (`keep_places`).
    """
    plan = operands.plan
    outer_ids, inner_ids = (key_ids, row_ids) if plan.keys_outer else (row_ids, key_ids)
    if positions is not None and plan.keys_outer:
        operands.inner("positions", positions, first_head, axis=3)
    elif positions is not None:
        operands.outer("positions_row", positions, plan.outer, first_head, axis=3)
        operands.scratch("positions", (plan.outer, LANES), jnp.int32)
    if outer_ids is not None and inner_ids is not None:
        operands.inner("ids", inner_ids, first_head, axis=3)
        operands.outer("outer_ids_row", outer_ids, plan.outer, first_head, axis=3)
        operands.scratch("outer_ids", (plan.outer, LANES), jnp.int32)


def keep_places(refs: SimpleNamespace) -> None:
    """To be run at the first step of every outer block."""
    for name in ("positions", "outer_ids"):
        if hasattr(refs, f"{name}_row"):
            getattr(refs, name)[...] = column_of(getattr(refs, f"{name}_row")[0, 0])


def visible(
    plan: Plan, refs: SimpleNamespace, part: Slice, start: int, rows: int, step: tuple[Any, ...]
) -> Bool[Array, "rows columns"] | None:
    """What outer indices `start` ... `start + rows - 1` see of a slice; None is everything."""
    mask, shape = part.mask(rows), (rows, part.size)
    columns = slice(part.start, part.stop)
    if isinstance(plan, Gathered):
        first = plan.key_start(refs.limits, *step)
        if plan.keys_outer:
            seen = iota(shape, 0) <= refs.positions_0[0, 0, :, columns] - (first + start)
        else:
            positions = refs.positions[start : start + rows] - (first + part.start)
            seen = iota(shape, 1) <= wide(positions, part.size)
        mask = both(mask, seen)
    if hasattr(refs, "outer_ids"):
        ids = getattr(refs, f"ids_{part.slot}")[0, 0, :, columns]
        mask = both(mask, wide(refs.outer_ids[start : start + rows], part.size) == ids)
    return mask


def scores_of(
    plan: Plan, refs: SimpleNamespace, part: Slice, start: int, step: tuple[Any, ...], a: Array, b: Array
) -> Float[Array, "rows columns"]:
    """a bᵀ where it is seen, else `MASKED`."""
    scores = product(a, b, transposed=True)
    mask = visible(plan, refs, part, start, a.shape[0], step)
    return scores if mask is None else jnp.where(mask, scores, MASKED)


def for_each_case(plan: Plan, refs: SimpleNamespace, step: tuple[Any, ...], visit: Callable[[list], None]) -> None:
    """Runs `visit` of the blocks that a grid step has at hand."""
    for condition, blocks in plan.cases(refs.limits, *step):
        body = functools.partial(visit, blocks)
        body() if condition is None else pl.when(condition)(body)


def strips(size: int, strip: int) -> Iterator[tuple[int, int]]:
    """Start and length of the strips of a block."""
    for start in range(0, size, strip):
        yield start, min(strip, size - start)
