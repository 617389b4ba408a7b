"""Device meshes, and where every array of a training state lives on them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlib_icml.nn import state_shardings

MESH_AXES = ("data", "fsdp", "tensor", "expert")

# Every axis but `tensor` splits the batch: parameters are gathered over fsdp, tokens exchanged over expert.
BATCH_AXES = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh; their product is the number of devices.

    Raises:
      ValueError: a size that is neither positive nor -1, or more than one -1.
    """

    data: int = -1
    """Replicas of the model; -1: all devices the other axes leave."""
    fsdp: int = 1
    """Shards of parameters and optimizer state over the batch."""
    tensor: int = 1
    """Shards of heads, hidden widths and vocabulary."""
    expert: int = 1
    """Shards of the experts."""

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        if any(size != -1 and size < 1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh: sizes must be positive, at most one -1, got {dict(zip(MESH_AXES, sizes, strict=True))}"
            )


def make_mesh(config: MeshConfig | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `data, fsdp, tensor, expert`.

    Args:
      config: axis sizes; None: all devices on `data`.
      devices: the devices to use; None: all.

    Returns:
      The mesh.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.

    >>> make_mesh(MeshConfig(data=1), jax.devices()[:1]).shape["data"]
    1
    """
    config = config or MeshConfig()
    devices = list(devices if devices is not None else jax.devices())
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise ValueError(f"mesh: {dict(zip(MESH_AXES, sizes, strict=True))} does not fit {len(devices)} devices")
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of (batch, seq) arrays: the batch over every axis but `tensor`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
    """How many pieces the batch is cut into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def optimizer_shardings(opt_state: Any, params: nnx.State, mesh: Mesh) -> Any:
    """Shardings of an optimizer state: moments like their parameters, everything else replicated.

    A leaf belongs to a parameter when its path ends with the parameter's path and the shapes agree.

    Args:
      opt_state: the (abstract) state of any Optax transformation over `params`.
      params: the (abstract) parameters.
      mesh: the mesh.

    Returns:
      A tree like `opt_state` of `NamedSharding`s.
    """
    shardings = jax.tree_util.tree_flatten_with_path(state_shardings(params, mesh))[0]
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    by_path = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, leaf), (_, sharding) in zip(leaves, shardings, strict=True)
    }

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            shape, found = by_path.get(jax.tree_util.keystr(path[start:]), (None, None))
            if found is not None and shape == leaf.shape:
                return found
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, opt_state)
