"""Quantization: grids of few bits, and how to train through them."""

from jaxlib_icml.quant.fake_quant import FORMATS, fake_quant

__all__ = ["FORMATS", "fake_quant"]
