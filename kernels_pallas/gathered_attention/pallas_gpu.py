"""Causal attention of gathered rows on Hopper GPUs: `flash.gpu_forward` and `gpu_backward` with given positions."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import gpu, gpu_passes
from kernels_pallas.flash.gpu import unsupported_device
from kernels_pallas.flash.gpu_backward import BackwardConfig
from kernels_pallas.flash.gpu_forward import ForwardConfig
from kernels_pallas.flash.gpu_passes import backward_candidates, forward_candidates

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]


def unsupported(query: Any, key: Any, *, segmented: bool) -> str | None:
    """Why the kernels do not take this call, None if they do."""
    del segmented
    return gpu.unsupported(query, key)


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    rule = gpu.Rule(gathered=True, segmented=segment_ids is not None)
    places = gpu_passes.gathered_places(positions, segment_ids, key.shape[1])
    return gpu_passes.forward(
        "gathered_attention", rule, places, query, key, value, scale=scale, config=config, interpret=interpret
    )


def backward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    rule = gpu.Rule(gathered=True, segmented=segment_ids is not None)
    places = gpu_passes.gathered_places(positions, segment_ids, key.shape[1])
    arrays = (query, key, value, out, lse, grad_out)
    return gpu_passes.backward(
        "gathered_attention", rule, places, *arrays, scale=scale, config=config, interpret=interpret
    )
