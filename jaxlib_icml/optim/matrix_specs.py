"""From parameter tensors to batches of matrices: which axes are rows, columns, heads, experts, layers.

Optimizers that treat a weight as a matrix need to know what the matrix is. A `MatrixSpec` says it for one
tensor, `default_matrix_specs` infers it for the leaves of Flax models, and `to_matrices` / `from_matrices`
are the only place where a tensor is cut into matrices and put together again.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Shaped
from optax.contrib import MuonDimensionNumbers

from jaxlib_icml.nn import TreeLeaf, tree_leaves

__all__ = [
    "MatrixSpec",
    "default_matrix_specs",
    "default_weight_decay_mask",
    "from_matrices",
    "matrix_spec_table",
    "resolve_matrix_specs",
    "to_matrices",
]

# Compared with whole path components, never with parts of them. The first line is the canonical list, the
# second the spellings of widespread checkpoints.
_EMBEDDING_AND_HEAD_NAMES = frozenset({
    *("embedding", "embed", "wte", "wpe", "lm_head", "unembed", "head", "logits"),
    *("embeddings", "embedder", "embed_tokens", "tok_embeddings", "token_embedding", "token_embeddings"),
    *("word_embeddings", "pos_embed", "pos_embedding", "position_embedding", "position_embeddings"),
})  # fmt: skip
_VECTOR_NAMES = frozenset({"bias", "scale"})
_INPUT_PROJECTIONS = frozenset({"query", "key", "value"})
_OUTPUT_PROJECTION = "out"


class MatrixSpec(NamedTuple):
    """How one tensor is read as a batch of matrices.

    Attributes:
        row_axes: axis or axes that form the rows, flattened in the given order; negative numbers count from
            the end.
        col_axes: axis or axes that form the columns. Every axis in neither group is a batch axis.
        split: sizes of blocks along the flattened columns, each a matrix of its own (fused query-key-value).
        per_head: turn the head axis, the first axis of the only two-axis group, into a batch axis.

    Example:
        >>> MatrixSpec(row_axes=0, col_axes=1, split=(8, 4, 4)).split
        (8, 4, 4)
    """

    row_axes: int | tuple[int, ...]
    col_axes: int | tuple[int, ...]
    split: tuple[int, ...] | None = None
    per_head: bool = False


class TensorAxes(NamedTuple):
    """Non-negative axis numbers: batch + rows + cols is a permutation of all axes."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]


def to_matrices(x: Shaped[Array, "..."], spec: MatrixSpec) -> tuple[Shaped[Array, "*batch rows columns"], ...]:
    """Read a tensor as matrices.

    Args:
        x: the tensor.
        spec: its axes.

    Returns:
        One array per block of `spec.split` (one array without a split), each with the batch axes first, in
        their order in x, then rows, then the columns of the block.

    Raises:
        ValueError: the spec does not fit x's shape.

    Example:
        >>> [block.shape for block in to_matrices(jnp.zeros((6, 4, 5)), MatrixSpec(0, (1, 2), split=(5, 15)))]
        [(6, 5), (6, 15)]
    """
    axes = tensor_axes(spec, x.shape)
    shape = [x.shape[i] for i in axes.batch]
    x = jnp.transpose(x, axes.batch + axes.rows + axes.cols)
    rows, columns = _size(x, len(axes.batch), len(axes.rows)), _size(x, x.ndim - len(axes.cols), len(axes.cols))
    matrix = x.reshape(*shape, rows, columns)
    if spec.split is None:
        return (matrix,)
    edges = [sum(spec.split[:i]) for i in range(1, len(spec.split))]
    return tuple(jnp.split(matrix, edges, axis=-1))


def from_matrices(
    blocks: Sequence[Shaped[Array, "*batch rows _"]], shape: tuple[int, ...], spec: MatrixSpec
) -> Shaped[Array, "..."]:
    """Inverse of `to_matrices`.

    Args:
        blocks: what `to_matrices` returned, or arrays of the same shapes.
        shape: of the tensor.
        spec: its axes.

    Returns:
        The tensor.

    Raises:
        ValueError: the spec does not fit the shape.

    Example:
        >>> x, spec = jnp.arange(24.0).reshape(2, 3, 4), MatrixSpec((0, 1), 2)
        >>> bool((from_matrices(to_matrices(x, spec), x.shape, spec) == x).all())
        True
    """
    axes = tensor_axes(spec, shape)
    order = axes.batch + axes.rows + axes.cols
    matrix = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=-1)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(matrix.reshape([shape[i] for i in order]), inverse)


def _size(x: Array, start: int, length: int) -> int:
    return math.prod(x.shape[start : start + length])


def tensor_axes(spec: MatrixSpec, shape: tuple[int, ...], leaf: str = "") -> TensorAxes:
    """Check a spec against a tensor.

    Args:
        spec: the spec.
        shape: of the tensor.
        leaf: its path, for messages.

    Returns:
        Its axes by role, with heads among the batch axes where the spec says so.

    Raises:
        ValueError: the spec does not fit the shape.
    """
    where = f" (leaf {leaf!r} of shape {shape})" if leaf else f" (shape {shape})"
    ndim = len(shape)
    if ndim < 2:
        raise ValueError(f"a MatrixSpec needs a tensor of at least two axes{where}; use None for this leaf")
    groups = []
    for name, given in (("row_axes", spec.row_axes), ("col_axes", spec.col_axes)):
        group = (given,) if isinstance(given, int) else tuple(given)
        if not group:
            raise ValueError(f"{name} must name at least one axis, got {given!r}{where}")
        if not all(isinstance(axis, int) and -ndim <= axis < ndim for axis in group):
            raise ValueError(f"{name} must be integers in [{-ndim}, {ndim}), got {given!r}{where}")
        groups.append(tuple(axis % ndim for axis in group))
    rows, cols = groups
    if len({*rows, *cols}) < len(rows) + len(cols):
        raise ValueError(f"row_axes and col_axes must not overlap, got {spec.row_axes!r} and {spec.col_axes!r}{where}")
    if spec.per_head:
        if (len(rows) == 2) == (len(cols) == 2):
            raise ValueError(f"per_head needs exactly one group of two axes, got {rows} and {cols}{where}")
        rows, cols = (rows[1:], cols) if len(rows) == 2 else (rows, cols[1:])
    if spec.split is not None:
        width = math.prod(shape[axis] for axis in cols)
        if not spec.split or not all(isinstance(block, int) and block > 0 for block in spec.split):
            raise ValueError(f"split must be positive integers, got {spec.split!r}{where}")
        if sum(spec.split) != width:
            raise ValueError(f"split must sum to the {width} flattened columns, got {spec.split!r}{where}")
    batch = tuple(axis for axis in range(ndim) if axis not in rows + cols)
    return TensorAxes(batch, rows, cols)


def _role_names(leaf: TreeLeaf) -> tuple[str, ...]:
    """Lower-case names to match: flattened keys ("layers.0/mlp") split, linen's numbering dropped."""
    return tuple(re.sub(r"_\d+$", "", name).lower() for part in leaf.parts for name in re.split(r"[/.]", part) if name)


def default_matrix_specs(params: Any, *, per_head: bool = False, stacked: Sequence[str] = ()) -> Any:
    """Infer from names and shapes which parameters are matrices, and along which axes.

    Understands Flax linen and nnx models (`nnx.state`, pure dicts, module trees), plain nested dicts and
    flattened keys. The rules, first match wins:

    1. fewer than two axes; a leaf named `scale` or `bias`, or directly in a module named `...norm`: None;
    2. a path component that is an embedding's or a head's name (`embedding`, `embed`, `wte`, `wpe`,
       `lm_head`, `unembed`, `head`, `logits` and a few more spellings; whole components only): None;
    3. attention projections of at least three axes: `query`, `key`, `value` (..., d, heads, head_dim) are d
       rows by heads * head_dim columns, `out` (..., heads, head_dim, d) is heads * head_dim rows by d
       columns. Attention is recognised by its three siblings or by a module named `...attention...` or
       `...attn...`;
    4. convolutions (module named `...conv...`, or a one-axis bias next to a kernel of at least three axes):
       the last axis is the columns, all others the rows;
    5. everything else: the last two axes. Axes in front (scanned layers, experts) are batch axes, here and in
       3.

    Args:
        params: arrays or anything with a shape; `None` and `optax.MaskedNode` leaves are skipped.
        per_head: make every attention head a matrix of its own.
        stacked: paths of modules whose leaves carry one leading layer axis that the names do not reveal
            (scanned convolutions, scanned `query` layers with two-axis kernels), for example
            `("encoder/conv",)`. A path may start anywhere in the tree, and matches whole components.

    Returns:
        A tree like `params` with a `MatrixSpec` or None (the fallback optimizer's) at every leaf.

    Raises:
        ValueError: an entry of `stacked` matches no leaf.

    Example:
        >>> mlp = {"kernel": jnp.zeros((8, 32)), "bias": jnp.zeros(32)}
        >>> default_matrix_specs({"mlp": mlp})["mlp"]["kernel"]
        MatrixSpec(row_axes=-2, col_axes=-1, split=None, per_head=False)
    """
    leaves = list(tree_leaves(params))
    names = [_role_names(leaf) for leaf in leaves]
    modules: dict[tuple[str, ...], set[str]] = defaultdict(set)
    bias_ndim: dict[tuple[str, ...], int] = {}
    for leaf, parts in zip(leaves, names, strict=True):
        modules[parts[:-2]].update(parts[-2:-1])
        if parts[-1:] == ("bias",):
            bias_ndim[leaf.parts[:-1]] = jnp.ndim(leaf.value)

    prefixes = {entry: _role_names(TreeLeaf((entry,), None)) for entry in stacked}
    is_stacked = [any(_contains(parts, prefix) for prefix in prefixes.values()) for parts in names]
    for entry, prefix in prefixes.items():
        if not any(_contains(parts, prefix) for parts in names):
            raise ValueError(f"stacked names {entry!r}, which is on no leaf's path")

    def infer(leaf: TreeLeaf, parts: tuple[str, ...], lead: int) -> MatrixSpec | None:
        ndim = jnp.ndim(leaf.value) - lead
        if ndim < 2 or _is_vector(parts) or _EMBEDDING_AND_HEAD_NAMES.intersection(parts):
            return None
        module = parts[-2] if len(parts) > 1 else ""
        attention = modules[parts[:-2]] >= _INPUT_PROJECTIONS or any(
            "attention" in name or "attn" in name for name in parts[-3:-2]
        )
        if attention and ndim >= 3 and module in _INPUT_PROJECTIONS:
            return MatrixSpec(-3, (-2, -1), per_head=per_head)
        if attention and ndim >= 3 and module == _OUTPUT_PROJECTION:
            return MatrixSpec((-3, -2), -1, per_head=per_head)
        bias = bias_ndim.get(leaf.parts[:-1])
        if ndim >= 3 and ("conv" in module or bias == 1):
            lead = max(lead, (bias or 1) - 1)
            return MatrixSpec(tuple(range(lead - jnp.ndim(leaf.value), -1)), -1)
        return MatrixSpec(-2, -1)

    specs = [infer(*args) for args in zip(leaves, names, is_stacked, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _is_vector(parts: tuple[str, ...]) -> bool:
    """Norm scales and biases, whatever axes heads or scanned layers have put in front of them."""
    return not _VECTOR_NAMES.isdisjoint(parts[-1:]) or (len(parts) > 1 and parts[-2].endswith("norm"))


def _contains(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def default_weight_decay_mask(params: Any, matrix_specs: Any = None) -> Any:
    """True where weights decay: everything but norm scales, biases, 0-D and 1-D leaves.

    Args:
        params: arrays or anything with a shape.
        matrix_specs: as in `resolve_matrix_specs`; leaves with a spec decay in any case.

    Returns:
        A tree like `params` of booleans.

    Raises:
        ValueError: `matrix_specs` does not fit `params`.

    Example:
        >>> default_weight_decay_mask({"head": {"kernel": jnp.zeros((4, 9)), "bias": jnp.zeros(9)}})
        {'head': {'bias': False, 'kernel': True}}
    """
    specs = resolve_matrix_specs(matrix_specs, params)
    mask = [
        specs[leaf.parts] is not None or (jnp.ndim(leaf.value) >= 2 and not _is_vector(_role_names(leaf)))
        for leaf in tree_leaves(params)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def _is_spec_leaf(x: Any) -> bool:
    return x is None or isinstance(x, MatrixSpec | MuonDimensionNumbers | optax.MaskedNode)


def _as_matrix_spec(given: Any, leaf: str) -> MatrixSpec | None:
    if given is None or isinstance(given, optax.MaskedNode):
        return None
    if isinstance(given, MatrixSpec):
        return given
    if isinstance(given, MuonDimensionNumbers):
        rows, cols = (x if isinstance(x, int) else tuple(x) for x in given)
        return MatrixSpec(rows, cols)
    raise ValueError(f"matrix_specs must hold MatrixSpec, MuonDimensionNumbers or None, got {given!r} for {leaf!r}")


def resolve_matrix_specs(matrix_specs: Any, params: Any) -> dict[tuple[str, ...], MatrixSpec | None]:
    """Match a tree of specs with a tree of parameters and check every spec against its leaf.

    Args:
        matrix_specs: None for `default_matrix_specs`, a callable from params to a tree of specs, or a tree
            with the paths of `params` (an nnx state may be described by a plain dict) and a `MatrixSpec`,
            `optax.contrib.MuonDimensionNumbers` or None at every leaf. A spec in the place of a whole subtree
            holds for all its leaves, so that what `optax.contrib.muon` accepts means the same here.
        params: arrays or anything with shape and dtype. `None` and `optax.MaskedNode` leaves are left out.

    Returns:
        From the names on a leaf's path to its spec, in the order of `jax.tree.leaves(params)`.

    Raises:
        ValueError: missing or superfluous specs, a spec that does not fit its leaf, a spec for a leaf that is
            not real floating point. All messages carry the leaf's path.
    """
    if matrix_specs is None:
        matrix_specs = default_matrix_specs
    if callable(matrix_specs):
        matrix_specs = matrix_specs(params)
    leaves = list(tree_leaves(params, is_leaf=_is_spec_leaf))
    specs = {leaf.parts: leaf for leaf in tree_leaves(matrix_specs, is_leaf=_is_spec_leaf)}
    prefixes = {leaf.parts: [leaf.parts[:n] for n in range(len(leaf.parts) + 1)] for leaf in leaves}
    known = {prefix for chain in prefixes.values() for prefix in chain}
    superfluous = [leaf.path for parts, leaf in specs.items() if parts not in known]
    where = {parts: next((prefix for prefix in chain if prefix in specs), None) for parts, chain in prefixes.items()}
    missing = [leaf.path for leaf in leaves if where[leaf.parts] is None and not _is_spec_leaf(leaf.value)]
    if superfluous or missing:
        raise ValueError(
            "matrix_specs must have the structure of the parameters; "
            f"no spec for {missing or 'no leaf'}, specs for unknown leaves: {superfluous or 'none'}"
        )

    resolved: dict[tuple[str, ...], MatrixSpec | None] = {}
    for leaf in leaves:
        if _is_spec_leaf(leaf.value):
            continue
        prefix = where[leaf.parts]
        assert prefix is not None  # no leaf is missing
        spec = _as_matrix_spec(specs[prefix].value, leaf.path)
        if spec is not None:
            dtype = jnp.result_type(leaf.value)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"leaf {leaf.path!r} has dtype {dtype}, but matrices must be real floating point; "
                    "set its spec to None"
                )
            tensor_axes(spec, jnp.shape(leaf.value), leaf.path)
        resolved[leaf.parts] = spec
    return resolved


def matrix_spec_table(params: Any, matrix_specs: Any = None) -> str:
    """A printable table of leaf, shape, dtype and rule, to look at before training.

    Args:
        params: arrays or anything with shape and dtype.
        matrix_specs: as in `resolve_matrix_specs`.

    Returns:
        Lines of text, one per leaf, and the number of parameters per group.

    Raises:
        ValueError: `matrix_specs` does not fit `params`.

    Example:
        >>> print(matrix_spec_table({"mlp": {"kernel": jnp.zeros((8, 32)), "bias": jnp.zeros(32)}}))
        leaf        shape    dtype    rule
        mlp/bias    (32,)    float32  fallback
        mlp/kernel  (8, 32)  float32  8 x 32
        256 parameters in matrices, 32 in the fallback
    """
    specs = resolve_matrix_specs(matrix_specs, params)
    rows = [("leaf", "shape", "dtype", "rule")]
    count = {True: 0, False: 0}
    for leaf in tree_leaves(params):
        spec, shape = specs[leaf.parts], jnp.shape(leaf.value)
        rows.append((leaf.path, str(shape), str(jnp.result_type(leaf.value)), _describe(spec, shape)))
        count[spec is not None] += math.prod(shape)
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{count[True]} parameters in matrices, {count[False]} in the fallback"])


def _describe(spec: MatrixSpec | None, shape: tuple[int, ...]) -> str:
    if spec is None:
        return "fallback"
    axes = tensor_axes(spec, shape)
    rows, columns = (math.prod(shape[i] for i in group) for group in (axes.rows, axes.cols))
    batch = "".join(f"{shape[i]} x " for i in axes.batch)
    widths = "|".join(map(str, spec.split or (columns,)))
    return f"{batch and batch[:-3] + ' matrices of '}{rows} x {widths}"
