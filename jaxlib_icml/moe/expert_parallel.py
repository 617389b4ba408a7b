"""Experts spread over devices: tokens travel to the experts they chose and back, weights stay.

Every device of the mesh's `expert` axis holds some of the experts and some of the tokens. A token is sent once to every
device that holds at least one of its experts, together with its weights for them; what those experts make of it comes
back as one sum. Forward and backward need two exchanges of tokens each, and no device ever sees another's experts.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlib_icml.moe.dispatch import ExpertKernels

__all__ = ["can_split", "context_mesh", "expert_parallel"]

AXIS = "expert"
_HIDDEN_AXIS = "tensor"

LocalExperts = Callable[[Array, ExpertKernels, Array, Array], Array]
"""One of the paths of `jaxlib_icml.moe.dispatch`."""


def context_mesh() -> AbstractMesh | None:
    """The mesh that surrounds this code (`jax.set_mesh`, or a training step's), if it spreads experts."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside of a shard_map that has taken the axis, experts are somebody else's business.
    manual = set(getattr(mesh, "manual_axes", ()))
    return mesh if mesh.shape.get(AXIS, 1) > 1 and AXIS not in manual else None


def can_split(mesh: AbstractMesh | Mesh, num_experts: int, num_tokens: int) -> bool:
    """Whether experts and tokens divide over the mesh."""
    return num_experts % mesh.shape[AXIS] == 0 and num_tokens % math.prod(_batch_sizes(mesh)) == 0


def _batch_axes(mesh: AbstractMesh | Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis != _HIDDEN_AXIS)


def _batch_sizes(mesh: AbstractMesh | Mesh) -> tuple[int, ...]:
    return tuple(mesh.shape[axis] for axis in _batch_axes(mesh))


def expert_parallel(
    x: Float[Array, "tokens width"],
    kernels: ExpertKernels,
    weights: Float[Array, "tokens active"],
    indices: Int[Array, "tokens active"],
    *,
    local: LocalExperts,
    mesh: AbstractMesh | Mesh | None = None,
) -> Float[Array, "tokens width"]:
    """Run the chosen experts where they are; arguments and result as in `jaxlib_icml.moe.dispatch.dense_experts`.

    No token is dropped, whatever the load: the exchange has room for all tokens of a device at every other one.

    Args:
      x: Tokens, split over all axes of the mesh but `tensor`.
      kernels: Weights of all experts, split over `expert`, their hidden features over `tensor` where there is such an
        axis and it divides them.
      weights: Combination weight of each choice, split like `x`.
      indices: Chosen experts, distinct for a token; the number of experts marks a choice that is not computed.
      local: What a device does with the tokens that reach it, for example `blocked_experts`.
      mesh: The devices; None: the surrounding mesh.

    Returns:
      The weighted sums, split like `x`, in the dtype that `local` returns.

    Raises:
      ValueError: No mesh with an axis `expert`, or experts or tokens that do not divide over it.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if AXIS not in mesh.shape:
        raise ValueError(f"mesh: has no axis {AXIS!r}, only {', '.join(map(str, mesh.axis_names)) or 'none'}")
    experts, hidden = kernels.down.shape[:2]
    devices, shards = mesh.shape[AXIS], math.prod(_batch_sizes(mesh))
    if experts % devices:
        raise ValueError(f"mesh: {experts} experts do not divide over {devices} devices of its axis {AXIS!r}")
    if x.shape[0] % shards:
        raise ValueError(f"x: {x.shape[0]} tokens do not divide over {shards} shards of the batch")
    splits_hidden = mesh.shape.get(_HIDDEN_AXIS, 1) > 1 and hidden % mesh.shape[_HIDDEN_AXIS] == 0
    tensor = _HIDDEN_AXIS if splits_hidden else None

    tokens = PartitionSpec(_batch_axes(mesh))
    into: Any = PartitionSpec(AXIS, None, tensor)
    out_of: Any = PartitionSpec(AXIS, tensor)
    run = jax.shard_map(
        partial(_on_device, devices=devices, local=local, tensor=tensor),
        mesh=mesh,
        in_specs=(tokens, ExpertKernels(tuple(into for _ in kernels.inputs), out_of), tokens, tokens),
        out_specs=tokens,
        check_vma=False,  # tokens are the same on all devices of `tensor`
    )
    return run(x, kernels, weights, indices)


def _on_device(
    x: Array,
    kernels: ExpertKernels,
    weights: Array,
    indices: Array,
    *,
    devices: int,
    local: LocalExperts,
    tensor: str | None,
) -> Array:
    """One device's tokens, through the experts of all devices."""
    tokens = indices.shape[0]
    held = kernels.down.shape[0]
    owner = indices // held  # `devices` for choices that are not computed
    peers = jnp.arange(devices, dtype=indices.dtype)
    chosen = owner[None] == peers[:, None, None]  # (devices, tokens, active)
    wanted = jnp.any(chosen, axis=2)
    slot = jnp.where(wanted, jnp.cumsum(wanted, axis=1) - 1, tokens)
    number = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (devices, tokens))
    # Which token goes to each slot of each peer; slots that nobody needs hold `tokens`, which no token is.
    sent = jnp.full((devices, tokens), tokens, jnp.int32).at[peers[:, None], slot].set(number, mode="drop")

    at = jnp.minimum(sent, tokens - 1)
    mine = jnp.take_along_axis(chosen, at[..., None], axis=1) & (sent < tokens)[..., None]
    their_weights = jnp.where(mine, weights[at], 0)
    their_indices = jnp.where(mine, indices[at] - held * peers[:, None, None], held)
    rows = x.at[sent].get(mode="fill", fill_value=0)

    exchange = partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
    received = [exchange(part).reshape(devices * tokens, -1) for part in (rows, their_weights, their_indices)]
    y = local(received[0], kernels, received[1], received[2])
    if tensor is not None:
        y = lax.psum(y, tensor)
    returned = exchange(y.reshape(devices, tokens, -1))
    return jnp.zeros(x.shape, y.dtype).at[sent].add(returned, mode="drop")
