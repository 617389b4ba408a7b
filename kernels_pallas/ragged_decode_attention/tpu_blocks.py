"""Blocks of the TPU kernel of decoding attention: what they depend on, what they take, and which to choose."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kernels_pallas.ragged_decode_attention.cache import PagedCache

VMEM_BYTES = 14 * 2**20  # of the 16 MiB that a kernel gets on v4 and v5e without asking for more
_MOST_PAGES = 32  # copies of a block


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


def candidates(key: Mapping[str, Any]) -> list[Config]:
    """Configs worth trying for a `Case`, those that fit the VMEM of every chip."""
    case = Case(**key)
    most = max(1, min(_MOST_PAGES, case.max_pages))
    pages = sorted({min(most, 2**i) for i in range(6)})
    found = [Config(n, shares) for n in pages for shares in (1, 2)]
    return [config for config in found if case.vmem_bytes(config) <= VMEM_BYTES]


def heuristic(case: Case) -> Config:
    """Blocks of about a megabyte, of 128 to 1024 tokens, and a share for each of two cores."""
    token_bytes = max(1, case.full) * case.lanes * jnp.dtype(case.pool).itemsize
    tokens = min(1024, max(128, 2**20 // token_bytes))
    pages = max(1, min(tokens // case.page_size, _MOST_PAGES, case.max_pages))
    while pages > 1 and case.vmem_bytes(Config(pages, 2)) > VMEM_BYTES:
        pages //= 2
    return Config(pages, 2)


def _up(n: int, multiple: int) -> int:
    return pl.cdiv(n, multiple) * multiple
