"""From the logical axes of parameters to places on a device mesh."""

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axis of a parameter -> mesh axis.
LOGICAL_RULES: dict[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}


def state_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """The sharding of every variable, from its logical axis names.

    A dimension that its mesh axis does not divide stays whole, and so does one whose mesh axis an earlier dimension of
    the same array uses already.

    Args:
      state: variables with `logical_axes` metadata (abstract ones too).
      mesh: a mesh with axes `fsdp`, `tensor` or `expert`; an axis it lacks splits nothing.

    Returns:
      A tree like `state` with a `NamedSharding` in place of every array.
    """

    def sharding(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata().get("out_sharding") or ()
        shape = variable.get_value().shape
        spec: list[str | None] = []
        for name, size in zip(names, shape, strict=False):
            axis = LOGICAL_RULES.get(name or "", "")
            fits = axis in mesh.shape and axis not in spec and size % mesh.shape[axis] == 0
            spec.append(axis if fits else None)
        return variable.replace(NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(sharding, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
