"""Decoding attention over a two-pool cache: the public function."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat, dispatch
from kernels_pallas.flash.arguments import DTYPES, check_integers, checked_scale
from kernels_pallas.flash.rules import ByPlatform, bound, localized
from kernels_pallas.ragged_decode_attention.cache import (
    HeadKind,
    PagedCache,
    check_budget,
    check_cache,
    check_values,
    checked_head_kind,
)

_OPERATION = "ragged_decode_attention"


def ragged_decode_attention(
    query: Float[Array, "batch rows heads dim"],
    cache: PagedCache,
    lengths: Int[Array, " batch"],
    page_table: Int[Array, "batch max_pages"] | None = None,
    *,
    head_kind: HeadKind,
    n_sink: int,
    n_recent: int,
    scale: float | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "batch rows heads dim"]:
    """Attention of the last tokens of every sequence to all of it, where each key head keeps all tokens or only some.

    The `rows` queries of a sequence are its last tokens, which the cache holds already (`append` them first): row i
    stands at t = lengths - rows + i. Query head h reads key head h // (heads // kv_heads). Where that is a full head it
    attends to all positions s <= t, through the sequence's pages; where it is compressed to s <= t with s < n_sink or
    t - s < n_recent, through its ring. Time follows the sum of the lengths for full heads and does not depend on them
    for compressed heads. Scores and sums are float32 whatever the dtype, int8 is multiplied out in float32.

    For inference only: there is no derivative. `vmap` is one call with more sequences; a batch axis of the pool becomes
    more pages. In programs that `jit` partitions, sequences are shared out and pages are gathered; split pages and key
    heads with `jax.shard_map`.

    Args:
      query: Shape (batch, rows, heads, dim); float32, bfloat16 or float16. `rows` is 1 when decoding token by token.
      cache: As `init_cache` makes it. A ring needs n_sink + n_recent + rows - 1 slots.
      lengths: Integers of shape (batch,), tokens of a sequence, the queries included. Rows before its beginning give 0.
      page_table: Integers of shape (batch, max_pages), the pages of a sequence in order; what lies beyond its length is
        not read. None where no head is full.
      head_kind: For every key head whether it is a full head; static.
      n_sink: First tokens that compressed heads see.
      n_recent: Latest tokens that they see, the query's own included; at least 1.
      scale: Factor on the scores; None is 1 / sqrt(dim).
      implementation: A name, a sequence of names to try in order, or None: the kernel of the platform that the program
        is compiled for, "xla" where there is none.

    Returns:
      Shape (batch, rows, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes, dtypes or numbers that do not fit, an unknown name; lengths beyond a sequence's pages or pages
        that do not exist, where their values are known at trace time (elsewhere they are brought into range).
      UnsupportedError: The implementation asked for cannot run this call on this platform.
      NotImplementedError: A derivative is asked for.

    The decoding of "Which Heads Matter for Reasoning? RL-Guided KV Cache Compression" (arXiv 2510.08525).

    >>> from kernels_pallas.ragged_decode_attention.cache import append, init_cache
    >>> heads, table = (True, False), jnp.array([[1, 0]])
    >>> cache = init_cache(head_kind=heads, dim=4, batch=1, num_pages=2, page_size=4, n_sink=1, n_recent=2)
    >>> v = jnp.arange(6.0)[None, :, None, None] * jnp.ones((1, 6, 2, 4))
    >>> start = jnp.array([0])
    >>> cache = append(cache, 0 * v, v, head_kind=heads, lengths=start, page_table=table, n_sink=1)
    >>> out = ragged_decode_attention(v[:, :1], cache, start + 6, table, head_kind=heads, n_sink=1, n_recent=2)
    >>> out[0, 0, :, 0].tolist()  # the mean of 0 ... 5, and of 0, 4 and 5
    [2.5, 3.0]
    """
    kinds = checked_head_kind(head_kind)
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(f"query must be a non-empty (batch, rows, heads, dim) array, got shape {query.shape}")
    if query.dtype not in DTYPES:
        raise ValueError(f"query must be float32, bfloat16 or float16, got {query.dtype}")
    if query.shape[2] % len(kinds):
        raise ValueError(f"head_kind must have a length that divides query's {query.shape[2]} heads, got {len(kinds)}")
    check_cache(cache, kinds, query, page_table)
    check_budget(n_sink, n_recent)
    slots, needed = cache.rings.shape[2], n_sink + n_recent + query.shape[1] - 1
    if not all(kinds) and slots < needed:
        raise ValueError(f"cache.rings must have n_sink + n_recent + rows - 1 = {needed} slots or more, got {slots}")
    check_integers("lengths", lengths, query.shape[:1])
    check_values(cache, lengths, page_table)
    statics = {
        "kinds": kinds,
        "n_sink": int(n_sink),
        "n_recent": int(n_recent),
        "scale": checked_scale(scale, query.shape[-1]),
    }
    lengths = jnp.maximum(lengths, 0).astype(jnp.int32)
    if any(kinds):
        assert page_table is not None
        lengths = jnp.minimum(lengths, page_table.shape[1] * cache.page_size)
        page_table = jnp.clip(page_table, 0, cache.pages.shape[0] - 1).astype(jnp.int32)
    else:
        page_table = None

    def unsupported(kernels: ModuleType) -> str | None:
        return kernels.unsupported(query, cache, page_table, **statics)

    found = dispatch.select(_OPERATION, implementation, unsupported)
    if isinstance(found, dict):
        default = _flat(dispatch.module(_OPERATION, "xla"))
        kernels = tuple((platform, _flat(module)) for platform, module in sorted(found.items()))
        run: Callable[..., Any] | ByPlatform = ByPlatform(default, kernels)
    else:
        run = _flat(dispatch.module(_OPERATION, found))
    return _operation(run, tuple(statics.items()))(query, cache, lengths, page_table)


@functools.cache
def _flat(module: ModuleType) -> Callable[..., tuple[Array]]:
    """A module's function, of arrays."""

    def call(query, pages, rings, page_scales, ring_scales, lengths, page_table, **statics):
        cache = PagedCache(pages, rings, page_scales, ring_scales)
        return (module.ragged_decode_attention(query, cache, lengths, page_table, **statics),)

    return call


_DIMENSIONS = ("b...", "....", "b...", "....", "b...", "b", "b.")  # as `partitioned` wants them


@functools.lru_cache(maxsize=512)
def _operation(run: Callable[..., Any] | ByPlatform, statics: tuple[tuple[str, Any], ...]) -> Callable[..., Array]:
    """`run` with its rules, as a function `(query, cache, lengths, page_table) -> out`."""

    @custom_vmap
    def batched(query, cache, lengths, page_table):
        args = (query, *cache, lengths, page_table)
        local, arrays = localized(bound(run, dict(statics)), _DIMENSIONS, ["b..."], args)
        return local(*arrays)[0]

    @batched.def_vmap
    def _(size, in_batched, query, cache, lengths, page_table):
        def fold(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        query_in, cache_in, lengths_in, table_in = in_batched
        pages, scales = cache.pages, cache.page_scales
        own_pages = cache_in.pages or bool(cache_in.page_scales)
        page_table = None if page_table is None else fold(page_table, table_in)
        if own_pages:  # one pool after the other
            count = pages.shape[1 if cache_in.pages else 0]
            pages, scales = jax.tree.map(fold, (pages, scales), (cache_in.pages, cache_in.page_scales))
            if page_table is not None:
                page_table += jnp.repeat(count * jnp.arange(size), page_table.shape[0] // size)[:, None]
        rings, ring_scales = jax.tree.map(
            fold, (cache.rings, cache.ring_scales), (cache_in.rings, cache_in.ring_scales)
        )
        folded = PagedCache(pages, rings, scales, ring_scales)
        out = batched(fold(query, query_in), folded, fold(lengths, lengths_in), page_table)
        return out.reshape(size, -1, *out.shape[1:]), True

    @jax.custom_jvp
    def operation(*args):
        return batched(*args)

    @operation.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{_OPERATION} is for inference: it has no derivative")

    return jax.jit(lambda *args: operation(*_compat.same_varying(args)))
