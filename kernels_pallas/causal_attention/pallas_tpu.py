"""Causal attention on TPUs: the kernels of `flash.tpu` for a band that is the whole sequence."""

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas.flash import tpu
from kernels_pallas.flash.tpu import Shaped, unsupported_device
from kernels_pallas.flash.tpu_configs import BackwardConfig, ForwardConfig, backward_candidates, forward_candidates

__all__ = ["backward", "backward_candidates", "forward", "forward_candidates", "unsupported", "unsupported_device"]

_OPERATION = "causal_attention"


def unsupported(query: Shaped, key: Shaped) -> str | None:
    """Returns why the kernels do not take this call, None if they do."""
    return tpu.unsupported(query, key)


def forward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
    config: ForwardConfig | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch heads seq"]]:
    """See `flash.rules`."""
    return tpu.band_forward(
        _OPERATION,
        query,
        key,
        value,
        segment_ids,
        scale=scale,
        window=key.shape[1],
        padding_sees=True,
        config=config,
        interpret=interpret,
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
    interpret: Any = False,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
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
        window=key.shape[1],
        padding_sees=True,
        config=config,
        interpret=interpret,
    )
