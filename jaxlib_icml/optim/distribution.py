"""Whole matrices on single devices: how a function of matrices runs on sharded parameters.

Matrix iterations on sharded operands communicate in every product. Here each matrix visits one device instead. Of
every shape, in either orientation, all matrices are numbered; one all-to-all brings matrix number k together on its
device, the function runs there without communication, and one all-to-all takes the result back. Mesh axes that the
parameters are replicated over share the work too, and batch axes that are sharded (experts over devices) stay where
they are: their matrices are whole already.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim.matrix_specs import MatrixSpec, tensor_axes

__all__ = ["Matrices", "MatrixLayout", "map_matrices", "map_whole_matrices", "matrix_layout", "resolve_shardings"]

_Axes = tuple[str, ...]


class MatrixLayout(NamedTuple):
    """How a batch of matrices (*batch, rows, columns) lies on a mesh: the mesh axes of each dimension.

    Attributes:
        mesh: the device mesh (a `Mesh` or an `AbstractMesh`).
        batch: mesh axes of every batch dimension.
        rows: mesh axes of the rows.
        columns: mesh axes of the columns.
    """

    mesh: Any
    batch: tuple[_Axes, ...]
    rows: _Axes
    columns: _Axes

    @property
    def spec(self) -> PartitionSpec:
        """For arrays (*batch, rows, columns)."""
        return PartitionSpec(*(axes or None for axes in (*self.batch, self.rows, self.columns)))

    @property
    def batch_axes(self) -> _Axes:
        """Mesh axes that some batch dimension is sharded over."""
        return tuple(axis for axes in self.batch for axis in axes)

    def sizes(self, axes: _Axes) -> tuple[int, ...]:
        """Number of devices along mesh axes."""
        return tuple(self.mesh.shape[axis] for axis in axes)


def resolve_shardings(shardings: Any, params: Any) -> dict[tuple[str, ...], NamedSharding | None]:
    """Match a tree of shardings with a tree of parameters.

    Args:
        shardings: None; a tree with the structure of `params`, or a callable from params to one, with a
            `jax.sharding.NamedSharding` or None (not sharded) at every leaf.
        params: arrays or anything with a shape.

    Returns:
        From the names on a leaf's path to its sharding.

    Raises:
        ValueError: a leaf without an entry, or another kind of sharding, with the leaf's path.
    """
    if shardings is None:
        return {leaf.parts: None for leaf in tree_leaves(params)}
    if callable(shardings):
        shardings = shardings(params)

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, jax.sharding.Sharding)

    given = {leaf.parts: leaf.value for leaf in tree_leaves(shardings, is_leaf=is_leaf)}
    resolved = {}
    for leaf in tree_leaves(params):
        if leaf.parts not in given:
            raise ValueError(f"param_shardings must have the structure of the parameters, nothing for {leaf.path!r}")
        sharding = given[leaf.parts]
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            sharding = None
        if not (sharding is None or isinstance(sharding, NamedSharding)):
            raise ValueError(f"param_shardings must hold NamedSharding or None, got {sharding!r} for {leaf.path!r}")
        resolved[leaf.parts] = sharding
    return resolved


def matrix_layout(
    sharding: NamedSharding | None, shape: tuple[int, ...], spec: MatrixSpec, block: tuple[int, ...]
) -> MatrixLayout | None:
    """Where the matrices of a tensor lie, when the tensor has this sharding.

    A mesh axis counts where it shards the first axis of a group evenly; elsewhere (the second of two row axes, blocks
    of a fused kernel that the devices do not divide) the compiler gathers.

    Args:
        sharding: of the tensor; None: not sharded.
        shape: of the tensor.
        spec: its axes.
        block: shape of the batch of matrices, as `to_matrices` returns it.

    Returns:
        The layout, or None when the matrices are whole on a single device.
    """
    if sharding is None or sharding.mesh.size == 1:
        return None
    partition = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    mesh = sharding.mesh

    def axes_of(dimension: int, size: int) -> _Axes:
        entry = partition[dimension]
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()

    batch, rows, columns = tensor_axes(spec, shape)
    return MatrixLayout(
        mesh,
        tuple(axes_of(dimension, size) for dimension, size in zip(batch, block[:-2], strict=True)),
        axes_of(rows[0], block[-2]),
        axes_of(columns[0], block[-1]),
    )


class _Member(NamedTuple):
    """One array of a group: argument number `argument`, matrices `first` up to `stop`."""

    argument: int
    layout: MatrixLayout
    tall: bool
    first: int
    stop: int


def map_matrices(
    function: Callable[[Array], Any], arrays: Sequence[Array], layouts: Sequence[MatrixLayout]
) -> list[Any]:
    """Apply a function to every array of sharded matrices, with whole matrices on single devices.

    Args:
        function: from (*batch, rows, columns) to a tree of arrays, each (*batch, rows, columns) or, one number per
            matrix, (*batch, 1, 1). It treats matrices one by one, and transposing its argument transposes its
            results.
        arrays: batches of matrices (*batch, rows, columns), floating.
        layouts: one per array.

    Returns:
        The function's results, in the layouts of their arguments.
    """
    results: list[Any] = [None] * len(arrays)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, (x, layout) in enumerate(zip(arrays, layouts, strict=True)):
        groups[layout.mesh, layout.batch_axes, tuple(sorted(x.shape[-2:])), x.dtype].append(i)
    for members in groups.values():
        outs = _map_group(function, [arrays[i] for i in members], [layouts[i] for i in members])
        for i, out in zip(members, outs, strict=True):
            results[i] = out
    return results


class Matrices(NamedTuple):
    """A batch of matrices that is made when it is needed.

    Attributes:
        shape: (*batch, rows, columns).
        dtype: theirs.
        take: from an index into the flattened batch to that matrix, from None to all of them, (n, rows, columns).
    """

    shape: tuple[int, ...]
    dtype: Any
    take: Callable[[Array | None], Array]

    @property
    def total(self) -> int:
        """The number of matrices, n."""
        return math.prod(self.shape[:-2])


def map_whole_matrices(
    function: Callable[[Array], Any], batches: Sequence[Matrices], *, whole: bool | None = None
) -> list[Any]:
    """Apply a function to batches of matrices, leaving it to the compiler where they lie.

    Accelerators take all single matrices of one shape at once. On CPUs batched products are slower than single ones,
    and one loop over the matrices of a shape compiles faster and needs less memory than a program that repeats itself
    for each.

    Args:
        function: as in `map_matrices`, without the demand on transposes.
        batches: the matrices.
        whole: the batch axes are known not to be sharded, so that a loop may run over them. Default: there is only
            one device.

    Returns:
        The function's results, one tree per batch.
    """
    results: list[Any] = [None] * len(batches)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, batch in enumerate(batches):
        groups[batch.shape[-2:], batch.dtype, i if len(batch.shape) > 2 else None].append(i)
    whole = jax.device_count() == 1 if whole is None else whole
    for (_, _, batched), members in groups.items():
        outs = _map_shape(function, [batches[i] for i in members], loop=whole or batched is None)
        first = 0
        for i in members:
            shape, stop = batches[i].shape[:-2], first + batches[i].total
            pick = slice(first, stop)
            results[i] = jax.tree.map(lambda o, pick=pick, shape=shape: o[pick].reshape(*shape, *o.shape[1:]), outs)
            first = stop
    return results


def _map_shape(function: Callable[[Array], Any], batches: list[Matrices], loop: bool) -> Any:
    """The function of all matrices of one shape, in order: arrays (n, ...); CPUs may loop."""
    counts = [batch.total for batch in batches]
    total = sum(counts)

    def at_once() -> Any:
        stacks = [batch.take(None) for batch in batches]
        return function(stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks))

    def one_by_one() -> Any:
        owner = jnp.asarray(np.repeat(np.arange(len(counts)), counts))
        number = jnp.asarray(np.concatenate([np.arange(count) for count in counts]))

        def matrix(i: Array) -> Any:
            return function(lax.switch(owner[i], [batch.take for batch in batches], number[i]))

        return lax.map(matrix, jnp.arange(total))

    if total == 0 or not loop:
        return at_once()
    if total == 1:
        (batch,) = (batch for batch in batches if batch.total)
        return jax.tree.map(lambda x: x[None], function(batch.take(None)[0]))
    return lax.platform_dependent(cpu=one_by_one, default=at_once)


def _map_group(function: Callable[[Array], Any], arrays: list[Array], layouts: list[MatrixLayout]) -> list[Any]:
    """`map_matrices` for matrices of one shape, up to orientation, on one mesh."""
    mesh, batch_axes = layouts[0].mesh, layouts[0].batch_axes
    copies = math.prod(layouts[0].sizes(batch_axes))
    members: list[_Member] = []
    total = 0
    for i, (x, layout) in enumerate(zip(arrays, layouts, strict=True)):
        count = math.prod(x.shape[:-2]) // copies
        members.append(_Member(i, layout, x.shape[-2] > x.shape[-1], total, total + count))
        total += count

    sharded = {axis for layout in layouts for axis in layout.rows + layout.columns}
    dealt = tuple(axis for axis in mesh.axis_names if axis in sharded)
    # Replicas share the work, unless the batch is sharded: then there is nothing to bring together at the end.
    rest = tuple(a for a in mesh.axis_names if a not in sharded and mesh.shape[a] > 1) if not batch_axes else ()
    deal = _Deal(mesh, dealt, rest, total)
    placements = _by_placement(members)

    def on_device(*local: Array) -> list[Any]:
        whole: Any = None
        for (_, _, tall), subgroup in placements.items():
            stack = deal.stack([local[m.argument] for m in subgroup], [m.first for m in subgroup])
            part = deal.gather(stack, subgroup[0].layout)
            part = jnp.swapaxes(part, -1, -2) if tall else part
            whole = part if whole is None else whole + part  # every slot is zero in all parts but one
        local_matrices = Matrices(whole.shape, whole.dtype, partial(take_matrix, whole))
        (out,) = map_whole_matrices(function, [local_matrices], whole=True)
        results: list[Any] = [None] * len(members)
        for (_, _, tall), subgroup in placements.items():

            def send_back(x: Array, layout: MatrixLayout = subgroup[0].layout, tall: bool = tall) -> Array:
                return deal.scatter(jnp.swapaxes(x, -1, -2) if tall else x, layout)

            stacks = jax.tree.map(send_back, out)
            for m in subgroup:
                batch = local[m.argument].shape[:-2]
                results[m.argument] = jax.tree.map(
                    lambda x, m=m, batch=batch: x[m.first : m.stop].reshape(*batch, *x.shape[1:]), stacks
                )
        return results

    one = jax.ShapeDtypeStruct((1, *sorted(arrays[0].shape[-2:])), arrays[0].dtype)
    per_matrix = jax.tree.map(lambda x: x.shape[1:] == (1, 1), jax.eval_shape(function, one))
    out_specs = []
    for m in members:
        batch = PartitionSpec(*(axes or None for axes in m.layout.batch))
        out_specs.append(jax.tree.map(lambda number, m=m, batch=batch: batch if number else m.layout.spec, per_matrix))
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(m.layout.spec for m in members),
        out_specs=out_specs,
        check_vma=False,  # results are equal on all replicas because they were gathered there
    )(*arrays)


def _by_placement(members: list[_Member]) -> dict[Any, list[_Member]]:
    """Arrays that one all-to-all can carry together."""
    groups: dict[Any, list[_Member]] = defaultdict(list)
    for member in members:
        groups[member.layout.rows, member.layout.columns, member.tall].append(member)
    return groups


def take_matrix(x: Array, index: Array | None) -> Array:
    """Matrix number `index` of a stack (n, rows, columns), or the stack."""
    return x if index is None else lax.dynamic_index_in_dim(x, index, keepdims=False)


class _Deal:
    """Slots for `total` matrices: `per_device` on each device, in the order of `rest`, then `dealt`.

    Args:
        mesh: the device mesh.
        dealt: axes that the matrices are sharded over.
        rest: axes that they are replicated over and that share the work.
        total: number of matrices.
    """

    def __init__(self, mesh: Any, dealt: _Axes, rest: _Axes, total: int):
        self.mesh, self.dealt, self.rest = mesh, dealt, rest
        self.sizes = tuple(mesh.shape[axis] for axis in dealt)
        self.devices, self.replicas = math.prod(self.sizes), math.prod(mesh.shape[axis] for axis in rest)
        self.per_device = -(-total // (self.devices * self.replicas))
        self.slots = self.per_device * self.devices * self.replicas

    def stack(self, arrays: list[Array], firsts: list[int]) -> Array:
        """Pieces of matrices (*batch, r, c), in their slots (slots, r, c); zero elsewhere."""
        pieces, filled = [], 0
        for array, first in zip(arrays, firsts, strict=True):
            x = array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])
            if first > filled:
                pieces.append(jnp.zeros((first - filled, *x.shape[1:]), x.dtype))
            pieces.append(x)
            filled = first + x.shape[0]
        if filled < self.slots:
            pieces.append(jnp.zeros((self.slots - filled, *pieces[0].shape[1:]), pieces[0].dtype))
        return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def gather(self, stack: Array, layout: MatrixLayout) -> Array:
        """From pieces of all matrices (slots, r, c) to this device's matrices (per_device, rows, columns)."""
        if self.replicas > 1:
            share = self.slots // self.replicas
            stack = lax.dynamic_slice_in_dim(stack, lax.axis_index(self.rest) * share, share)
        if self.devices == 1:
            return stack
        pieces = lax.all_to_all(stack, self.dealt, split_axis=0, concat_axis=0, tiled=True)
        r, c = pieces.shape[1:]
        pieces = pieces.reshape(*self.sizes, self.per_device, r, c)
        # Axes that do not shard these matrices brought copies.
        pieces = pieces[tuple(slice(None) if axis in layout.rows + layout.columns else 0 for axis in self.dealt)]
        kept = [axis for axis in self.dealt if axis in layout.rows + layout.columns]
        order = [kept.index(axis) for axis in layout.rows], [kept.index(axis) for axis in layout.columns]
        n = len(kept)
        pieces = pieces.transpose(n, *order[0], n + 1, *order[1], n + 2)
        rows, columns = (size * math.prod(layout.sizes(axes)) for size, axes in ((r, layout.rows), (c, layout.columns)))
        return pieces.reshape(self.per_device, rows, columns)

    def scatter(self, x: Array, layout: MatrixLayout) -> Array:
        """Inverse of `gather`, to the pieces of all matrices; numbers (per_device, 1, 1) go to every device."""
        if x.shape[1:] == (1, 1):
            axes = self.rest + self.dealt
            return lax.all_gather(x, axes, tiled=True) if axes else x
        if self.devices > 1:
            row_sizes, column_sizes = layout.sizes(layout.rows), layout.sizes(layout.columns)
            r, c = x.shape[1] // math.prod(row_sizes), x.shape[2] // math.prod(column_sizes)
            x = x.reshape(self.per_device, *row_sizes, r, *column_sizes, c)
            position = {axis: 1 + i for i, axis in enumerate(layout.rows)}
            position |= {axis: 2 + len(layout.rows) + i for i, axis in enumerate(layout.columns)}
            kept = [axis for axis in self.dealt if axis in position]
            x = x.transpose(*(position[axis] for axis in kept), 0, 1 + len(layout.rows), x.ndim - 1)
            for i, axis in enumerate(self.dealt):
                if axis not in position:
                    x = jnp.broadcast_to(jnp.expand_dims(x, i), (*x.shape[:i], self.mesh.shape[axis], *x.shape[i:]))
            x = x.reshape(self.devices * self.per_device, r, c)
            x = lax.all_to_all(x, self.dealt, split_axis=0, concat_axis=0, tiled=True)
        return lax.all_gather(x, self.rest, tiled=True) if self.rest else x
