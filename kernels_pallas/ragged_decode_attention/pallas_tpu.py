"""Decoding attention on TPUs: one kernel walks the pages of full heads and the rings of compressed ones.

The blocks of pages of all sequences, one after the other, are cut into equal shares, one for each program of the grid:
the work is balanced whatever the lengths, and chips with two cores (v4, v5p) share it out. A program keeps one block
ahead: while it computes, the pages of the next block are copied, also across the border of two sequences. Pages past
a sequence's length are never fetched. Where a share ends within a sequence, both halves are merged by their log-sum-exp
afterwards. Rings are read the same way, each by one program.

Key and value of a token lie side by side in 2 dim lanes. With zeros behind it, query · (key, value) is query · key; of
weights · (key, value) the second half is the output, and the first half, of no use, carries the log-sum-exp.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat, autotune
from kernels_pallas.flash.rules import MASKED
from kernels_pallas.ragged_decode_attention.cache import PagedCache, ring_positions
from kernels_pallas.ragged_decode_attention.heads import join, split

KERNEL_NAME = "ragged_decode_attention"

_VMEM_BYTES = 14 * 2**20  # of the 16 MiB that a kernel gets on v4 and v5e without asking for more
_SMEM_BYTES = 256 * 2**10  # for page table and lengths
_MOST_PAGES = 32  # copies of a block
_LOG2_E = 1.4426950408889634


class Config(NamedTuple):
    """`pages` of a block, and `shares` that the blocks of all sequences are cut into."""

    pages: int
    shares: int


class Case(NamedTuple):
    """What block sizes depend on: the key of tuned ones.

    Attributes:
      batch: Sequences.
      full: Full heads.
      compressed: Compressed heads.
      rows: Query rows of a key head, in whole tiles.
      dim: Head size.
      dtype: What is multiplied.
      pool: dtype of the cache.
      page_size: Tokens of a page.
      max_pages: Pages of a sequence, 0 where no head is full.
      slots: Tokens of a ring.
    """

    batch: int
    full: int
    compressed: int
    rows: int
    dim: int
    dtype: str
    pool: str
    page_size: int
    max_pages: int
    slots: int

    @property
    def lanes(self) -> int:
        """Key and value of a token, in whole registers."""
        return _up(2 * self.dim, 128)

    def vmem_bytes(self, config: Config) -> int:
        """What the kernel takes of VMEM: buffers, and one head's tokens, scores and weights as they are multiplied."""
        itemsize, query_itemsize = (jnp.dtype(x).itemsize for x in (self.pool, self.dtype))
        total = 0
        for heads, tokens in ((self.full, config.pages * self.page_size), (self.compressed, self.slots)):
            if not heads:
                continue
            total += 2 * heads * _up(tokens, 32 // itemsize) * self.lanes * itemsize
            total += 2 * heads * 8 * _up(tokens, 128) * 4 if itemsize == 1 else 0
            total += 2 * heads * self.rows * self.lanes * query_itemsize  # queries
            total += 2 * heads * self.rows * (self.lanes + 128) * 4  # results, sums, maxima
            total += tokens * self.lanes * 10 + 4 * self.rows * _up(tokens, 128) * 4  # float32 in three parts
        return total


def case_of(query: Array, cache: PagedCache, page_table: Array | None, kinds: tuple[bool, ...]) -> Case:
    """What block sizes of a call depend on."""
    pool = cache.pages.dtype
    return Case(
        batch=query.shape[0],
        full=kinds.count(True),
        compressed=kinds.count(False),
        rows=_up(query.shape[1] * (query.shape[2] // len(kinds)), 16),  # a tile of any dtype
        dim=query.shape[3],
        dtype=jnp.dtype(query.dtype if pool == jnp.int8 else jnp.promote_types(query.dtype, pool)).name,
        pool=pool.name,
        page_size=cache.page_size,
        max_pages=0 if page_table is None else page_table.shape[1],
        slots=cache.rings.shape[2],
    )


def unsupported(
    query: Array, cache: PagedCache, page_table: Array | None, *, kinds: tuple[bool, ...], **statics: Any
) -> str | None:
    """Returns why the kernel cannot run this call, None if it can."""
    pool = cache.pages.dtype
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"query of {query.dtype} (bfloat16 or float32)"
    if pool not in (jnp.bfloat16, jnp.float32, jnp.int8):
        return f"a cache of {pool} (bfloat16, float32 or int8)"
    multiple = 128 if pool == jnp.int8 else 32 // pool.itemsize
    if any(kinds) and cache.page_size % multiple:
        return f"pages of {cache.page_size} tokens (a multiple of {multiple} for {pool})"
    if page_table is not None and 4 * (page_table.size + 2 * len(page_table)) > _SMEM_BYTES:
        return f"a page table of {page_table.size} entries (at most {_SMEM_BYTES // 4} with the lengths)"
    needed = case_of(query, cache, page_table, kinds).vmem_bytes(Config(1, 1))
    if needed > _VMEM_BYTES:
        return f"{needed} bytes of VMEM for two pages and two rings (at most {_VMEM_BYTES})"
    return None


def unsupported_device() -> str | None:
    """Returns why this machine's device cannot run the kernel: every TPU can."""
    return None


def candidates(key: Mapping[str, Any]) -> list[Config]:
    """Configs worth trying for a `Case`, those that fit the VMEM of every chip."""
    case = Case(**key)
    most = max(1, min(_MOST_PAGES, case.max_pages))
    pages = sorted({min(most, 2**i) for i in range(6)})
    found = [Config(n, shares) for n in pages for shares in (1, 2)]
    return [config for config in found if case.vmem_bytes(config) <= _VMEM_BYTES]


def heuristic(case: Case) -> Config:
    """Blocks of about a megabyte, of 128 to 1024 tokens, and a share for each of two cores."""
    token_bytes = max(1, case.full) * case.lanes * jnp.dtype(case.pool).itemsize
    tokens = min(1024, max(128, 2**20 // token_bytes))
    pages = max(1, min(tokens // case.page_size, _MOST_PAGES, case.max_pages))
    while pages > 1 and case.vmem_bytes(Config(pages, 2)) > _VMEM_BYTES:
        pages //= 2
    return Config(pages, 2)


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
    config: Config | None = None,
    interpret: Any = False,
) -> Float[Array, "batch rows heads dim"]:
    """See `api.ragged_decode_attention`.

    Args:
      query: bfloat16 or float32.
      cache: bfloat16, float32 or int8.
      lengths: At most what a row of `page_table` holds.
      page_table: Pages that exist; None where no head is full.
      kinds: `head_kind`.
      n_sink: See there.
      n_recent: See there.
      scale: See there.
      config: None takes a tuned one, or else `heuristic`.
      interpret: As in `pallas_call`.

    Returns:
      Shape and dtype of `query`.

    Raises:
      ValueError: A config below 1.
    """
    rows, dim = query.shape[1], query.shape[3]
    case = case_of(query, cache, page_table, kinds)
    if config is None:
        found = autotune.lookup(KERNEL_NAME, "pallas_tpu.forward", case._asdict())
        config = heuristic(case) if found is None else Config(**found)
    if min(config) < 1:
        raise ValueError(f"config must have positive numbers, got {config}")

    def queries(full: bool) -> Array:
        q = split(query, kinds, full).astype(case.dtype)
        return jnp.pad(q, ((0, 0), (0, 0), (0, case.rows - q.shape[2]), (0, dim)))

    group = query.shape[2] // len(kinds)
    shape = _Shape(rows, group, n_sink, n_recent, scale * _LOG2_E, config.pages, config.shares)
    pools = (queries(True) if any(kinds) else None, None if all(kinds) else queries(False))
    full, compressed = (
        None if x is None else x[:, :, : rows * group, dim:]
        for x in _call(shape, *pools, cache, lengths, page_table, interpret)
    )
    return join(full, compressed, kinds, rows).astype(query.dtype)


class _Shape(NamedTuple):
    """What the kernel knows at compile time; `scale` is for exponentials to base 2."""

    rows: int
    group: int
    n_sink: int
    n_recent: int
    scale: float
    pages: int
    shares: int


def _up(n: int, multiple: int) -> int:
    return pl.cdiv(n, multiple) * multiple


def _cut(total: Any, share: Any, shares: int) -> Any:
    """Where a share begins."""
    return jax.lax.div(total * share, jnp.int32(shares))


def _call(
    shape: _Shape,
    full: Array | None,
    compressed: Array | None,
    cache: PagedCache,
    lengths: Array,
    page_table: Array | None,
    interpret: Any,
) -> tuple[Array | None, Array | None]:
    batch = lengths.shape[0]
    shares = shape.shares
    # At least one block for every sequence, so that each has a result.
    block = shape.pages * cache.page_size
    begins = jnp.pad(jnp.cumsum(jnp.maximum(1, -(-lengths // block))), (1, 0)).astype(jnp.int32)
    cuts = _cut(begins[-1], jnp.arange(shares + 1, dtype=jnp.int32), shares)
    firsts = (jnp.searchsorted(begins, cuts[:-1], side="right") - 1).astype(jnp.int32)
    table = jnp.zeros(batch, jnp.int32) if page_table is None else page_table.reshape(-1)

    operands: list[Array] = []
    outputs: list[Any] = []
    scratch: list[Any] = []
    for q in (full, compressed):
        if q is None:
            continue
        heads, query_rows, two_dim = q.shape[1:]
        held, scales = (cache.pages, cache.page_scales) if q is full else (cache.rings, cache.ring_scales)
        tokens = block if q is full else held.shape[2]
        operands += [q, held] + ([] if scales is None else [scales])
        scratch += [pltpu.VMEM((2, heads, query_rows, two_dim), q.dtype)]
        scratch += [pltpu.VMEM((2, heads, tokens, two_dim), held.dtype)]
        scratch += [] if scales is None else [pltpu.VMEM((2, heads, 2, tokens), jnp.float32)]
        result = (heads, query_rows, two_dim)
        outputs += [_compat.shape_like((shares, batch, *result) if q is full else (batch, *result), q, jnp.float32)]
        scratch += [pltpu.VMEM(result, jnp.float32), pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA]
        if q is full:
            state = pltpu.VMEM((heads, query_rows, 128), jnp.float32)
            scratch += [state, state, pltpu.VMEM(result, jnp.float32)]
    kernel = functools.partial(
        _kernel,
        shape=shape,
        quantized=cache.page_scales is not None,
        kinds=(full is not None, compressed is not None),
        max_pages=1 if page_table is None else page_table.shape[1],
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(shares,),
            in_specs=[anywhere] * len(operands),
            out_specs=[anywhere] * len(outputs),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name=KERNEL_NAME,
        interpret=interpret,
    )(lengths, table, begins, firsts, *operands)
    found = iter(results)
    full = None if full is None else _merged(next(found), begins, cuts)
    return full, None if compressed is None else next(found)


def _merged(parts: Float[Array, "shares batch heads rows two_dim"], begins: Array, cuts: Array) -> Array:
    """One result for every sequence, of those of the shares that have a block of it; the others are not written."""
    has = (begins[:-1] < cuts[1:, None]) & (begins[1:] > cuts[:-1, None])
    has = has[:, :, None, None, None]
    lse = jnp.where(has, parts[..., :1], MASKED)
    weights = jnp.exp2(lse - lse.max(axis=0))
    weights = jnp.where(has, weights, 0.0)
    return (weights * jnp.where(has, parts, 0.0)).sum(axis=0) / weights.sum(axis=0)


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


def _kernel(lengths, table, begins, firsts, *refs, shape, quantized, kinds, max_pages):
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
    ring_range = [_cut(jnp.int32(batch), share + i, shape.shares) for i in range(2)]
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
    low, high = (_cut(begins[batch], share + i, shape.shares) for i in range(2))
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


def _scores(shape: _Shape, pool: _Pool, at: Any, length: Any, visible: Callable) -> tuple[Array, Array]:
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
