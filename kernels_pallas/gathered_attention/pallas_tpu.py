"""Attention of gathered rows on TPUs: the kernels of `flash.tpu` that visit no keys beyond a block's last position."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import tpu
from kernels_pallas.flash.tpu import Shaped, unsupported_device
from kernels_pallas.flash.tpu_configs import BackwardConfig, ForwardConfig, backward_candidates, forward_candidates

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]

_OPERATION = "gathered_attention"


def unsupported(query: Shaped, key: Shaped, *, segmented: bool) -> str | None:
    """Returns why the kernels do not take this call, None if they do."""
    del segmented
    return tpu.unsupported(query, key)


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
    config: ForwardConfig | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    return tpu.gathered_forward(
        _OPERATION, query, key, value, positions, segment_ids, scale=scale, config=config, interpret=interpret
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
    interpret: Any = False,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    return tpu.gathered_backward(
        _OPERATION,
        query,
        key,
        value,
        positions,
        segment_ids,
        out,
        lse,
        grad_out,
        scale=scale,
        config=config,
        interpret=interpret,
    )
