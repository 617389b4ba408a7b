"""Attention layers that decide what to read."""

from jaxlib_icml.attention.l2a import L2AAux, L2AConfig, Routing, capacity_for, l2a_attention, pack_routed, route
from jaxlib_icml.attention.l2a_cache import L2ACache, cache_slots, decode_attention, fill_cache, init_cache
from jaxlib_icml.attention.l2a_control import (
    CAPACITY_RATES,
    CapacityLadder,
    CapacityLadderState,
    RateController,
    RateControllerState,
    capacity_ladder,
    rate_controller,
    routing_temperature,
    sparsity_loss,
)
from jaxlib_icml.attention.l2a_layer import L2AAttention, L2ARouter, from_attention_params
from jaxlib_icml.attention.l2a_pruning import (
    DocumentUsage,
    Span,
    UsageReport,
    kv_cache_bytes,
    prune_layers,
    usage_report,
)

__all__ = [
    "CAPACITY_RATES",
    "CapacityLadder",
    "CapacityLadderState",
    "DocumentUsage",
    "L2AAttention",
    "L2AAux",
    "L2ACache",
    "L2AConfig",
    "L2ARouter",
    "RateController",
    "RateControllerState",
    "Routing",
    "Span",
    "UsageReport",
    "cache_slots",
    "capacity_for",
    "capacity_ladder",
    "decode_attention",
    "fill_cache",
    "from_attention_params",
    "init_cache",
    "kv_cache_bytes",
    "l2a_attention",
    "pack_routed",
    "prune_layers",
    "rate_controller",
    "route",
    "routing_temperature",
    "sparsity_loss",
    "usage_report",
]
