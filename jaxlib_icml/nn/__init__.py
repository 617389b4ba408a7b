"""Shared pieces: attention, feed-forward blocks, parameters with logical axes, contractions, rotary embeddings."""

from jaxlib_icml.nn.attention import masked_attention
from jaxlib_icml.nn.feed_forward import ACTIVATIONS, FeedForward, Initializer, Kernel, activate, fan_in_normal
from jaxlib_icml.nn.linear import contract, dot_general
from jaxlib_icml.nn.parameters import logical_axes, logical_param
from jaxlib_icml.nn.rotary import RopeScaling, apply_rotary, rotary_angles
from jaxlib_icml.nn.sharding import LOGICAL_RULES, state_shardings
from jaxlib_icml.nn.trees import TreeLeaf, tree_leaves

__all__ = [
    "ACTIVATIONS",
    "LOGICAL_RULES",
    "FeedForward",
    "Initializer",
    "Kernel",
    "RopeScaling",
    "TreeLeaf",
    "activate",
    "apply_rotary",
    "contract",
    "dot_general",
    "fan_in_normal",
    "logical_axes",
    "logical_param",
    "masked_attention",
    "rotary_angles",
    "state_shardings",
    "tree_leaves",
]
