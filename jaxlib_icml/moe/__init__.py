"""Mixture-of-experts layers and the methods built on them."""

from jaxlib_icml.moe.layers import ExpertBias, SparseMoE
from jaxlib_icml.moe.routing import Routing, RoutingStats, update_expert_bias

__all__ = ["ExpertBias", "Routing", "RoutingStats", "SparseMoE", "update_expert_bias"]
