"""Decoding attention over a paged cache in which some heads keep everything and the others a window (operation 4)."""

from kernels_pallas.ragged_decode_attention.api import ragged_decode_attention
from kernels_pallas.ragged_decode_attention.cache import PagedCache, append, init_cache

__all__ = ["PagedCache", "append", "init_cache", "ragged_decode_attention"]
