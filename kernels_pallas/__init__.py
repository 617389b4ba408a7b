"""kernels_pallas: performance-critical operations, one public function each.

Every operation lives in a folder of its own with a slow `reference`, an `xla` path that is fast on CPU, and
Pallas kernels for TPU and GPU behind one `implementation=` argument:

>>> from kernels_pallas import causal_attention, symmetric_product
"""

# Imported eagerly: a function that shares its folder's name would otherwise lose the name to the folder as
# soon as anything inside it is imported.
from kernels_pallas.causal_attention.api import causal_attention
from kernels_pallas.dispatch import Implementation, UnsupportedError, for_every_platform, supported
from kernels_pallas.gathered_attention.api import gathered_attention
from kernels_pallas.ragged_decode_attention.api import ragged_decode_attention
from kernels_pallas.sliding_window_attention.api import sliding_window_attention
from kernels_pallas.symmetric_product.api import symmetric_product
from kernels_pallas.token_conditional_attention.api import token_conditional_attention

__all__ = [
    "Implementation",
    "UnsupportedError",
    "causal_attention",
    "for_every_platform",
    "gathered_attention",
    "ragged_decode_attention",
    "sliding_window_attention",
    "supported",
    "symmetric_product",
    "token_conditional_attention",
]
