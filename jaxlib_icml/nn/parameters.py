"""Parameters that carry logical axis names, to be mapped onto a device mesh later."""

from typing import Any

from flax import nnx
from jaxtyping import Array


def logical_axes(*names: str | None) -> dict[str, Any]:
    """Variable metadata that names the axes of a parameter, for Flax layers' `*_metadata` arguments.

    The names are logical (`embed`, `mlp`, `heads`, `vocab`, `expert`, `layers`); a set of rules maps them to mesh
    axes when shardings are made. Creation itself never touches a mesh, so a model can be built anywhere.

    Args:
      *names: one name per axis, None for an axis that is never sharded.

    Returns:
      A metadata dictionary.

    >>> logical_axes("embed", "mlp")["out_sharding"]
    ('embed', 'mlp')
    """
    return {"out_sharding": names, "eager_sharding": False}


def logical_param(value: Array, *names: str | None) -> nnx.Param:
    """An `nnx.Param` whose axes carry logical names (see `logical_axes`).

    Args:
      value: array of any shape and dtype.
      *names: one name or None per axis of `value`.

    Returns:
      The parameter.

    Raises:
      ValueError: the number of names differs from the rank of `value`.

    >>> import jax.numpy as jnp
    >>> logical_param(jnp.zeros((2, 3)), "embed", "mlp").shape
    (2, 3)
    """
    if len(names) != value.ndim:
        raise ValueError(f"names: {names} has {len(names)} entries for an array of shape {value.shape}")
    return nnx.Param(value, **logical_axes(*names))
