"""Products that are known to be symmetric: one triangle of blocks is computed, the other mirrored."""

from kernels_pallas.symmetric_product.api import symmetric_product

__all__ = ["symmetric_product"]
