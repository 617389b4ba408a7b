"""Sliding-window attention on Hopper GPUs: `flash.gpu_forward` and `flash.gpu_backward` with a window and sinks."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import gpu, gpu_passes
from kernels_pallas.flash.gpu import unsupported_device
from kernels_pallas.flash.gpu_backward import BackwardConfig
from kernels_pallas.flash.gpu_forward import ForwardConfig
from kernels_pallas.flash.gpu_passes import backward_candidates, forward_candidates

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]


def unsupported(
    query: Any, key: Any, *, scale: float, window: int, sinks: int, segmented: bool, chunk: bool
) -> str | None:
    """Why the kernels do not take this call, None if they do."""
    del scale, window
    if chunk:
        return "rows that are a later chunk of the sequence (q_positions)"
    if sinks and segmented:
        return "sinks of segments (sinks with segment_ids)"
    return gpu.unsupported(query, key)


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    starts: Int[Array, " batch"] | None,
    *,
    scale: float,
    window: int,
    sinks: int,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    rule = _rule(window, sinks, segment_ids, starts)
    places = gpu_passes.window_places(segment_ids)
    return gpu_passes.forward(
        "sliding_window_attention", rule, places, query, key, value, scale=scale, config=config, interpret=interpret
    )


def backward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    starts: Int[Array, " batch"] | None,
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    window: int,
    sinks: int,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    rule = _rule(window, sinks, segment_ids, starts)
    places = gpu_passes.window_places(segment_ids)
    arrays = (query, key, value, out, lse, grad_out)
    return gpu_passes.backward(
        "sliding_window_attention", rule, places, *arrays, scale=scale, config=config, interpret=interpret
    )


def _rule(window: int, sinks: int, segment_ids: Array | None, starts: Array | None) -> gpu.Rule:
    if starts is not None or (sinks and segment_ids is not None):
        raise ValueError("starts and sinks of segments must be None and 0 here: ask `unsupported` first")
    return gpu.Rule(window=window, sinks=sinks, segmented=segment_ids is not None)
