"""What is spelled differently between the versions of JAX that are supported (0.10 to 0.12)."""

from typing import Any

import jax
from jaxtyping import Array, PyTree


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes that an array varies over inside `jax.shard_map`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # its name in newer versions
    return manual.varying if manual is not None else aval.vma


def same_varying(arrays: PyTree, like: PyTree = None) -> PyTree:
    """`arrays`, marked as varying over every mesh axis that one of them (or of `like`) varies over.

    Inside `jax.shard_map` operands of a kernel must agree in this, and the carry of a loop with what is written to it.
    """
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves((arrays, like))))

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def shape_like(shape: tuple[int, ...], like: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The declared result of a kernel: dtype of `like` unless given, varying over the same mesh axes."""
    kwargs: dict[str, Any] = {}
    if axes := varying_axes(like):
        if hasattr(jax.typeof(like), "manual_axis_type"):
            kwargs["manual_axis_type"] = jax.typeof(like).manual_axis_type
        else:
            kwargs["vma"] = axes
    return jax.ShapeDtypeStruct(shape, like.dtype if dtype is None else dtype, **kwargs)
