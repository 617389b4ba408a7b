"""The forward kernel of attention on TPUs: online softmax in base 2, the scale folded into the queries.

A block of rows is cut into strips: the compiler overlaps the products of one with the exponentials of another, and what
no row of a strip sees is not computed. Where one grid step has the whole band of a block at hand, the maximum is known
before the first exponential, and nothing is rescaled.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat
from kernels_pallas.flash import tpu_parts as parts
from kernels_pallas.flash.rules import NOTHING
from kernels_pallas.flash.tpu_blocks import LANES, Band, Plan

LN2 = 0.6931471805599453


def forward(
    plan: Plan,
    query: Float[Array, "batch heads rows dim"],
    key: Float[Array, "batch kv_heads keys dim"],
    value: Float[Array, "batch kv_heads keys dim"],
    limits: Int[Array, " limits"] | None = None,
    positions: Int[Array, "batch 1 1 rows"] | None = None,
    row_ids: Int[Array, "batch 1 1 rows"] | None = None,
    key_ids: Int[Array, "batch 1 1 keys"] | None = None,
    *,
    sinks: int = 0,
    strip: int,
    name: str,
    interpret: Any = False,
) -> tuple[Float[Array, "batch heads rows dim"], Float[Array, "batch heads rows"]]:
    """Attention of padded arrays.

    Args:
      plan: The blocks, of rows with keys.
      query: Times scale and log2(e).
      key: Keys.
      value: Values.
      limits: Of `Gathered`.
      positions: Of `Gathered`; -1 sees nothing.
      row_ids: Segment ids of the rows, or None.
      key_ids: Segment ids of the keys.
      sinks: Keys at the beginning that rows see whose window has left them behind; for `Band`.
      strip: Rows whose scores are computed at a time, a multiple of 128.
      name: Of the kernel.
      interpret: As in `pallas_call`.

    Returns:
      Output, and log-sum-exp of the scores: `NOTHING` for rows that see no key.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    operands = parts.Operands(plan, limits)
    operands.outer("query", query, plan.outer, parts.query_head(group))
    operands.inner("key", key, parts.key_head)
    operands.inner("value", value, parts.key_head)
    parts.add_places(operands, positions, row_ids, key_ids)
    if sinks:
        size = -(-sinks // LANES) * LANES
        operands.first("sink_key", key, size)
        operands.first("sink_value", value, size)
    operands.output("out", _compat.shape_like(query.shape, query), plan.outer, parts.query_head(group))
    of_rows = _compat.shape_like((batch, heads, 1, rows), query, jnp.float32)
    operands.output("lse", of_rows, plan.outer, parts.query_head(group), axis=3)
    if plan.accumulates:
        operands.scratch("largest", (plan.outer, LANES))
        operands.scratch("total", (plan.outer, LANES))
        operands.scratch("sums", (plan.outer, dim))

    def kernel(refs):
        _kernel(refs, plan=plan, strip=strip, sinks=sinks)

    out, lse = operands.call(
        kernel,
        (batch, kv_heads, plan.outer_blocks, group, plan.steps),
        ("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
        name,
        flops=4 * batch * heads * plan.outer_blocks * plan.outer * plan.steps * plan.slots * plan.inner * dim,
        interpret=interpret,
    )
    return out, lse[:, :, 0]


def _kernel(refs: SimpleNamespace, *, plan: Plan, strip: int, sinks: int) -> None:
    step = tuple(pl.program_id(axis) for axis in (0, 2, 4))
    i, j = step[1:]
    may_see_nothing = hasattr(refs, "positions") or hasattr(refs, "outer_ids")

    def begin():
        parts.keep_places(refs)
        if plan.accumulates:
            refs.largest[...] = jnp.full_like(refs.largest, parts.MASKED)
            refs.total[...] = jnp.zeros_like(refs.total)
            refs.sums[...] = jnp.zeros_like(refs.sums)

    def visit(blocks: list[tuple[int, int]]) -> None:
        last = plan.fused or plan.is_last(blocks)
        for start, size in parts.strips(plan.outer, strip):
            visit_strip(blocks, start, size, last)

    def visit_strip(blocks: list[tuple[int, int]], start: int, size: int, last: bool) -> None:
        rows = slice(start, start + size)
        query, scores, values = refs.query[0, 0, rows], [], []
        for part in plan.slices(start, size, blocks, refs.limits, *step):
            key, value = (getattr(refs, f"{x}_{part.slot}") for x in ("key", "value"))
            keys = slice(part.start, part.stop)
            scores.append(parts.scores_of(plan, refs, part, start, step, query, key[0, 0, keys]))
            values.append((value, keys))
        if sinks and last and isinstance(plan, Band):
            scores.append(sink_scores(refs, plan, i, start, query, sinks))
            values.append((refs.sink_value, slice(None)))
        if not scores:
            return
        highest = parts.over_lanes(jnp.maximum, scores).max(axis=1, keepdims=True)
        before = refs.largest[rows] if plan.accumulates else None
        largest = jnp.broadcast_to(highest, (size, LANES)) if before is None else jnp.maximum(before, highest)
        weights = [jnp.exp2(x - parts.wide(largest, x.shape[1])) for x in scores]
        total = parts.over_lanes(jnp.add, weights)
        sums = parts.total(
            [
                parts.product(w.astype(ref.dtype), ref[0, 0, keys])
                for w, (ref, keys) in zip(weights, values, strict=True)
            ]
        )
        if before is None:
            finish(rows, largest, total, sums)
            return
        shrink = jnp.exp2(before - largest)
        refs.largest[rows] = largest
        refs.total[rows] = refs.total[rows] * shrink + total
        refs.sums[rows] = refs.sums[rows] * parts.wide(shrink, sums.shape[1]) + sums

    def finish(rows: slice, largest: Array, total: Array, sums: Array) -> None:
        total = jnp.broadcast_to(total.sum(axis=1, keepdims=True), largest.shape)
        some = largest > 0.5 * parts.MASKED
        if may_see_nothing:
            total = jnp.where(some, total, 1.0)
        out = sums * parts.wide(parts.reciprocal(total), sums.shape[1])
        lse = LN2 * (largest + jnp.log2(total))
        if may_see_nothing:
            out = jnp.where(parts.wide(some, sums.shape[1]), out, 0.0)
            lse = jnp.where(some, lse, NOTHING)
        refs.out[0, 0, rows] = out.astype(refs.out.dtype)
        refs.lse[0, 0, :, rows] = parts.row_of(lse)

    if not plan.accumulates:
        begin()
        parts.for_each_case(plan, refs, step, visit)
        return
    pl.when(j == 0)(begin)
    parts.for_each_case(plan, refs, step, visit)

    @pl.when(j == plan.steps - 1)
    def _():
        for start, size in parts.strips(plan.outer, strip):
            rows = slice(start, start + size)
            finish(rows, refs.largest[rows], refs.total[rows], refs.sums[rows])


def sink_scores(
    refs: SimpleNamespace, plan: Band, i: Any, start: int, query: Float[Array, "rows dim"], sinks: int
) -> Float[Array, "rows sinks"]:
    """Scores of a strip with the sinks, `MASKED` where its window still reaches them."""
    shape = query.shape[0], refs.sink_key.shape[2]
    behind = i * plan.outer + start - plan.window
    offset = parts.iota(shape, 1) - parts.iota(shape, 0)
    mask = (offset <= behind) & (parts.iota(shape, 1) < sinks)
    return jnp.where(mask, parts.product(query, refs.sink_key[0, 0], transposed=True), parts.MASKED)
