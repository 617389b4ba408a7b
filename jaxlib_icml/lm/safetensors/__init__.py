"""Checkpoints in the safetensors format, read and written without trusting the files."""

from jaxlib_icml.lm.safetensors.checkpoint import Checkpoint, open_checkpoint
from jaxlib_icml.lm.safetensors.file import DTYPES, SafetensorsFile, TensorInfo
from jaxlib_icml.lm.safetensors.writer import write_checkpoint

__all__ = ["DTYPES", "Checkpoint", "SafetensorsFile", "TensorInfo", "open_checkpoint", "write_checkpoint"]
