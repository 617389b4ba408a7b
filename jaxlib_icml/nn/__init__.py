"""Shared neural-network pieces: parameters with logical axes, mixed-precision contractions, rotary embeddings."""

from jaxlib_icml.nn.linear import contract, dot_general
from jaxlib_icml.nn.parameters import logical_axes, logical_param
from jaxlib_icml.nn.rotary import apply_rotary, rotary_angles

__all__ = ["apply_rotary", "contract", "dot_general", "logical_axes", "logical_param", "rotary_angles"]
