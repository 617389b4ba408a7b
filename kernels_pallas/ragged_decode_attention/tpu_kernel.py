"""The TPU kernel of decoding attention: a walk over blocks of pages, and one over rings; see `pallas_tpu`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas.flash.rules import MASKED
from kernels_pallas.ragged_decode_attention.cache import ring_positions


class Shape(NamedTuple):
    """What the kernel knows at compile time.

    Attributes:
      rows: Query tokens of a sequence.
      group: Query heads of a key head.
      n_sink: As in the public function.
      n_recent: As in the public function.
      scale: Factor on the scores, for exponentials to base 2.
      pages: Of a block.
      shares: Programs of the grid.
    """

    rows: int
    group: int
    n_sink: int
    n_recent: int
    scale: float
    pages: int
    shares: int


def cut(total: Any, share: Any, shares: int) -> Any:
    """Where a share begins."""
    return jax.lax.div(total * share, jnp.int32(shares))


class _Pool(NamedTuple):
    """References of one kind of heads: in HBM, two buffers each, and what leaves."""

    query: Any
    held: Any
    scales: Any
    out: Any
    query_buffer: Any
    held_buffer: Any
    scales_buffer: Any
    result: Any
    arrived: Any
    left: Any


def kernel(lengths, table, begins, firsts, *refs, shape, quantized, kinds, max_pages):
    """One program.

    Args:
      lengths: Tokens of every sequence.
      table: Pages of all sequences, `max_pages` each.
      begins: Where a sequence begins in the list of all blocks, and at the end how many there are.
      firsts: The sequence in which a share begins.
      *refs: For each kind of heads that there is, full heads first, its inputs, then its results, then its scratch.
      shape: See there.
      quantized: Whether there are scales.
      kinds: Whether there are full heads, and compressed ones.
      max_pages: See `table`.
    """
    number = sum(kinds)
    each = 3 if quantized else 2
    inputs, outputs, scratch = refs[: each * number], refs[each * number :][:number], list(refs[(each + 1) * number :])

    def pool(index):
        query, held, scales = [*inputs[each * index : each * (index + 1)], None][:3]
        of_query, of_held, of_scales = [*(scratch.pop(0) for _ in range(each)), None][:3]
        result, arrived, left = (scratch.pop(0) for _ in range(3))
        return _Pool(query, held, scales, outputs[index], of_query, of_held, of_scales, result, arrived, left)

    paged = pool(0) if kinds[0] else None
    state = [scratch.pop(0) for _ in range(3)] if kinds[0] else None
    ringed = pool(number - 1) if kinds[1] else None

    share = pl.program_id(0)
    batch = lengths.shape[0]
    ring_range = [cut(jnp.int32(batch), share + i, shape.shares) for i in range(2)]
    if ringed is not None:  # ahead of all pages
        pl.when(ring_range[0] < ring_range[1])(lambda: _start(_ring_copies(ringed, 0, ring_range[0])))
    if paged is not None:
        _walk_pages(shape, paged, state, lengths, table, begins, firsts, max_pages)
    if ringed is not None:
        _walk_rings(shape, ringed, lengths, *ring_range)


Copies = list[tuple[Any, Any]]
"""A condition (or None) and a copy."""


def _start(copies: Copies) -> None:
    for condition, copy in copies:
        copy.start() if condition is None else pl.when(condition)(copy.start)


def _wait(copies: Copies) -> None:
    for condition, copy in copies:
        copy.wait() if condition is None else pl.when(condition)(copy.wait)


def _ring_copies(pool: _Pool, turn: Any, b: Any) -> Copies:
    pairs = [(pool.query, pool.query_buffer), (pool.held, pool.held_buffer), (pool.scales, pool.scales_buffer)]
    return [
        (None, pltpu.make_async_copy(source.at[b], buffer.at[turn], pool.arrived.at[turn]))
        for source, buffer in pairs
        if source is not None
    ]


def _walk_pages(shape, pool, state, lengths, table, begins, firsts, max_pages):
    """The blocks of this program's share."""
    share, batch = pl.program_id(0), lengths.shape[0]
    page_size = pool.held.shape[2]
    block = shape.pages * page_size
    low, high = (cut(begins[batch], share + i, shape.shares) for i in range(2))
    largest, total, acc = state

    def copies(turn, b, number):
        found = [(None, pltpu.make_async_copy(pool.query.at[b], pool.query_buffer.at[turn], pool.arrived.at[turn]))]
        for j in range(shape.pages):
            place = number * shape.pages + j
            page = table[b * max_pages + jnp.minimum(place, max_pages - 1)]
            exists = place * page_size < lengths[b]
            tokens = pl.ds(j * page_size, page_size)
            to = pool.held_buffer.at[turn, :, tokens]
            found.append((exists, pltpu.make_async_copy(pool.held.at[page], to, pool.arrived.at[turn])))
            if pool.scales is not None:
                to = pool.scales_buffer.at[turn, :, :, tokens]
                found.append((exists, pltpu.make_async_copy(pool.scales.at[page], to, pool.arrived.at[turn])))
        return found

    def leave(b):
        return pltpu.make_async_copy(pool.result, pool.out.at[share, b], pool.left)

    def step(i, carry):
        b, number, sent = carry
        turn = jax.lax.rem(i - low, 2)
        ends = i + 1 == begins[b + 1]
        next_b, next_number = jnp.where(ends, b + 1, b), jnp.where(ends, 0, number + 1)
        pl.when(i + 1 < high)(lambda: _start(copies(1 - turn, next_b, next_number)))
        _wait(copies(turn, b, number))

        @pl.when((number == 0) | (i == low))
        def _():
            largest[...] = jnp.full_like(largest, MASKED)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        length, first = lengths[b], number * block
        pl.when(first + block > length)(lambda: _clear(pool, turn, lambda s: first + s < length))
        for h in range(pool.held.shape[1]):
            at = (turn, h)

            def visible(s, t):
                return first + s <= t

            scores, seen = _scores(shape, pool, at, length, visible)
            old = largest[h]
            new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp2(scores - new[:, :1]), 0.0)
            faded = jnp.exp2(old - new)
            largest[h] = new
            total[h] = total[h] * faded + weights.sum(axis=1, keepdims=True)
            acc[h] = acc[h] * faded[:, :1] + _sums(pool, at, weights, lambda s: first + s < length)

        leaves = ends | (i + 1 == high)

        @pl.when(leaves)
        def _():
            pl.when(sent > 0)(lambda: leave(b).wait())
            for h in range(pool.held.shape[1]):
                some = total[h] > 0
                safe = jnp.where(some, total[h], 1.0)
                lse = jnp.where(some, largest[h] + jnp.log2(safe), MASKED)
                lane = jax.lax.broadcasted_iota(jnp.int32, acc.shape[1:], 1)
                out = acc[h] / safe[:, :1]
                pool.result[h] = jnp.where(lane < acc.shape[2] // 2, lse[:, :1], out)
            leave(b).start()

        return next_b, next_number, sent + leaves.astype(jnp.int32)

    b = firsts[share]
    number = low - begins[b]
    pl.when(low < high)(lambda: _start(copies(0, b, number)))
    _, _, sent = jax.lax.fori_loop(low, high, step, (b, number, jnp.int32(0)))
    pl.when(sent > 0)(lambda: leave(0).wait())


def _walk_rings(shape, pool, lengths, low, high):
    """The rings of this program's sequences."""
    slots = pool.held.shape[2]

    def leave(b):
        return pltpu.make_async_copy(pool.result, pool.out.at[b], pool.left)

    def step(b, _):
        turn = jax.lax.rem(b - low, 2)
        pl.when(b + 1 < high)(lambda: _start(_ring_copies(pool, 1 - turn, b + 1)))
        _wait(_ring_copies(pool, turn, b))
        length = lengths[b]

        def position(slot):
            return ring_positions(length, slot, shape.n_sink, slots)

        def held(slot):
            return position(slot) >= 0

        def visible(slot, t):
            s = position(slot)
            return (s >= 0) & (s <= t) & ((s < shape.n_sink) | (t - s < shape.n_recent))

        pl.when(length < slots)(lambda: _clear(pool, turn, held))
        pl.when(b > low)(lambda: leave(b).wait())
        for h in range(pool.held.shape[1]):
            at = (turn, h)
            scores, seen = _scores(shape, pool, at, length, visible)
            weights = jnp.where(seen, jnp.exp2(scores - scores.max(axis=1, keepdims=True)), 0.0)
            total = weights.sum(axis=1, keepdims=True)
            pool.result[h] = _sums(pool, at, weights, held) / jnp.where(total > 0, total, 1.0)
        leave(b).start()
        return 0

    jax.lax.fori_loop(low, high, step, 0)
    pl.when(low < high)(lambda: leave(0).wait())


def _clear(pool: _Pool, turn: Any, known: Callable[[Array], Array]) -> None:
    """Zeros where a buffer holds no tokens: what lies there may be NaN. Codes cannot be."""
    if pool.scales is not None:
        return
    place = jax.lax.broadcasted_iota(jnp.int32, pool.held_buffer.shape[2:], 0)
    for h in range(pool.held_buffer.shape[1]):
        held = pool.held_buffer[turn, h].astype(jnp.float32)  # v5e has no 16-bit selection
        pool.held_buffer[turn, h] = jnp.where(known(place), held, 0.0).astype(pool.held_buffer.dtype)


def _dot(x: Array, y: Array, dimension: int) -> Array:
    """x · y over the last dimension of x and `dimension` of y, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    numbers = (((1,), (dimension,)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=jnp.float32)


def _scores(shape: Shape, pool: _Pool, at: Any, length: Any, visible: Callable) -> tuple[Array, Array]:
    """Scores to base 2 of one head, (query rows, tokens), and which of them are visible."""
    query = pool.query_buffer[at]
    scores = _dot(query, pool.held_buffer[at].astype(query.dtype), 1) * shape.scale
    if pool.scales is not None:
        scores *= pool.scales_buffer[(*at, pl.ds(0, 1))]
    row, place = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    t = length - shape.rows + jax.lax.div(row, jnp.int32(shape.group))
    seen = visible(place, t)
    return jnp.where(seen, scores, MASKED), seen


def _sums(pool: _Pool, at: Any, weights: Array, known: Callable[[Array], Array]) -> Array:
    """weights · (key, value) of one head; of no use where the key would be."""
    dtype = pool.query_buffer.dtype
    if pool.scales is not None:
        scales = pool.scales_buffer[(*at, pl.ds(1, 1))]
        place = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        weights *= jnp.where(known(place), scales, 0.0)
    return _dot(weights.astype(dtype), pool.held_buffer[at].astype(dtype), 0)
