"""The language model that the flagship methods share: configuration, transformer, loss, cache and generation."""

from jaxlib_icml.lm.attention import Exploration
from jaxlib_icml.lm.cache import KVCache, LayerCache, cache_bytes, init_cache
from jaxlib_icml.lm.config import PRESETS, LMConfig, preset
from jaxlib_icml.lm.generate import Generation, Sampling, generate, pad_prompts, sample
from jaxlib_icml.lm.hooks import HOOK_POINTS, Edit
from jaxlib_icml.lm.loss import LossAux, cross_entropy_sum, loss_fn
from jaxlib_icml.lm.transformer import LMOutput, Transformer, abstract_transformer, split_model

__all__ = [
    "HOOK_POINTS",
    "PRESETS",
    "Edit",
    "Exploration",
    "Generation",
    "KVCache",
    "LMConfig",
    "LMOutput",
    "LayerCache",
    "LossAux",
    "Sampling",
    "Transformer",
    "abstract_transformer",
    "cache_bytes",
    "cross_entropy_sum",
    "generate",
    "init_cache",
    "loss_fn",
    "pad_prompts",
    "preset",
    "sample",
    "split_model",
]
