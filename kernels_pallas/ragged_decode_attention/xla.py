"""Decoding attention as a loop over blocks of pages with an online softmax, and one product over rings.

On CPUs the loop walks the blocks that sequences really have, one after the other, so its cost follows the sum of the
lengths. A block is the pages of 128 tokens, copied side by side: on two cores blocks of 128 took half the time of 256
and a third of 512, and copies of single pages half the time of one gather. Elsewhere, where only wide operations are
quick, the loop takes one block of every sequence at a time, as often as the longest one needs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas._compat import same_varying
from kernels_pallas.flash.rules import MASKED
from kernels_pallas.ragged_decode_attention.cache import PagedCache, ring_positions
from kernels_pallas.ragged_decode_attention.heads import join, split

BLOCK, WIDE_BLOCK = 128, 256  # tokens: one sequence at a time, all of them
_MOST_PAGES = 32  # copies in the body of the loop

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

_State = tuple[Array, Array, Array]
"""Largest score, sum of weights, and sum of weighted (key, value)."""


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

    def of_kind(full):
        q = split(query, kinds, full).astype(jnp.float32) * scale
        # With zeros for the values: nothing need be cut out of (key, value).
        return jnp.pad(q, ((0, 0),) * 3 + ((0, q.shape[-1]),))

    full = None if page_table is None else _paged(of_kind(True), cache, lengths, page_table, rows)
    compressed = None if all(kinds) else _ringed(of_kind(False), cache, lengths, rows, n_sink, n_recent)
    return join(full, compressed, kinds, rows).astype(query.dtype)


def _paged(
    q: Float[Array, "batch heads row_group two_dim"], cache: PagedCache, lengths: Array, page_table: Array, rows: int
) -> Float[Array, "batch heads row_group dim"]:
    def by(loop):
        return functools.partial(loop, rows=rows)

    total, out = jax.lax.platform_dependent(
        q, cache, lengths, page_table, cpu=by(_one_by_one), default=by(_all_together)
    )
    return out[..., q.shape[-1] // 2 :] / jnp.where(total > 0, total, 1.0)


def _one_by_one(
    q: Float[Array, "batch heads row_group two_dim"], cache: PagedCache, lengths: Array, page_table: Array, *, rows: int
) -> tuple[Array, Array]:
    batch = q.shape[0]
    pages = max(1, min(BLOCK // cache.page_size, _MOST_PAGES, page_table.shape[1]))
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))

    # The work list: blocks of all sequences in turn, as many as there are places for.
    blocks = -(-lengths // (pages * cache.page_size))
    ends = jnp.cumsum(blocks)
    items = jnp.arange(batch * (page_table.shape[1] // pages))
    sequences = jnp.minimum(jnp.searchsorted(ends, items, side="right"), batch - 1)
    numbers = items - (ends - blocks)[sequences]

    def step(i, carry):
        b, number = sequences[i], numbers[i]
        table = jax.lax.dynamic_slice(page_table, (b, number * pages), (1, pages))[0]
        # Tied to this step, or XLA converts all of the pool to float32 ahead of the loop.
        pool, factors, table = jax.lax.optimization_barrier((cache.pages, cache.page_scales, table))

        def fetch(x, axis):
            copies = [jax.lax.dynamic_index_in_dim(x, table[j], keepdims=False) for j in range(pages)]
            return jnp.concatenate(copies, axis=axis)

        factors = None if factors is None else fetch(factors, 2)
        state = tuple(jax.lax.dynamic_index_in_dim(x, b, keepdims=False) for x in carry)
        news = _block(q[b], fetch(pool, 1), factors, number, lengths[b], rows, state)
        return tuple(jax.lax.dynamic_update_index_in_dim(x, new, b, 0) for x, new in zip(carry, news, strict=True))

    return jax.lax.fori_loop(0, ends[-1], step, _nothing(q, cache, lengths, page_table))[1:]


def _all_together(
    q: Float[Array, "batch heads row_group two_dim"], cache: PagedCache, lengths: Array, page_table: Array, *, rows: int
) -> tuple[Array, Array]:
    heads, two_dim = q.shape[1], q.shape[3]
    pages = max(1, min(WIDE_BLOCK // cache.page_size, page_table.shape[1]))
    block = pages * cache.page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))

    def step(number, carry):
        tables = jax.lax.dynamic_slice_in_dim(page_table, number * pages, pages, axis=1)
        pool, factors, tables = jax.lax.optimization_barrier((cache.pages, cache.page_scales, tables))

        def of_sequence(q, table, length, state):
            held = jnp.swapaxes(pool[table], 0, 1).reshape(heads, block, two_dim)
            of_tokens = None if factors is None else jnp.moveaxis(factors[table], 0, 2).reshape(heads, 2, block)
            return _block(q, held, of_tokens, number, length, rows, state)

        return jax.vmap(of_sequence)(q, tables, lengths, carry)

    count = jnp.max(-(-lengths // block))
    return jax.lax.fori_loop(0, count, step, _nothing(q, cache, lengths, page_table))[1:]


def _nothing(q: Float[Array, "batch heads row_group two_dim"], *like: Any) -> _State:
    """The state before the first block, of all sequences."""
    column = jnp.zeros_like(q[..., :1])
    return same_varying((column + MASKED, column, jnp.zeros_like(q)), like=(q, *like))


def _block(
    q: Float[Array, "heads row_group two_dim"],
    held: Shaped[Array, "heads block two_dim"],
    factors: Float[Array, "heads 2 block"] | None,
    number: Array,
    length: Array,
    rows: int,
    state: _State,
) -> _State:
    """One more block of a sequence."""
    row_group, block = q.shape[1], held.shape[1]
    s = number * block + jnp.arange(block)
    t = length - rows + jnp.arange(row_group) // (row_group // rows)
    # What a page holds beyond the sequence may be NaN. Masking every block, not only the last, doubles the time.
    whole = (number + 1) * block <= length
    held = jax.lax.cond(whole, lambda x, _: x, _cleared, held.astype(jnp.float32), length - number * block)
    scores = _product("hrd,hsd->hrs", q, held)
    if factors is not None:
        factors = jnp.where(s < length, factors, 0.0)
        scores *= factors[:, :1]
    seen = s <= t[:, None]
    scores = jnp.where(seen, scores, MASKED)
    largest, total, out = state
    new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new_largest), 0.0)
    faded = jnp.exp(largest - new_largest)
    total = total * faded + weights.sum(axis=-1, keepdims=True)
    if factors is not None:
        weights *= factors[:, 1:]
    return new_largest, total, out * faded + _product("hrs,hsd->hrd", weights, held)


def _cleared(held: Float[Array, "heads block two_dim"], count: Array) -> Float[Array, "heads block two_dim"]:
    """Zeros in place of all but the first `count` tokens."""
    return jnp.where((jnp.arange(held.shape[1]) < count)[:, None], held, 0.0)


def _ringed(
    q: Float[Array, "batch heads row_group two_dim"],
    cache: PagedCache,
    lengths: Array,
    rows: int,
    n_sink: int,
    n_recent: int,
) -> Float[Array, "batch heads row_group dim"]:
    row_group, two_dim = q.shape[2:]
    slots = cache.rings.shape[2]
    t = (lengths[:, None] - rows + jnp.arange(row_group) // (row_group // rows))[:, None, :, None]
    position = ring_positions(lengths[:, None], jnp.arange(slots), n_sink, slots)
    held = jnp.where((position >= 0)[:, None, :, None], cache.rings.astype(jnp.float32), 0.0)
    s = position[:, None, None]
    visible = (s >= 0) & (s <= t) & ((s < n_sink) | (t - s < n_recent))
    scores = _product("bhrd,bhsd->bhrs", q, held)
    if cache.ring_scales is not None:
        factors = jnp.where((position >= 0)[:, None, None], cache.ring_scales, 0.0)
        scores *= factors[:, :, :1]
    scores = jnp.where(visible, scores, MASKED)
    weights = jnp.where(visible, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if cache.ring_scales is not None:
        weights *= factors[:, :, 1:]
    out = _product("bhrs,bhsd->bhrd", weights, held)
    return out[..., two_dim // 2 :] / jnp.where(total > 0, total, 1.0)
