"""Norms of groups of leaves: per leaf, per layer of a stack, per label, or of the whole tree.

One vector holds all norms of a tree, so that scalar arithmetic on them is one fused operation, and their
reductions across devices can travel as one collective.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

# Sums of squares of scaled gradients are exact to rounding, for up to 2^30 elements, for norms
# between 1e-25 and 6e4 (2^48), 6e4 and 8e34 (2^-52), 1e-17 and 1e13 (2^20).
_SCALE_SMALL, _SCALE_LARGE, _SCALE_USUAL = 2.0**48, 2.0**-52, 2.0**20


class NormUnits:
    """How the leaves of a tree fall into units that share a norm, and the units into one flat vector.

    A unit is a scalar, or the (L,) norms of a stacked leaf. All scalar arithmetic then runs once, on the
    vector.

    Args:
        tree: gradients or parameters, arrays or shapes; nothing but shapes is used before `norms`.
        scope: "leaf", "global", "layer", a pytree of labels, or a function from the tree to labels; see
            `gradient_stabilizer`.
        stacked: which leaves scope "layer" splits along the leading axis; see `gradient_stabilizer`.
        complex_leaves: whether complex leaves are allowed.

    Attributes:
        leaves: the leaves of the tree.
        names: one name per unit, for messages.
        shapes: one shape per unit, () or (L,).
        treedef: the structure of the tree.
    """

    def __init__(self, tree: PyTree, scope: Any, stacked: Any, *, complex_leaves: bool = True):
        plain = _without_variables(tree)
        with_path, plain_treedef = jax.tree_util.tree_flatten_with_path(plain)
        paths = [path for path, _ in with_path]
        self.treedef = jax.tree.structure(tree)
        self.leaves = [_check_leaf(path, leaf, complex_leaves) for path, leaf in with_path]
        self.is_stacked = [False] * len(paths)
        self.names: list[str] = [_name(path) for path in paths]
        self.state_treedef = plain_treedef
        self.unit_of = list(range(len(paths)))
        if not isinstance(scope, str):
            labels = _labels(plain, scope)
            self.state_treedef = jax.tree.structure(dict.fromkeys(labels, 0))
            order = sorted(set(labels))
            self.names = [f"group {label!r}" for label in order]
            self.unit_of = [order.index(label) for label in labels]
        elif scope == "global":
            self.state_treedef = jax.tree.structure(0)
            self.names, self.unit_of = ["the whole tree"], [0] * len(paths)
        elif scope == "layer":
            self.is_stacked = _stacked_leaves(plain, paths, stacked)
        self.shapes: list[tuple[int, ...]] = [()] * len(self.names)
        for i in (i for i, flag in enumerate(self.is_stacked) if flag):
            if not self.leaves[i].shape:
                raise ValueError(f"scope='layer': the stacked leaf {self.names[i]} has no leading axis")
            self.shapes[i] = self.leaves[i].shape[:1]

    def zeros(self, dtype: Any) -> PyTree:
        return jax.tree.unflatten(self.state_treedef, [jnp.zeros(shape, dtype) for shape in self.shapes])

    def check_state(self, field: PyTree) -> None:
        shapes = [jnp.shape(x) for x in jax.tree.leaves(field)]
        if shapes != self.shapes:
            raise ValueError(
                f"updates have {len(self.shapes)} norms with shapes {self.shapes}, but state was made for "
                f"{len(shapes)} with shapes {shapes}: init and update must see the same tree"
            )

    def norms(self) -> Float[Array, "units"]:
        """The 2-norm of every unit; its squares neither overflow nor underflow between 1e-25 and 1e34."""
        # GPUs and TPUs fuse both sums into one sweep over memory. XLA's CPU compiler does not, and there a
        # multiplication per element makes a sum half as fast again.
        return jax.lax.platform_dependent(*self.leaves, cpu=self._norms_by_cases, default=self._norms)

    def _norms(self, *leaves: Array) -> Float[Array, "units"]:
        def sums(scale: float) -> Float[Array, "units"]:
            # XLA rewrites (x c)(x c) as (x x)(c c) for constants, which would overflow: the minimum, which
            # changes nothing, keeps the products apart.
            return self._sums_of_squares(leaves, lambda x: jnp.minimum(x * scale, jnp.finfo(jnp.float32).max))

        small, large = sums(_SCALE_SMALL), sums(_SCALE_LARGE)
        return jnp.where(jnp.isfinite(small), jnp.sqrt(small) / _SCALE_SMALL, jnp.sqrt(large) / _SCALE_LARGE)

    def _norms_by_cases(self, *leaves: Array) -> Float[Array, "units"]:
        sums = self._sums_of_squares(leaves, lambda x: x)
        bad = jnp.isinf(sums) | self._inaccurate(sums)
        return jax.lax.cond(jnp.any(bad), self._scaled_norms, lambda *_: jnp.sqrt(sums), *leaves)

    def _scaled_norms(self, *leaves: Array) -> Float[Array, "units"]:
        # The barrier hides constants from that rewriting too, and costs CPUs less.
        leaves, scale = jax.lax.optimization_barrier((leaves, jnp.float32(_SCALE_USUAL)))
        sums = self._sums_of_squares(leaves, lambda x: x * scale)
        # A sum of exactly zero is a zero gradient, or one with all elements below 1e-25.
        bad = jnp.isinf(sums) | (sums > 0) & self._inaccurate(sums)
        return jax.lax.cond(jnp.any(bad), self._norms, lambda *_: jnp.sqrt(sums) / _SCALE_USUAL, *leaves)

    def _inaccurate(self, sums: Float[Array, "units"]) -> Bool[Array, "units"]:
        """Squares below the smallest normal number are lost: 24 bits above it, once per element, they do not matter."""
        return sums < self._sizes() * 2.0**-102

    def _sums_of_squares(self, leaves: Sequence[Array], scaled: Callable[[Array], Array]) -> Float[Array, "units"]:
        sums: list[Any] = [0.0] * len(self.names)
        for leaf, unit, flag in zip(leaves, self.unit_of, self.is_stacked, strict=True):
            parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
            axes = tuple(range(1 if flag else 0, leaf.ndim))
            for part in parts:
                sums[unit] += jnp.sum(jnp.square(scaled(part.astype(jnp.float32))), axis=axes)
        return self.ravel(sums)

    def _sizes(self) -> Float[np.ndarray, "units"]:
        sizes = np.zeros(len(self.names), np.float32)
        for leaf, unit, flag in zip(self.leaves, self.unit_of, self.is_stacked, strict=True):
            sizes[unit] += math.prod(leaf.shape[1 if flag else 0 :])
        return np.repeat(sizes, [math.prod(shape) for shape in self.shapes])

    def ravel(self, field: PyTree) -> Array:
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(field)])

    def split(self, vector: Array) -> list[Array]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        pieces = jnp.split(vector, ends[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def per_leaf(self, vector: Array) -> list[Array]:
        """The vector's entry for every leaf, shaped to broadcast against the leaf."""
        pieces = self.split(vector)
        return [
            pieces[unit].reshape(-1, *(1,) * (leaf.ndim - 1)) if flag else pieces[unit]
            for leaf, unit, flag in zip(self.leaves, self.unit_of, self.is_stacked, strict=True)
        ]


def _stacked_leaves(tree: PyTree, paths: Sequence[Any], stacked: Any) -> list[bool]:
    components = [stacked] if isinstance(stacked, str) else stacked
    if isinstance(components, Sequence) and components and all(isinstance(c, str) for c in components):
        # Below an index lies one layer of an unrolled model, not a stack.
        parts = [[_name((key,)) for key in path] for path in paths]
        return [
            any(part in components and not after.isdigit() for part, after in zip(p, [*p[1:], ""], strict=False))
            for p in parts
        ]
    if callable(stacked):
        return [bool(stacked(_name(path))) for path in paths]
    flags = jax.tree.leaves(_broadcast("stacked", stacked, tree))
    if not all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        raise ValueError(f"stacked must be path components, a function, or a pytree of booleans, got {stacked!r}")
    return [bool(flag) for flag in flags]


def _labels(tree: PyTree, scope: Any) -> list[Any]:
    labels = jax.tree.leaves(_broadcast("scope", scope(tree) if callable(scope) else scope, tree))
    if not (all(isinstance(x, str) for x in labels) or all(type(x) is int for x in labels)):
        raise ValueError(f"scope must have labels that are all strings or all ints, got {labels!r}")
    return labels


def _broadcast(name: str, prefix: PyTree, tree: PyTree) -> PyTree:
    try:
        return jax.tree.broadcast(_without_variables(prefix), tree)
    except ValueError as error:
        raise ValueError(f"{name} must be a prefix of the gradients' tree: {error}") from error


def _without_variables(tree: PyTree) -> PyTree:
    """The tree with `nnx.Variable`s replaced by their values.

    The state must not inherit their metadata: a sharding of a matrix does not fit the scalar in its place.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # no tree can hold a Variable
        return tree

    def value(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return x
        children = jax.tree.leaves(x, is_leaf=lambda child: child is not x)
        return children[0] if len(children) == 1 else tuple(children)

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _check_leaf(path: Any, leaf: Any, complex_leaves: bool) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.inexact if complex_leaves else jnp.floating):
        allowed = "floating point or complex" if complex_leaves else "real floating point"
        raise ValueError(f"gradients must be {allowed}, got {dtype} at {_name(path)}")
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the gradient"
