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
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat, autotune
from kernels_pallas.flash.rules import MASKED
from kernels_pallas.ragged_decode_attention.cache import PagedCache
from kernels_pallas.ragged_decode_attention.heads import join, split
from kernels_pallas.ragged_decode_attention.tpu_blocks import VMEM_BYTES, Config, candidates, case_of, heuristic
from kernels_pallas.ragged_decode_attention.tpu_kernel import Shape, cut, kernel

__all__ = ["Config", "candidates", "ragged_decode_attention", "unsupported", "unsupported_device"]

KERNEL_NAME = "ragged_decode_attention"

_SMEM_BYTES = 256 * 2**10  # for page table and lengths
_LOG2_E = 1.4426950408889634


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
    if needed > VMEM_BYTES:
        return f"{needed} bytes of VMEM for two pages and two rings (at most {VMEM_BYTES})"
    return None


def unsupported_device() -> str | None:
    """Returns why this machine's device cannot run the kernel: every TPU can."""
    return None


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
    shape = Shape(rows, group, n_sink, n_recent, scale * _LOG2_E, config.pages, config.shares)
    pools = (queries(True) if any(kinds) else None, None if all(kinds) else queries(False))
    full, compressed = (
        None if x is None else x[:, :, : rows * group, dim:]
        for x in _call(shape, *pools, cache, lengths, page_table, interpret)
    )
    return join(full, compressed, kinds, rows).astype(query.dtype)


def _call(
    shape: Shape,
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
    cuts = cut(begins[-1], jnp.arange(shares + 1, dtype=jnp.int32), shares)
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
    body = functools.partial(
        kernel,
        shape=shape,
        quantized=cache.page_scales is not None,
        kinds=(full is not None, compressed is not None),
        max_pages=1 if page_table is None else page_table.shape[1],
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        body,
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
