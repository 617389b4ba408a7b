"""Decoding with L2A: full caches for layers with a router, ring buffers of one window for pruned ones.

Both are one data structure. The entry at position p lies in slot p where p < sinks, else in slot
sinks + (p - sinks) mod (slots - sinks): a ring where the slots do not suffice for the sequence, the plain order where
they do. Which positions a ring holds follows from the number of tokens that went in.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlib_icml.attention.l2a import Routing, combine_rows
from jaxlib_icml.nn import masked_attention

__all__ = ["L2ACache", "cache_slots", "decode_attention", "fill_cache", "init_cache"]


class L2ACache(NamedTuple):
    """Keys and values of one layer.

    Attributes:
      keys: (batch, slots, kv_heads, head_dim), rotated.
      values: like `keys`.
      lengths: (batch,) tokens of each sequence so far, those that a ring no longer holds included.
    """

    keys: Float[Array, "batch slots kv_heads head_dim"]
    values: Float[Array, "batch slots kv_heads head_dim"]
    lengths: Int[Array, " batch"]


def cache_slots(seq: int, window: int, *, pruned: bool, sinks: int = 0, extra: int = 0) -> int:
    """Slots that a layer needs for sequences of up to `seq` tokens: all, or where it is pruned sinks and window.

    Args:
      seq: Tokens of the longest sequence.
      window: w.
      pruned: The layer has no global attention.
      sinks: First positions that stay visible.
      extra: Last tokens that may be taken back, by lowering `lengths` (speculative decoding).

    Returns:
      A number of slots.

    >>> cache_slots(1000, 64, pruned=True), cache_slots(1000, 64, pruned=False), cache_slots(40, 64, pruned=True)
    (64, 1000, 40)
    """
    return min(seq, sinks + window + extra) if pruned else seq


def init_cache(batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> L2ACache:
    """An empty cache of zeros.

    Args:
      batch: Sequences.
      slots: See `cache_slots`.
      kv_heads: Key heads.
      head_dim: Size of a head.
      dtype: That of keys and values.

    Returns:
      The cache.

    Raises:
      ValueError: a size below 1.

    >>> init_cache(2, 8, 1, 4).keys.shape
    (2, 8, 1, 4)
    """
    for name, size in (("batch", batch), ("slots", slots), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    zeros = jnp.zeros((batch, slots, kv_heads, head_dim), dtype)
    return L2ACache(zeros, zeros, jnp.zeros(batch, jnp.int32))


def fill_cache(
    cache: L2ACache,
    keys: Float[Array, "batch seq kv_heads head_dim"],
    values: Float[Array, "batch seq kv_heads head_dim"],
    lengths: Int[Array, " batch"] | None = None,
    *,
    sinks: int = 0,
) -> L2ACache:
    """Put the keys and values of prompts into an empty cache.

    Args:
      cache: Says the number of slots; what it holds is given up.
      keys: Rotated keys of positions 0, 1, ...
      values: Values.
      lengths: Tokens of each prompt, the rest of its row being padding; None: all.
      sinks: First positions that stay visible.

    Returns:
      The filled cache.

    Raises:
      ValueError: shapes that do not fit.

    >>> prompt = jnp.arange(5.0)[None, :, None, None]
    >>> fill_cache(init_cache(1, 3, 1, 1), prompt, prompt).keys[0, :, 0, 0].tolist()  # positions 3, 4 and 2
    [3.0, 4.0, 2.0]
    """
    _check_new(cache, keys, values)
    batch, seq = keys.shape[:2]
    slots = cache.keys.shape[1]
    lengths = jnp.full(batch, seq, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape ({batch},), got {lengths.shape}")
    if seq <= slots:
        pad = lambda new, old: jnp.pad(new.astype(old.dtype), ((0, 0), (0, slots - seq), (0, 0), (0, 0)))  # noqa: E731
        return L2ACache(pad(keys, cache.keys), pad(values, cache.values), lengths)
    held = _held_positions(lengths, slots, sinks)

    def take(new: Array, old: Array) -> Array:
        return jnp.take_along_axis(new, jnp.maximum(held, 0)[:, :, None, None], axis=1).astype(old.dtype)

    return L2ACache(take(keys, cache.keys), take(values, cache.values), lengths)


def decode_attention(
    q: Float[Array, "batch new heads head_dim"],
    k: Float[Array, "batch new kv_heads head_dim"],
    v: Float[Array, "batch new kv_heads head_dim"],
    cache: L2ACache,
    routing: Routing | None,
    *,
    window: int,
    sinks: int = 0,
    combine: str = "replace",
    estimator: str = "st",
) -> tuple[Float[Array, "batch new heads head_dim"], L2ACache]:
    """Attention of the next tokens of every sequence, usually one; sequences may differ in length.

    With routing, the cache must hold every position. The local branch reads a slice of it, and all of it is read only
    where at least one token of the batch is routed. Without, the layer is pruned, and window and sinks must fit in the
    cache. Values are those of `l2a_attention` where no token is dropped.

    Args:
      q: Rotated queries of the tokens that follow those in the cache.
      k: Their rotated keys; heads must be a multiple of kv_heads.
      v: Their values.
      cache: Keys and values of the tokens before.
      routing: (batch, new) decisions and probabilities; None for a pruned layer.
      window: w.
      sinks: First positions that every token sees too.
      combine: As for `l2a_attention`.
      estimator: As for `l2a_attention`.

    Returns:
      (batch, new, heads, head_dim) in `q`'s dtype, and the cache with the new tokens in it.

    Raises:
      ValueError: shapes that do not fit; a full cache where the lengths are known at trace time.

    >>> q = jnp.ones((1, 1, 2, 4)); cache = init_cache(1, 3, 1, 4)
    >>> out, cache = decode_attention(q, q[:, :, :1], 5 * q[:, :, :1], cache, None, window=3)
    >>> float(out[0, 0, 0, 0]), int(cache.lengths[0])
    (5.0, 1)
    """
    _check_new(cache, k, v)
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k must have a number of heads that divides q's {q.shape[2]}, got {k.shape[2]}")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    new, slots = q.shape[1], cache.keys.shape[1]
    t = cache.lengths[:, None] + jnp.arange(new)

    def near(s: Array) -> Array:
        s, rows = s[:, None, :], t[:, :, None]
        return (s >= 0) & (s <= rows) & ((s > rows - window) | (s < sinks))

    if routing is None:
        held = _held_positions(cache.lengths, slots, sinks)
        keys, values = (
            jnp.concatenate([old, x.astype(old.dtype)], 1) for old, x in zip(cache[:2], (k, v), strict=True)
        )
        out = masked_attention(q, keys, values, near(jnp.concatenate([held, t], axis=1)))
        return out, _write(cache, k, v, sinks)

    if routing.mask.shape != q.shape[:2]:
        raise ValueError(f"routing.mask must have q's (batch, new) = {q.shape[:2]}, got {routing.mask.shape}")
    lengths = cache.lengths
    if not isinstance(lengths, jax.core.Tracer) and int(lengths.max()) + new > slots:
        raise ValueError(f"cache has {slots} slots, too few for {int(lengths.max())} tokens and {new} more")
    cache = _write(cache, k, v, sinks)
    size, first = min(window + new - 1, slots), min(sinks, slots)
    start = jnp.clip(lengths - window + 1, 0, slots - size)
    cut = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))
    s = start[:, None] + jnp.arange(size)
    seen = near(s) & (s >= first)[:, None, :]  # sinks come from the beginning of the cache
    keys, values = cut(cache.keys, start), cut(cache.values, start)
    if first:
        keys, values = (
            jnp.concatenate([x[:, :first], part], axis=1) for x, part in zip(cache[:2], (keys, values), strict=True)
        )
        sink_positions = jnp.broadcast_to(jnp.arange(first), (q.shape[0], first))
        seen = jnp.concatenate([near(sink_positions), seen], axis=2)
    local = masked_attention(q, keys, values, seen)

    def everything(local: Array) -> Array:
        wide = masked_attention(q, cache.keys, cache.values, jnp.arange(slots) <= t[:, :, None])
        rows = combine_rows(local, wide, routing.prob, combine=combine, estimator=estimator)
        return jnp.where(routing.mask[:, :, None, None], rows, local)

    return jax.lax.cond(routing.mask.any(), everything, lambda local: local, local), cache


def _held_positions(lengths: Array, slots: int, sinks: int) -> Array:
    """(batch, slots): the position that each slot holds after so many tokens; negative for none."""
    sinks = min(sinks, slots - 1)
    ring, slot, last = slots - sinks, jnp.arange(slots), lengths[:, None] - 1
    # The last position that is congruent to the slot; those before `sinks` have slots of their own.
    latest = last - (last - slot) % ring
    in_ring = jnp.where(latest >= sinks, latest, -1)
    return jnp.where(slot < sinks, jnp.where(slot <= last, slot, -1), in_ring)


def _write(cache: L2ACache, k: Array, v: Array, sinks: int) -> L2ACache:
    new, slots = k.shape[1], cache.keys.shape[1]
    sinks = min(sinks, slots - 1)
    ring = slots - sinks
    positions = cache.lengths[:, None] + jnp.arange(new)
    slot = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % ring)
    if new > ring:  # a later token of this call takes the slot
        overwritten = (positions >= sinks) & (jnp.arange(new) < new - ring)
        slot = jnp.where(overwritten, slots, slot)

    def put(row: Array, x: Array, slot: Array) -> Array:
        return row.at[slot].set(x, mode="drop")

    keys, values = (jax.vmap(put)(old, x.astype(old.dtype), slot) for old, x in zip(cache[:2], (k, v), strict=True))
    return L2ACache(keys, values, cache.lengths + new)


def _check_new(cache: L2ACache, keys: Array, values: Array) -> None:
    batch, _, kv_heads, dim = cache.keys.shape
    for name, x in (("keys", keys), ("values", values)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, kv_heads, dim):
            raise ValueError(f"{name} must have shape ({batch}, new, {kv_heads}, {dim}) like the cache, got {x.shape}")
