"""Decoding attention as the formula reads: every page of every sequence gathered, scores of all of it, and a mask."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.flash.reference import masked_attention
from kernels_pallas.ragged_decode_attention.cache import PagedCache, ring_positions
from kernels_pallas.ragged_decode_attention.heads import join, split


def ragged_decode_attention(
    query: Float[Array, "batch rows heads dim"],
    cache: PagedCache,
    lengths: Int[Array, " batch"],
    page_table: Int[Array, "batch max_pages"] | None,
    *,
    kinds: tuple[bool, ...],
    n_sink: int,
    n_recent: int,
    scale: float,
) -> Float[Array, "batch rows heads dim"]:
    """See `api.ragged_decode_attention`."""
    rows = query.shape[1]
    t = (lengths[:, None] - rows + jnp.arange(rows))[:, :, None]
    parts = {}
    for full in set(kinds):
        if full:
            assert page_table is not None
            held, scales, position = _gathered(cache, page_table, lengths)
        else:
            held, scales, slots = cache.rings, cache.ring_scales, cache.rings.shape[2]
            position = ring_positions(lengths[:, None], jnp.arange(slots), n_sink, slots)
        s = position[:, None]
        visible = (s >= 0) & (s <= t)
        if not full:
            visible &= (s < n_sink) | (t - s < n_recent)
        held = jnp.where((position >= 0)[:, None, :, None], held.astype(jnp.float32), 0.0)
        key, value = (jnp.swapaxes(x, 1, 2) for x in jnp.split(held, 2, axis=-1))
        if scales is not None:
            known = jnp.where((position >= 0)[:, None, None], scales, 0.0)
            key, value = (x * jnp.swapaxes(known[:, :, i], 1, 2)[..., None] for i, x in enumerate((key, value)))
        picked = split(query, kinds, full)  # (batch, key heads, (row, group), dim)
        picked = join(picked, None, (True,) * picked.shape[1], rows)
        out, _ = masked_attention(picked, key, value, visible, scale)
        parts[full] = split(out, (True,) * key.shape[2], True)
    return join(parts.get(True), parts.get(False), kinds, rows)


def _gathered(cache: PagedCache, page_table: Array, lengths: Array) -> tuple[Array, Array | None, Array]:
    """Tokens and scales of all pages of a sequence, (batch, heads, seq, ...), and their positions, -1 beyond it."""
    batch, max_pages = page_table.shape
    seq = max_pages * cache.page_size
    held = jnp.swapaxes(cache.pages[page_table], 1, 2)
    held = held.reshape(batch, held.shape[1], seq, -1)
    scales = cache.page_scales
    if scales is not None:
        scales = jnp.moveaxis(scales[page_table], 1, 3).reshape(batch, held.shape[1], 2, seq)
    place = jnp.arange(seq)
    return held, scales, jnp.where(place < lengths[:, None], place, -1)
