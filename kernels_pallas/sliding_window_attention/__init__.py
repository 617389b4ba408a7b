"""Sliding-window attention (operation 2)."""

from kernels_pallas.sliding_window_attention.api import sliding_window_attention

__all__ = ["sliding_window_attention"]
