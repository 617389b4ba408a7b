"""Both passes of an attention operation on Hopper GPUs, with the choice of block sizes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat, autotune
from kernels_pallas.flash import gpu, gpu_backward, gpu_forward
from kernels_pallas.flash.gpu_backward import BackwardConfig
from kernels_pallas.flash.gpu_forward import ForwardConfig

_MULTIPLE = 8  # TMA reads rows of tensor cores' tiles: eight at a time


def causal_places(segment_ids: Int[Array, "batch seq"] | None) -> gpu.Places:
    """Every id is an id."""
    if segment_ids is None:
        return gpu.Places()
    ids = segment_ids.astype(jnp.int32)
    return gpu.Places(None, ids, ids)


def window_places(segment_ids: Int[Array, "batch seq"] | None) -> gpu.Places:
    """Id 0 sees and shows nothing."""
    if segment_ids is None:
        return gpu.Places()
    ids = segment_ids.astype(jnp.int32)
    return gpu.Places(None, ids, jnp.where(ids == 0, gpu.NO_SEGMENT, ids))


def gathered_places(
    positions: Int[Array, "batch rows"], segment_ids: Int[Array, "batch seq"] | None, seq: int
) -> gpu.Places:
    """Rows beyond the sequence see nothing."""
    positions = jnp.where(positions < seq, positions, -1).astype(jnp.int32)
    places = window_places(segment_ids)
    if places.row_ids is None:
        return gpu.Places(positions)
    of_rows = jnp.take_along_axis(places.row_ids, jnp.maximum(positions, 0), axis=1)
    return gpu.Places(positions, of_rows, places.key_ids)


def forward(
    operation: str,
    rule: gpu.Rule,
    places: gpu.Places,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    *,
    scale: float,
    config: ForwardConfig | None,
    interpret: Any,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`; `interpret` as in `plgpu.kernel`."""
    if config is None:
        found = autotune.lookup(operation, "pallas_gpu.forward", tuning_key(rule, query, key))
        config = gpu_forward.heuristic(query.shape[3]) if found is None else ForwardConfig(**found)
    _check(config, query.shape[3])
    rows = query.shape[1]
    query, key, value, places = _compat.same_varying((*map(_padded, (query, key, value)), places))
    out, lse = gpu_forward.attend(query, key, value, places, rule=rule, scale=scale, config=config, interpret=interpret)
    # `plgpu.kernel` forgets over which mesh axes its results vary.
    return _compat.same_varying((out[:, :rows], lse[:, :, :rows]), query)


def backward(
    operation: str,
    rule: gpu.Rule,
    places: gpu.Places,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    config: BackwardConfig | None,
    interpret: Any,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`; `interpret` as in `plgpu.kernel`."""
    if config is None:
        found = autotune.lookup(operation, "pallas_gpu.backward", tuning_key(rule, query, key))
        config = (
            gpu_backward.heuristic(query.shape[3], gpu.two_masks(rule)) if found is None else BackwardConfig(**found)
        )
    _check(config, query.shape[3])
    rows, seq = query.shape[1], key.shape[1]
    delta = jnp.einsum("bthd,bthd->bht", out, grad_out, preferred_element_type=jnp.float32)
    arrays = (*map(_padded, (query, key, value, grad_out)), lse, delta, places)
    dq, dk, dv = gpu_backward.gradients(
        *_compat.same_varying(arrays), rule=rule, scale=scale, config=config, interpret=interpret
    )
    return _compat.same_varying((dq[:, :rows], dk[:, :seq], dv[:, :seq]), query)


def _padded(x: Array) -> Array:
    """A copy only where the sequence is no multiple of eight."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _MULTIPLE), (0, 0), (0, 0))) if x.shape[1] % _MULTIPLE else x


def _check(config: ForwardConfig | BackwardConfig, dim: int) -> None:
    fields = config._asdict()
    blocks = [size for name, size in fields.items() if name.startswith("block")]
    if any(size % 64 or size < 64 for size in blocks) or min(fields.values()) < 2:
        raise ValueError(f"config must have blocks of multiples of 64 and at least two stages, got {config}")
    if config.smem_bytes(dim) > gpu.SMEM_BYTES:
        raise ValueError(f"config must fit {gpu.SMEM_BYTES} bytes of shared memory, got {config}")


# Tuning.


def tuning_key(rule: gpu.Rule, query: Array, key: Array) -> dict[str, Any]:
    """What the choice of block sizes may depend on; lengths are rounded up to powers of two."""
    return {
        "rows": pl.next_power_of_2(query.shape[1]),
        "seq": pl.next_power_of_2(key.shape[1]),
        "group": query.shape[2] // key.shape[2],
        "dim": query.shape[3],
        "window": rule.window,
        "sinks": rule.sinks,
        "segmented": rule.segmented,
        "dtype": query.dtype.name,
    }


def forward_candidates(key: Mapping[str, Any]) -> list[ForwardConfig]:
    """The configs worth trying for a `tuning_key`: those that fit shared memory, and registers without spills."""
    return gpu_forward.candidates(key["dim"])


def backward_candidates(key: Mapping[str, Any]) -> list[BackwardConfig]:
    """The same for the backward pass."""
    return gpu_backward.candidates(key["dim"], key["window"] is not None and key["segmented"])
