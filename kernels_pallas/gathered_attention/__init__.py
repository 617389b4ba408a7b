"""Causal attention of some rows of a sequence (the routed part of operation 1)."""

from kernels_pallas.gathered_attention.api import gathered_attention

__all__ = ["gathered_attention"]
