"""Token-conditional attention (operation 1)."""

from kernels_pallas.token_conditional_attention.api import token_conditional_attention

__all__ = ["token_conditional_attention"]
