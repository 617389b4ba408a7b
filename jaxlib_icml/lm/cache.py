"""Key/value cache of a decoder."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlib_icml.attention.l2a_cache import cache_slots
from jaxlib_icml.attention.l2a_pruning import kv_cache_bytes
from jaxlib_icml.lm.config import LMConfig


class LayerCache(NamedTuple):
    """Keys and values of one layer, (batch, slots, kv_heads, head_dim); (layers, batch, ...) when scanned.

    A pruned L2A layer has slots for its window and sinks only, as a ring (`jaxlib_icml.attention.l2a_cache`).
    """

    keys: Float[Array, "*layers batch slots kv_heads head_dim"]
    values: Float[Array, "*layers batch slots kv_heads head_dim"]


class KVCache(NamedTuple):
    """Cache of a whole model: one entry per layer (or one stacked entry) and the tokens held per row."""

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, " batch"]


def init_cache(config: LMConfig, batch: int, slots: int) -> KVCache:
    """An empty cache.

    Args:
      config: the model's configuration.
      batch: number of sequences.
      slots: tokens each sequence can hold.

    Returns:
      Zeros in the compute dtype; `lengths` 0.

    Raises:
      ValueError: `batch` or `slots` below 1, or more slots than the context length.

    >>> init_cache(LMConfig(num_layers=2), batch=1, slots=8).layers[0].keys.shape
    (1, 8, 4, 32)
    """
    if batch < 1:
        raise ValueError(f"batch: must be at least 1, got {batch}")
    if not 1 <= slots <= config.context_length:
        raise ValueError(f"slots: must be between 1 and context_length {config.context_length}, got {slots}")

    def layer(slots: int) -> LayerCache:
        shape = (batch, slots, config.resolved_num_kv_heads, config.resolved_head_dim)
        zeros = jnp.zeros((config.num_layers, *shape) if config.scan_layers else shape, config.compute_dtype)
        return LayerCache(zeros, zeros)

    pruned = [i in config.pruned_layers for i in range(1 if config.scan_layers else config.num_layers)]
    sizes = [cache_slots(slots, config.l2a.window, pruned=p, sinks=config.l2a.sinks) for p in pruned]
    return KVCache(tuple(map(layer, sizes)), jnp.zeros(batch, jnp.int32))


def cache_bytes(config: LMConfig, tokens: int) -> tuple[int, int]:
    """Bytes that the keys and values of one sequence take.

    Args:
      config: the model's configuration.
      tokens: length of the sequence.

    Returns:
      With pruned layers as they are, and with none pruned.

    >>> config = LMConfig(num_layers=2, attention="l2a", pruned_layers=(1,))
    >>> cache_bytes(config, 1024)
    (1310720, 2097152)
    """
    pruned = [i in config.pruned_layers for i in range(config.num_layers)]
    held, all_layers = (
        kv_cache_bytes(
            which,
            tokens,
            window=config.l2a.window,
            kv_heads=config.resolved_num_kv_heads,
            head_dim=config.resolved_head_dim,
            dtype=config.compute_dtype,
            sinks=config.l2a.sinks,
        )
        for which in (pruned, [False] * config.num_layers)
    )
    return held, all_layers


def append(
    cache: LayerCache,
    keys: Float[Array, "batch seq kv_heads head_dim"],
    values: Float[Array, "batch seq kv_heads head_dim"],
    lengths: Int[Array, " batch"] | None,
) -> LayerCache:
    """Write `seq` new tokens of every row behind the `lengths` tokens it already holds; None: the cache is empty."""
    if lengths is None:  # no zeros to be made first, and no scatter
        rest = cache.keys.shape[1] - keys.shape[1]
        pad = lambda new, old: jnp.pad(new.astype(old.dtype), ((0, 0), (0, rest), (0, 0), (0, 0)))  # noqa: E731
        return LayerCache(pad(keys, cache.keys), pad(values, cache.values))

    def write(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    def update(old: Array, new: Array) -> Array:
        return jax.vmap(write)(old, new.astype(old.dtype), lengths)

    return LayerCache(update(cache.keys, keys), update(cache.values, values))
