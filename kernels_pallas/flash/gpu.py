"""What the attention kernels for Hopper GPUs share: which keys a row sees, which blocks are visited, products.

The operations are one algorithm with different sets of visible keys. A `Rule` says statically how that set is made,
`Places` hold what is known at run time. From them comes, in XLA, a plan: for every block of rows the range of blocks of
keys that any of its rows sees, and the part of that range which all of them see and which needs no mask. Kernels only
read plans.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from kernels_pallas.flash.rules import MASKED

SMEM_BYTES = 232_448
"""Shared memory that a thread block can have on Hopper."""

SMEM_RESERVED = 16_384
"""Of it: vectors of a block, in whole KiB each, barriers, scratch of reductions."""

LOG2_E, LOG_2 = math.log2(math.e), math.log(2.0)
WARPGROUPS = 2
"""Warpgroups that multiply; one more fetches."""

WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)
"""Vectors with one number for every row, or column, of a block in registers."""

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # of `load`, until JAX 0.11
_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_SIZES = (64, 80, 128)
NO_SEGMENT = 2**30
"""An id that no row has."""


class Rule(NamedTuple):
    """How the visible keys of a row follow from its position: always s <= position."""

    window: int | None = None
    """Only the last so many positions."""
    sinks: int = 0
    """With a window: the first so many positions all the same."""
    gathered: bool = False
    """Positions of the rows are given; else row i stands at i."""
    segmented: bool = False
    """Ids of rows and keys are given, and must be equal."""


def two_masks(rule: Rule) -> bool:
    """Whether there is a mask of windows and one of segments, beside the causal one."""
    return rule.window is not None and rule.segmented


class Places(NamedTuple):
    """Where rows stand: positions (-1 sees nothing) and ids, None where the rule has none."""

    positions: Int32[Array, "batch rows"] | None = None
    row_ids: Int32[Array, "batch rows"] | None = None
    key_ids: Int32[Array, "batch seq"] | None = None


class Inputs(NamedTuple):
    """Operands of the forward kernel."""

    plan: Any
    query: Any
    key: Any
    value: Any
    positions: Any
    row_ids: Any
    key_ids: Any


def unsupported(query: Any, key: Any) -> str | None:
    """Why no kernel takes these arrays, None if they do."""
    if query.dtype not in _DTYPES:
        return f"dtype {jnp.dtype(query.dtype).name} (bfloat16 or float16)"
    if query.shape[3] not in _HEAD_SIZES:
        return f"head size {query.shape[3]} (64, 80 or 128)"
    return None


def unsupported_device() -> str | None:
    """Why this machine's GPU cannot run the kernels; None if it can, or if there is no GPU to ask."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return f"compute capability {capability} (9.0, Hopper)"
    return _miscompiled(device.client.platform_version)


def _miscompiled(platform_version: str) -> str | None:
    """Why this CUDA must not compile masks, from how JAX names it.

    Its ptxas is known to miscompile them: so say the authors of Mosaic GPU's own attention, which refuses it too.

    >>> _miscompiled("PJRT C API cuda 12080"), _miscompiled("cuda 13000")
    ('CUDA 12080 (before 12.8, or from 12.9.1 on)', None)
    """
    found = re.search(r"cuda (\d+)", platform_version)
    if found is None or not 12080 <= int(found[1]) < 12091:
        return None
    return f"CUDA {found[1]} (before 12.8, or from 12.9.1 on)"


def swizzled(dim: int) -> tuple[Any, Any]:
    """The arrangement in shared memory of blocks with `dim` columns that tensor cores read."""
    columns = 64 if dim % 64 == 0 else 16
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


def padded(places: Places, block_rows: int, block_keys: int) -> Places:
    """`places` in whole blocks; rows and keys that are added see and show nothing."""

    def pad(x, block, value):
        return None if x is None else jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=value)

    return Places(
        pad(places.positions, block_rows, -1),
        pad(places.row_ids, block_rows, 0),
        pad(places.key_ids, block_keys, NO_SEGMENT),
    )


# Plans.


def key_plan(
    rule: Rule, places: Places, rows: int, seq: int, block_rows: int, block_keys: int
) -> Int32[Array, "batch blocks numbers"]:
    """For every block of rows the `Plan` of the blocks of keys that it visits."""
    lowest, highest = _range_of_positions(places, rows, block_rows)
    last = highest // block_keys + 1
    first = sinks = window_until = jnp.zeros_like(last)
    causal_from = (lowest + 1) // block_keys
    if rule.window is not None:
        first = jnp.maximum(lowest - rule.window + 1, 0) // block_keys
        sinks = jnp.minimum(pl.cdiv(rule.sinks, block_keys), first)
        window_until = pl.cdiv(jnp.maximum(highest - rule.window + 1, 0), block_keys)
    if rule.segmented:
        overlap, same = _compared(places, block_rows, block_keys)
        first_overlap, last_overlap = _range_of(overlap)
        first, last = jnp.maximum(first, first_overlap), jnp.minimum(last, last_overlap)
        return _stacked(sinks, first, jnp.maximum(last, first), window_until, causal_from, *_first_run(same))
    return _stacked(sinks, first, jnp.maximum(last, first), window_until, causal_from)


def row_plan(
    rule: Rule, places: Places, rows: int, seq: int, block_rows: int, block_keys: int
) -> Int32[Array, "batch blocks numbers"]:
    """For every block of keys the `Plan` of the blocks of rows that see any of it."""
    lowest, highest = (x[:, None, :] for x in _range_of_positions(places, rows, block_rows, ignore_blind=True))
    begin = jnp.arange(pl.cdiv(seq, block_keys))[:, None] * block_keys
    end = jnp.minimum(begin + block_keys, seq)
    sees = highest >= begin
    causal_until = jnp.sum(lowest < end - 1, axis=2)  # positions ascend
    window_from = jnp.full_like(causal_until, lowest.shape[2])
    if rule.window is not None:
        sees &= (lowest - rule.window < end - 1) | (begin < rule.sinks)
        window_from = jnp.sum((highest - rule.window < begin) | (end <= rule.sinks), axis=2)
    if rule.segmented:
        overlap, same = (x.swapaxes(1, 2) for x in _compared(places, block_rows, block_keys))
        first, last = _range_of(sees & overlap)
        return _stacked(jnp.zeros_like(first), first, last, causal_until, window_from, *_first_run(same))
    first, last = _range_of(sees)
    return _stacked(jnp.zeros_like(first), first, last, causal_until, window_from)


def _stacked(*numbers):
    batch = max(x.shape[0] for x in numbers)
    return jnp.stack([jnp.broadcast_to(x, (batch, x.shape[1])) for x in numbers], axis=2).astype(jnp.int32)


def _range_of(flags):
    """The range [first, last) of the last axis that contains all `flags` set."""
    size = flags.shape[2]
    first = jnp.argmax(flags, axis=2)
    return first, jnp.where(flags.any(axis=2), size - jnp.argmax(flags[:, :, ::-1], axis=2), first)


def _first_run(flags):
    """The first range [first, last) of the last axis in which all `flags` are set."""
    first = jnp.argmax(flags, axis=2)
    after = ~flags & (jnp.arange(flags.shape[2]) > first[:, :, None])
    last = jnp.where(after.any(axis=2), jnp.argmax(after, axis=2), flags.shape[2])
    return first, jnp.where(flags.any(axis=2), last, first)


def _range_of_positions(places, rows, block_rows, ignore_blind=False):
    """Lowest and highest position in every block of rows, both (batch or 1, blocks)."""
    blocks = pl.cdiv(rows, block_rows)
    given = padded(places, block_rows, 1).positions
    if given is None:
        lowest = jnp.arange(blocks)[None] * block_rows
        return lowest, jnp.minimum(lowest + block_rows, rows) - 1
    positions = given.reshape(-1, blocks, block_rows)
    seeing = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions) if ignore_blind else positions
    return seeing.min(axis=2), positions.max(axis=2)


def _compared(places, block_rows, block_keys):
    """Whether the ids of a block of rows and of a block of keys overlap (else nothing is visible); are all the same."""
    places = padded(places, block_rows, block_keys)
    rows = places.row_ids.reshape(places.row_ids.shape[0], -1, 1, block_rows)
    keys = places.key_ids.reshape(places.key_ids.shape[0], 1, -1, block_keys)
    (low, high), (low_keys, high_keys) = ((x.min(axis=3), x.max(axis=3)) for x in (rows, keys))
    return (low <= high_keys) & (high >= low_keys), (low == high_keys) & (high == low_keys)


class Plan(NamedTuple):
    """Blocks that a thread block visits: `sinks` from the beginning, then `first` to `last` (exclusive).

    Blocks below `below` need the mask of one edge (of keys: the window's, of rows: the causal one), blocks from `above`
    on that of the other edge. Those outside of `same_first` to `same_last` (exclusive) need the mask of segments.
    """

    sinks: Any
    first: Any
    last: Any
    below: Any
    above: Any
    same_first: Any = None
    same_last: Any = None

    @property
    def steps(self) -> Any:
        return self.last - self.first if self.sinks is None else self.sinks + self.last - self.first

    def block(self, step: Any) -> Any:
        if self.sinks is None:
            return self.first + step
        return jnp.where(step < self.sinks, step, self.first + step - self.sinks)

    def edges(self, block: Any, *, of_rows: bool) -> dict[str, Any]:
        """Which masks a block needs, for `masked`; `of_rows` tells whether the blocks visited are blocks of rows."""
        below, above = block < self.below, block >= self.above
        differ = None if self.same_first is None else (block < self.same_first) | (block >= self.same_last)
        return {"causal": below if of_rows else above, "window": above if of_rows else below, "segments": differ}


def read_plan(plan: Any, batch: Any, block: Any, sinks: bool = False) -> Plan:
    """The plan of one block, in a kernel."""
    batch = batch if plan.shape[0] > 1 else 0
    numbers = (plan[batch, block, i] for i in range(plan.shape[2]))
    return Plan(*numbers) if sinks else Plan(*numbers)._replace(sinks=None)


# Pieces of kernels.


def load(ref: Any, layout: Any) -> Array:
    """A vector or block from shared memory."""
    return plgpu.load(ref, *_INDEX, layout=layout)


def count(size: int, layout: Any) -> Int32[Array, " size"]:
    """0, 1, ... as a vector in registers."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def score_units(scale: float) -> tuple[float, float]:
    """The factor that brings products to units of log 2, and a product so low that its weight is 0 (but finite)."""
    factor = scale * LOG2_E
    return factor, MASKED / max(factor, 1.0)


class Vectors(NamedTuple):
    """What decides visibility, as functions that return vectors along the rows or columns of a block of scores.

    They are called where a mask is applied, so that nothing of it occupies registers elsewhere.
    """

    rows: Callable[[], Any]
    """Positions of the query rows, relative to the first key of the block."""
    keys: Callable[[], Any]
    """0, 1, ..."""
    row_ids: Callable[[], Any]
    key_ids: Callable[[], Any]


def masked(scores, rule, vectors, value, *, row_axis, first_key, causal, window, segments):
    """`scores` of a block with `value` where a row does not see a key.

    Every condition is a branch of its own: together they would need more registers than there are.

    Args:
      scores: A block in registers.
      rule: What decides.
      vectors: Where its rows and columns stand.
      value: A very low score.
      row_axis: 0 if rows of the block are query rows, 1 if they are keys.
      first_key: Position of the first key.
      causal: Whether there are keys beyond a row's position.
      window: Whether there are keys before a row's window.
      segments: Whether ids of rows and keys differ.
    """

    def compare(scores, holds, row, key):
        row, key = (lax.broadcast_in_dim(x, scores.shape, [i]) for x, i in ((row, row_axis), (key, 1 - row_axis)))
        return jnp.where(holds(row, key), scores, value)

    def in_window(scores):
        keys = vectors.keys()
        if rule.sinks:  # in the window of every row
            keys = jnp.where(keys < rule.sinks - first_key, jnp.iinfo(jnp.int32).max, keys)
        return compare(scores, operator.lt, vectors.rows() - rule.window, keys)

    def past(scores):
        return compare(scores, operator.ge, vectors.rows(), vectors.keys())

    def same(scores):
        return compare(scores, operator.eq, vectors.row_ids(), vectors.key_ids())

    scores = lax.cond(causal, past, lambda x: x, scores)
    if rule.window is not None:
        scores = lax.cond(window, in_window, lambda x: x, scores)
    if rule.segmented:
        scores = lax.cond(segments, same, lambda x: x, scores)
    return scores


def multiply(a, b, *, transposed=False, before_wait=None, interpret=False):
    """a b, or a bᵀ; `before_wait` runs while the tensor cores do."""
    b = b.T if transposed else b
    if interpret:  # the interpreter multiplies no registers
        result = _dot(a, b)
        if before_wait is not None:
            before_wait()
        return result

    def product(acc):
        plgpu.wgmma(acc, a, b)
        if before_wait is not None:
            before_wait()
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def multiply_two(first, second, *, between, of_first, overlap=True, interpret=False):
    """(of_first(x + a bᵀ), y + c dᵀ) of two triples (x, a, b), (y, c, d).

    `of_first` is computed while the tensor cores are at c dᵀ, before that without `overlap`. `between` runs between the
    two products: it waits for the operands of the second one. y is a function as it may have to be read after that.
    """
    (x, a, b), (y, c, d) = first, second
    if interpret:
        product = x + _dot(a, b.T)
        between()
        return of_first(product), y() + _dot(c, d.T)

    def products(first_acc, second_acc):
        first_acc[...] = x
        plgpu.wgmma(first_acc, a, b.T)
        if not overlap:
            result = of_first(first_acc[...])
        between()
        second_acc[...] = y()
        plgpu.wgmma(second_acc, c, d.T)
        if overlap:
            result = of_first(plgpu.wgmma_accumulator_load(first_acc, wait_n=1))
        return result, second_acc[...]

    accumulators = (plgpu.ACC((x.shape[0], y.shape[0]), jnp.float32) for x, y in ((a, b), (c, d)))
    return pl.run_scoped(products, *accumulators)


def multiply_add(acc, a, b, *, interpret=False):
    """acc + a b."""
    if interpret:
        return acc + _dot(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def _dot(a, b):
    a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
    plgpu.commit_smem()  # tensor cores read as TMA writes; loads must be told apart from later copies
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
