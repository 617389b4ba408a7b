"""The two-pool cache of decoding: pages for heads that keep every token, rings for heads that keep a few.

`head_kind` says for every key head of a layer whether it is a full head (True: it keeps every token) or a compressed
head (False: it keeps the first `n_sink` tokens and the latest ones). It is static, so both pools have static shapes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from kernels_pallas.flash.arguments import check_integers, concrete

HeadKind: TypeAlias = Sequence[bool] | Bool[Array, " kv_heads"] | Bool[np.ndarray, " kv_heads"]

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8)


class PagedCache(NamedTuple):
    """Keys and values of one layer.

    A page holds `page_size` tokens of one sequence for all full heads: it is allocated, shared between sequences and
    fetched as a whole, so it is the leading axis and one contiguous copy. Inside of a page a head's tokens are
    contiguous, which is the matrix that attention multiplies with. Key and value of a token lie side by side: one copy
    fetches both, and heads of 64 fill the 128 lanes of a TPU, which would pad either alone to twice its size. Neither
    need be cut out again: (query, 0) · (key, value) is query · key, and weights · (key, value) has the output behind.

    Rings belong to sequences, not to pages: slot j < n_sink holds token j, the other slots take turns. They may be
    longer than n_sink + n_recent, by the number of query tokens that one call decodes less one.

    Attributes:
      pages: Full heads: keys, then values; float32, bfloat16, float16 or int8.
      rings: Compressed heads: the same, in the dtype of `pages`.
      page_scales: For int8, the factors of keys and of values of every token and head; else None.
      ring_scales: The same of `rings`.
    """

    pages: Shaped[Array, "pages full_heads page_size two_dim"]
    rings: Shaped[Array, "batch compressed_heads slots two_dim"]
    page_scales: Float32[Array, "pages full_heads 2 page_size"] | None = None
    ring_scales: Float32[Array, "batch compressed_heads 2 slots"] | None = None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.pages.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def init_cache(
    *,
    head_kind: HeadKind,
    dim: int,
    batch: int,
    num_pages: int,
    page_size: int,
    n_sink: int,
    n_recent: int,
    rows: int = 1,
    dtype: Any = jnp.float32,
) -> PagedCache:
    """An empty cache.

    Args:
      head_kind: For every key head whether it is a full head.
      dim: Size of a head.
      batch: Number of sequences.
      num_pages: Pages that all sequences share.
      page_size: Tokens in a page.
      n_sink: First tokens that compressed heads keep.
      n_recent: Latest tokens that they see, the current one included; at least 1.
      rows: Most query tokens of a sequence in one call.
      dtype: float32, bfloat16, float16 or int8.

    Returns:
      Zeros.

    Raises:
      ValueError: A number or dtype out of range.

    >>> kinds, budget = (True, False, False), {"n_sink": 2, "n_recent": 6}
    >>> cache = init_cache(head_kind=kinds, dim=8, batch=2, num_pages=5, page_size=16, **budget)
    >>> cache.pages.shape, cache.rings.shape
    ((5, 1, 16, 16), (2, 2, 8, 16))
    """
    kinds = checked_head_kind(head_kind)
    sizes = {"dim": dim, "batch": batch, "num_pages": num_pages, "page_size": page_size, "rows": rows}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    check_budget(n_sink, n_recent)
    if jnp.dtype(dtype) not in DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16, float16 or int8, got {dtype}")
    full, slots = sum(kinds), n_sink + n_recent + rows - 1
    compressed = len(kinds) - full
    pages = jnp.zeros((num_pages, full, page_size, 2 * dim), dtype)
    rings = jnp.zeros((batch, compressed, slots, 2 * dim), dtype)
    if pages.dtype != jnp.int8:
        return PagedCache(pages, rings)
    return PagedCache(
        pages, rings, jnp.zeros((num_pages, full, 2, page_size)), jnp.zeros((batch, compressed, 2, slots))
    )


def append(
    cache: PagedCache,
    key: Float[Array, "batch rows kv_heads dim"],
    value: Float[Array, "batch rows kv_heads dim"],
    *,
    head_kind: HeadKind,
    lengths: Int[Array, " batch"],
    page_table: Int[Array, "batch max_pages"] | None,
    n_sink: int,
    counts: Int[Array, " batch"] | None = None,
) -> PagedCache:
    """Writes new tokens behind those that a sequence already has, one when decoding, many when reading a prompt.

    Donate the cache when this is a step of its own, else all of it is copied. Sequences may share pages that are full,
    not the page they write to. To take tokens back, pass shorter `lengths` from then on: as long as a ring has
    n_recent + rows - 1 slots besides the sinks, what `rows` tokens overwrote is out of sight.

    Args:
      cache: Where to write.
      key: Shape (batch, rows, kv_heads, dim), floating point; after position encoding.
      value: Shape and dtype of `key`.
      head_kind: For every key head whether it is a full head.
      lengths: Integers of shape (batch,), tokens that a sequence has before.
      page_table: Integers of shape (batch, max_pages), the pages of a sequence in order; None where no head is full.
      n_sink: First tokens that compressed heads keep.
      counts: Integers of shape (batch,), how many of the rows are tokens, the first ones; None: all.

    Returns:
      The cache with the tokens. What does not fit in a sequence's pages, or would go to a page that does not exist, is
      not written for any head.

    Raises:
      ValueError: Shapes, dtypes or numbers that do not fit; tokens that do not fit in a sequence's pages, where lengths
        and pages are known at trace time.

    >>> cache = init_cache(head_kind=(True, False), dim=2, batch=1, num_pages=3, page_size=4, n_sink=1, n_recent=2)
    >>> token = jnp.ones((1, 1, 2, 2))
    >>> table = jnp.array([[2, 0]])
    >>> cache = append(cache, token, token, head_kind=(True, False), lengths=jnp.array([4]), page_table=table, n_sink=1)
    >>> cache.pages[0, 0, 0].tolist()  # position 4 is the first of the second page, which is page 0
    [1.0, 1.0, 1.0, 1.0]
    """
    kinds = checked_head_kind(head_kind)
    check_cache(cache, kinds, key, page_table)
    check_tokens(cache, key, value, kinds)
    batch, rows = key.shape[:2]
    check_integers("lengths", lengths, (batch,))
    counts = jnp.full(batch, rows) if counts is None else counts
    check_integers("counts", counts, (batch,))
    slots = cache.rings.shape[2]
    if n_sink < 0 or (n_sink >= slots and not all(kinds)):
        raise ValueError(f"n_sink must be between 0 and {slots - 1}, as rings have {slots} slots, got {n_sink}")
    check_values(cache, lengths, page_table, counts=counts, rows=rows)

    place = jnp.arange(rows)
    position = lengths[:, None] + place
    written = (place < counts[:, None]) & (position >= 0)
    if any(kinds):
        assert page_table is not None
        page, inside = _page_of(position, page_table, cache)
        written &= (page >= 0) & (page < cache.pages.shape[0])
        cache = _write(cache, _pick(key, value, kinds, True), jnp.where(written, page, cache.pages.shape[0]), inside)
    if not all(kinds):
        recents = slots - n_sink
        slot = jnp.where(position < n_sink, position, n_sink + (position - n_sink) % recents)
        # Of tokens that would share a slot only the latest is written.
        end = jnp.max(jnp.where(written, position + 1, 0), axis=1, keepdims=True)
        written &= (position < n_sink) | (position >= end - recents)
        sequence = jnp.broadcast_to(jnp.arange(batch)[:, None], slot.shape)
        cache = _write(cache, _pick(key, value, kinds, False), sequence, jnp.where(written, slot, slots), rings=True)
    return cache


def _page_of(position: Array, page_table: Array, cache: PagedCache) -> tuple[Array, Array]:
    """The page of a position, -1 where the sequence has none, and the place in it."""
    number = position // cache.page_size
    page = jnp.take_along_axis(page_table, jnp.clip(number, 0, page_table.shape[1] - 1), axis=1)
    return jnp.where(number < page_table.shape[1], page, -1), position % cache.page_size


def _pick(key: Array, value: Array, kinds: tuple[bool, ...], full: bool) -> Array:
    """Keys and values of the heads of one kind, (batch, rows, 2, heads, dim)."""
    heads = np.flatnonzero(np.asarray(kinds) == full)
    return jnp.stack([key, value], axis=2)[:, :, :, heads]


def _write(cache: PagedCache, tokens: Array, leading: Array, inside: Array, rings: bool = False) -> PagedCache:
    """Writes (batch, rows, 2, heads, dim) tokens to (leading, :, inside); indices out of range are not written."""
    data, scales = (cache.rings, cache.ring_scales) if rings else (cache.pages, cache.page_scales)
    if scales is not None:
        tokens, factors = quantized(tokens)
        scales = scales.at[leading, :, :, inside].set(jnp.swapaxes(factors, 2, 3), mode="drop")
    pairs = jnp.moveaxis(tokens, 2, 3).reshape(*tokens.shape[:2], tokens.shape[3], -1)
    data = data.at[leading, :, inside].set(pairs.astype(data.dtype), mode="drop")
    return cache._replace(rings=data, ring_scales=scales) if rings else cache._replace(pages=data, page_scales=scales)


def quantized(x: Float[Array, "*rest dim"]) -> tuple[Int[Array, "*rest dim"], Float32[Array, "*rest"]]:
    """int8 codes between -127 and 127, and the float32 factor of every row; what is not finite comes back as NaN.

    >>> codes, scale = quantized(jnp.array([[0.5, -1.27]]))
    >>> codes.tolist(), round(float(scale[0]), 4)
    ([[50, -127]], 0.01)
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest == 0, 1.0, jnp.where(jnp.isfinite(largest), largest / 127, jnp.nan))
    codes = jnp.round(x / scale[..., None])
    return jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.int8), scale


def ring_positions(length: Array, place: Array, n_sink: int, slots: int) -> Array:
    """Positions that the slots of a ring hold when a sequence has `length` tokens; -1 for none.

    >>> ring_positions(jnp.int32(9), jnp.arange(5), n_sink=2, slots=5).tolist()
    [0, 1, 8, 6, 7]
    """
    recents = slots - n_sink
    last = length - 1 - n_sink  # counted from the sinks, like turns
    latest = jax.lax.rem(jnp.maximum(last, 0), jnp.full_like(last, recents))  # the turn of the last position
    turn = place - n_sink
    recent = jnp.where(turn <= latest, turn, turn - recents) + (last - latest) + n_sink
    recent = jnp.where((last < 0) | (recent < n_sink), -1, recent)
    return jnp.where(place < n_sink, jnp.where(place < length, place, -1), recent)


def checked_head_kind(head_kind: Any) -> tuple[bool, ...]:
    """`head_kind` as a tuple."""
    if isinstance(head_kind, jax.core.Tracer):
        raise ValueError("head_kind must be static, a tuple of bools: the shapes of both pools depend on it")
    kinds = tuple(np.asarray(head_kind).tolist())
    if not kinds or not all(isinstance(kind, bool) for kind in kinds):
        raise ValueError(f"head_kind must have a bool for every key head, got {head_kind!r}")
    return kinds


def check_budget(n_sink: int, n_recent: int) -> None:
    """Raises a ValueError unless a token sees itself."""
    if n_sink < 0:
        raise ValueError(f"n_sink must be at least 0, got {n_sink}")
    if n_recent < 1:
        raise ValueError(f"n_recent must be at least 1, got {n_recent}")


def check_cache(cache: PagedCache, kinds: tuple[bool, ...], tokens: Array, page_table: Array | None) -> None:
    """Raises a ValueError unless the cache has heads of these kinds, and the batch and dim of (batch, ..., dim)."""
    batch, dim = tokens.shape[0], tokens.shape[-1]
    full, compressed = sum(kinds), len(kinds) - sum(kinds)
    pages, rings = cache.pages, cache.rings
    if pages.ndim != 4 or (pages.shape[1], pages.shape[3]) != (full, 2 * dim) or 0 in (pages.shape[0], pages.shape[2]):
        raise ValueError(f"cache.pages must have shape (pages, {full}, page_size, {2 * dim}), got {pages.shape}")
    if rings.ndim != 4 or (*rings.shape[:2], rings.shape[3]) != (batch, compressed, 2 * dim):
        raise ValueError(f"cache.rings must have shape ({batch}, {compressed}, slots, {2 * dim}), got {rings.shape}")
    if pages.dtype not in DTYPES:
        raise ValueError(f"cache.pages must be float32, bfloat16, float16 or int8, got {pages.dtype}")
    if rings.dtype != pages.dtype:
        raise ValueError(f"cache.rings must have the dtype of cache.pages, {pages.dtype}, got {rings.dtype}")
    for name, scales, of in (
        ("page_scales", cache.page_scales, pages),
        ("ring_scales", cache.ring_scales, rings),
    ):
        if (scales is not None) != (of.dtype == jnp.int8):
            raise ValueError(f"cache.{name} must be given for int8 and for nothing else, got {of.dtype}")
        shape = (*of.shape[:2], 2, of.shape[2])
        if scales is not None and (scales.shape != shape or scales.dtype != jnp.float32):
            raise ValueError(f"cache.{name} must be float32 of shape {shape}, got {scales.dtype} of {scales.shape}")
    if page_table is None:
        if full:
            raise ValueError(f"page_table must be given, as {full} heads of head_kind are full")
    elif page_table.ndim != 2 or page_table.shape[0] != batch or not page_table.shape[1]:
        raise ValueError(f"page_table must have shape ({batch}, max_pages), got {page_table.shape}")
    else:
        check_integers("page_table", page_table, page_table.shape)


def check_tokens(cache: PagedCache, key: Array, value: Array, kinds: tuple[bool, ...]) -> None:
    """Raises a ValueError unless these are new tokens for the cache."""
    if key.ndim != 4 or key.shape[2] != len(kinds) or not key.shape[1]:
        raise ValueError(f"key must have shape (batch, rows, {len(kinds)}, dim) by head_kind, got {key.shape}")
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    for name, array in (("key", key), ("value", value)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")


def check_values(
    cache: PagedCache,
    lengths: Array,
    page_table: Array | None,
    *,
    counts: Array | None = None,
    rows: int = 0,
) -> None:
    """Raises a ValueError where lengths, counts or pages are known and out of range."""
    known, added = concrete(lengths), concrete(counts)
    if known is not None and (known < 0).any():
        raise ValueError(f"lengths must be at least 0, got {known.min()}")
    if added is not None and ((added < 0) | (added > rows)).any():
        raise ValueError(f"counts must be between 0 and the {rows} rows, got {added.min()} to {added.max()}")
    if known is None or page_table is None or not cache.pages.shape[1] or (counts is not None and added is None):
        return
    ends = known if added is None else known + added
    most = page_table.shape[1] * cache.page_size
    if (ends > most).any():
        raise ValueError(f"lengths must be at most the {most} tokens of a row of page_table, got {ends.max()}")
    table = concrete(page_table)
    if table is None:
        return
    begins = 0 if added is None else known[:, None] // cache.page_size
    number = np.arange(table.shape[1])
    used = table[(number >= begins) & (number < -(-ends[:, None] // cache.page_size))]
    if ((used < 0) | (used >= cache.pages.shape[0])).any():
        raise ValueError(
            f"page_table must be between 0 and {cache.pages.shape[0] - 1} where lengths reach,"
            f" got {used.min()} to {used.max()}"
        )
