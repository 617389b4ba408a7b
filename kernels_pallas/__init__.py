"""kernels_pallas: performance-critical operations, one public function each.

Every operation lives in a folder of its own with a slow `reference`, an `xla` path that is fast on CPU, and (as
they arrive) Pallas kernels for TPU and GPU behind one `implementation=` argument.
"""
