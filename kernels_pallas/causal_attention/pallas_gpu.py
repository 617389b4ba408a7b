"""Causal attention on Hopper GPUs: `flash.gpu_forward` and `flash.gpu_backward`, whose simplest rule this is."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import gpu, gpu_passes
from kernels_pallas.flash.gpu import unsupported_device
from kernels_pallas.flash.gpu_backward import BackwardConfig
from kernels_pallas.flash.gpu_forward import ForwardConfig
from kernels_pallas.flash.gpu_passes import backward_candidates, forward_candidates

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]


def unsupported(query: Any, key: Any) -> str | None:
    """Why the kernels do not take this call, None if they do."""
    return gpu.unsupported(query, key)


def forward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch heads seq"]]:
    """See `flash.rules`."""
    rule = gpu.Rule(segmented=segment_ids is not None)
    places = gpu_passes.causal_places(segment_ids)
    return gpu_passes.forward(
        "causal_attention", rule, places, query, key, value, scale=scale, config=config, interpret=interpret
    )


def backward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    out: Float[Array, "batch seq heads dim"],
    lse: Float[Array, "batch heads seq"],
    grad_out: Float[Array, "batch seq heads dim"],
    *,
    scale: float,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    rule = gpu.Rule(segmented=segment_ids is not None)
    places = gpu_passes.causal_places(segment_ids)
    arrays = (query, key, value, out, lse, grad_out)
    return gpu_passes.backward(
        "causal_attention", rule, places, *arrays, scale=scale, config=config, interpret=interpret
    )
