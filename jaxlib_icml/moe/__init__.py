"""Mixture-of-experts layers and the methods built on them."""

from jaxlib_icml.moe.config import UNIT_CONSTANTS, BaseSpec, Constants, MoEShape
from jaxlib_icml.moe.layers import ExpertBias, SparseMoE
from jaxlib_icml.moe.mean_field import advise, alpha_star, init_stream_variance, selection_threshold
from jaxlib_icml.moe.parameterization import Rule, check_routers, group_of, init_params, rule_table, rules
from jaxlib_icml.moe.routing import Routing, RoutingStats, update_expert_bias
from jaxlib_icml.moe.transfer import scale_by_adam_grouped, transfer_optimizer

__all__ = [
    "UNIT_CONSTANTS",
    "BaseSpec",
    "Constants",
    "ExpertBias",
    "MoEShape",
    "Routing",
    "RoutingStats",
    "Rule",
    "SparseMoE",
    "advise",
    "alpha_star",
    "check_routers",
    "group_of",
    "init_params",
    "init_stream_variance",
    "rule_table",
    "rules",
    "scale_by_adam_grouped",
    "selection_threshold",
    "transfer_optimizer",
    "update_expert_bias",
]
