"""Sliding-window attention on TPUs: the kernels of `flash.tpu` for a band and, before it, sinks."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import tpu
from kernels_pallas.flash.tpu import Shaped, unsupported_device
from kernels_pallas.flash.tpu_configs import (
    MOST_SINKS,
    BackwardConfig,
    ForwardConfig,
    backward_candidates,
    forward_candidates,
)

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]

_OPERATION = "sliding_window_attention"


def unsupported(
    query: Shaped, key: Shaped, *, scale: float, window: int, sinks: int, segmented: bool, chunk: bool
) -> str | None:
    """Returns why the kernels do not take this call, None if they do."""
    del scale, window
    if chunk:
        return "rows that are a later chunk of the sequence (q_positions)"
    if sinks and segmented:
        return "sinks of segments (sinks with segment_ids)"
    if sinks > MOST_SINKS:
        return f"sinks {sinks} (at most {MOST_SINKS})"
    return tpu.unsupported(query, key)


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
    interpret: Any = False,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    _check(segment_ids, starts, sinks)
    return tpu.band_forward(
        _OPERATION,
        query,
        key,
        value,
        segment_ids,
        scale=scale,
        window=window,
        sinks=sinks,
        padding_sees=False,
        config=config,
        interpret=interpret,
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
    interpret: Any = False,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    _check(segment_ids, starts, sinks)
    return tpu.band_backward(
        _OPERATION,
        query,
        key,
        value,
        segment_ids,
        out,
        lse,
        grad_out,
        scale=scale,
        window=window,
        sinks=sinks,
        padding_sees=False,
        config=config,
        interpret=interpret,
    )


def _check(segment_ids: Array | None, starts: Array | None, sinks: int) -> None:
    if starts is not None or (sinks and segment_ids is not None) or sinks > MOST_SINKS:
        raise ValueError("starts must be None, and sinks few and without segment_ids: ask `unsupported` first")
