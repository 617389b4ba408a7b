"""Attention layers that decide what to read."""

from jaxlib_icml.attention.l2a import L2AAux, L2AConfig, Routing, capacity_for, l2a_attention, pack_routed, route
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

__all__ = [
    "CAPACITY_RATES",
    "CapacityLadder",
    "CapacityLadderState",
    "L2AAux",
    "L2AConfig",
    "RateController",
    "RateControllerState",
    "Routing",
    "capacity_for",
    "capacity_ladder",
    "l2a_attention",
    "pack_routed",
    "rate_controller",
    "route",
    "routing_temperature",
    "sparsity_loss",
]
