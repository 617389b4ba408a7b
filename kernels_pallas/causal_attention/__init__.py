"""Plain causal attention (operation 0)."""

from kernels_pallas.causal_attention.api import causal_attention

__all__ = ["causal_attention"]
