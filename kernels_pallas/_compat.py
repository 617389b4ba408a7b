"""What is spelled differently between the versions of JAX that are supported (0.10 to 0.12)."""

from typing import Any

import jax
from jaxtyping import Array


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes that an array varies over inside `jax.shard_map`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # its name in newer versions
    return manual.varying if manual is not None else aval.vma


def same_varying(*arrays: Array) -> tuple[Array, ...]:
    """`arrays`, marked as varying over every mesh axis that one of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(map(cast, arrays))


def shape_like(shape: tuple[int, ...], like: Array) -> jax.ShapeDtypeStruct:
    """The declared result of a kernel: dtype of `like`, varying over the same mesh axes."""
    kwargs: dict[str, Any] = {}
    if axes := varying_axes(like):
        if hasattr(jax.typeof(like), "manual_axis_type"):
            kwargs["manual_axis_type"] = jax.typeof(like).manual_axis_type
        else:
            kwargs["vma"] = axes
    return jax.ShapeDtypeStruct(shape, like.dtype, **kwargs)
