"""The backward kernels of attention on TPUs: gradients of queries, and of keys and values, from the log-sum-exp.

With P = softmax(S) recomputed from the log-sum-exp, dV = Pᵀ dO, dS = P (dO Vᵀ - delta), dQ = dS K, dK = dSᵀ Q, where
delta is the row sum of dO times the output. The second kernel has scores with a row for every key: then no product
needs a transpose of them, and what belongs to rows of queries is a row.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas import _compat
from kernels_pallas.flash import tpu_parts as parts
from kernels_pallas.flash.tpu_blocks import LANES, Band, Plan
from kernels_pallas.flash.tpu_forward import LN2, sink_scores


def backward_query(
    plan: Plan,
    query: Float[Array, "batch heads rows dim"],
    key: Float[Array, "batch kv_heads keys dim"],
    value: Float[Array, "batch kv_heads keys dim"],
    grad_out: Float[Array, "batch heads rows dim"],
    of_rows: Float[Array, "batch heads 2 rows"],
    limits: Int[Array, " limits"] | None = None,
    positions: Int[Array, "batch 1 1 rows"] | None = None,
    row_ids: Int[Array, "batch 1 1 rows"] | None = None,
    key_ids: Int[Array, "batch 1 1 keys"] | None = None,
    *,
    scale: float,
    sinks: int = 0,
    strip: int,
    name: str,
    interpret: Any = False,
) -> Float[Array, "batch heads rows dim"]:
    """The gradient of the unscaled queries.

    Args:
      plan: As for `tpu_forward.forward`, and so are all arguments without a word here.
      query: Times scale and log2(e).
      key: Keys.
      value: Values.
      grad_out: The output's cotangent.
      of_rows: log-sum-exp times log2(e), and delta.
      limits: See there.
      positions: See there.
      row_ids: See there.
      key_ids: See there.
      scale: Factor on the scores.
      sinks: See there.
      strip: See there.
      name: Of the kernel.
      interpret: As in `pallas_call`.

    Returns:
      dQ.
    """
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    operands = parts.Operands(plan, limits)
    operands.outer("query", query, plan.outer, parts.query_head(group))
    operands.outer("grad", grad_out, plan.outer, parts.query_head(group))
    operands.outer("of_rows", of_rows, plan.outer, parts.query_head(group), axis=3)
    operands.inner("key", key, parts.key_head)
    operands.inner("value", value, parts.key_head)
    parts.add_places(operands, positions, row_ids, key_ids)
    if sinks:
        size = -(-sinks // LANES) * LANES
        operands.first("sink_key", key, size)
        operands.first("sink_value", value, size)
    operands.output("dquery", _compat.shape_like(query.shape, query), plan.outer, parts.query_head(group))
    operands.scratch("lse", (plan.outer, LANES))
    operands.scratch("delta", (plan.outer, LANES))
    if plan.accumulates:
        operands.scratch("sums", (plan.outer, dim))

    def kernel(refs):
        _query_kernel(refs, plan=plan, strip=strip, sinks=sinks, scale=scale)

    (dquery,) = operands.call(
        kernel,
        (batch, kv_heads, plan.outer_blocks, group, plan.steps),
        ("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
        name,
        flops=6 * batch * heads * plan.outer_blocks * plan.outer * plan.steps * plan.slots * plan.inner * dim,
        interpret=interpret,
    )
    return dquery


def _query_kernel(refs: SimpleNamespace, *, plan: Plan, strip: int, sinks: int, scale: float) -> None:
    step = tuple(pl.program_id(axis) for axis in (0, 2, 4))
    i, j = step[1:]

    def begin():
        parts.keep_places(refs)
        refs.lse[...] = parts.column_of(refs.of_rows[0, 0, 0:1])
        refs.delta[...] = parts.column_of(refs.of_rows[0, 0, 1:2])
        if plan.accumulates:
            refs.sums[...] = jnp.zeros_like(refs.sums)

    def gradient(scores: Array, rows: slice, grad: Array, key: Array, value: Array) -> Array:
        size = scores.shape[1]
        weights = jnp.exp2(scores - parts.wide(refs.lse[rows], size))
        dscores = weights * (parts.product(grad, value, transposed=True) - parts.wide(refs.delta[rows], size))
        return parts.product(dscores.astype(key.dtype), key)

    def visit(blocks: list[tuple[int, int]]) -> None:
        for start, size in parts.strips(plan.outer, strip):
            rows = slice(start, start + size)
            query, grad, sums = refs.query[0, 0, rows], refs.grad[0, 0, rows], []
            for part in plan.slices(start, size, blocks, refs.limits, *step):
                key, value = (getattr(refs, f"{x}_{part.slot}")[0, 0, part.start : part.stop] for x in ("key", "value"))
                scores = parts.scores_of(plan, refs, part, start, step, query, key)
                sums.append(gradient(scores, rows, grad, key, value))
            if sinks and isinstance(plan, Band) and (plan.fused or plan.is_last(blocks)):
                scores = sink_scores(refs, plan, i, start, query, sinks)
                sums.append(gradient(scores, rows, grad, refs.sink_key[0, 0], refs.sink_value[0, 0]))
            if not sums:
                continue
            total = parts.total(sums)
            if not plan.accumulates:
                refs.dquery[0, 0, rows] = (scale * total).astype(refs.dquery.dtype)
            else:
                refs.sums[rows] += total

    if not plan.accumulates:
        begin()
        parts.for_each_case(plan, refs, step, visit)
        return
    pl.when(j == 0)(begin)
    parts.for_each_case(plan, refs, step, visit)

    @pl.when(j == plan.steps - 1)
    def _():
        refs.dquery[0, 0] = (scale * refs.sums[...]).astype(refs.dquery.dtype)


def backward_key_value(
    plan: Plan,
    query: Float[Array, "batch heads rows dim"],
    key: Float[Array, "batch kv_heads keys dim"],
    value: Float[Array, "batch kv_heads keys dim"],
    grad_out: Float[Array, "batch heads rows dim"],
    of_rows: Float[Array, "batch heads 2 rows"],
    limits: Int[Array, " limits"] | None = None,
    positions: Int[Array, "batch 1 1 rows"] | None = None,
    row_ids: Int[Array, "batch 1 1 rows"] | None = None,
    key_ids: Int[Array, "batch 1 1 keys"] | None = None,
    *,
    strip: int,
    name: str,
    interpret: Any = False,
) -> tuple[Float[Array, "batch kv_heads outer_keys dim"], Float[Array, "batch kv_heads outer_keys dim"]]:
    """The gradients of keys and values, summed over the query heads of every key head.

    Args:
      plan: The blocks, of keys with rows.
      query: As for `backward_query`, and so are the others.
      key: See there.
      value: See there.
      grad_out: See there.
      of_rows: See there.
      limits: See there.
      positions: See there.
      row_ids: See there.
      key_ids: See there.
      strip: Keys whose scores are computed at a time, a multiple of 128.
      name: Of the kernel.
      interpret: As in `pallas_call`.

    Returns:
      dK and dV of the keys that the plan's outer blocks cover.
    """
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    operands = parts.Operands(plan, limits)
    operands.inner("query", query, parts.query_head(group))
    operands.inner("grad", grad_out, parts.query_head(group))
    operands.inner("of_rows", of_rows, parts.query_head(group), axis=3)
    operands.outer("key", key, plan.outer, parts.key_head)
    operands.outer("value", value, plan.outer, parts.key_head)
    parts.add_places(operands, positions, row_ids, key_ids)
    shape = _compat.shape_like((batch, kv_heads, plan.outer_blocks * plan.outer, dim), key)
    operands.output("dkey", shape, plan.outer, parts.key_head)
    operands.output("dvalue", shape, plan.outer, parts.key_head)
    several = plan.accumulates or group > 1
    if several:
        operands.scratch("dkey_sums", (plan.outer, dim))
        operands.scratch("dvalue_sums", (plan.outer, dim))

    def kernel(refs):
        _key_value_kernel(refs, plan=plan, strip=strip, several=several)

    dkey, dvalue = operands.call(
        kernel,
        (batch, kv_heads, plan.outer_blocks, group, plan.steps),
        ("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
        name,
        flops=8 * batch * heads * plan.outer_blocks * plan.outer * plan.steps * plan.slots * plan.inner * dim,
        interpret=interpret,
    )
    return dkey, dvalue


def _key_value_kernel(refs: SimpleNamespace, *, plan: Plan, strip: int, several: bool) -> None:
    step = tuple(pl.program_id(axis) for axis in (0, 2, 4))
    j = step[2]
    member = pl.program_id(3)

    def begin():
        parts.keep_places(refs)
        if several:
            refs.dkey_sums[...] = jnp.zeros_like(refs.dkey_sums)
            refs.dvalue_sums[...] = jnp.zeros_like(refs.dvalue_sums)

    def visit(blocks: list[tuple[int, int]]) -> None:
        for start, size in parts.strips(plan.outer, strip):
            keys = slice(start, start + size)
            key, value, dkeys, dvalues = refs.key[0, 0, keys], refs.value[0, 0, keys], [], []
            for part in plan.slices(start, size, blocks, refs.limits, *step):
                rows = slice(part.start, part.stop)
                query, grad = (getattr(refs, f"{x}_{part.slot}")[0, 0, rows] for x in ("query", "grad"))
                of_rows = getattr(refs, f"of_rows_{part.slot}")
                scores = parts.scores_of(plan, refs, part, start, step, key, query)
                weights = jnp.exp2(scores - of_rows[0, 0, 0:1, rows])
                dvalues.append(parts.product(weights.astype(grad.dtype), grad))
                dscores = weights * (parts.product(value, grad, transposed=True) - of_rows[0, 0, 1:2, rows])
                dkeys.append(parts.product(dscores.astype(query.dtype), query))
            if not dkeys:
                continue
            dkey, dvalue = parts.total(dkeys), parts.total(dvalues)
            if several:
                refs.dkey_sums[keys] += dkey
                refs.dvalue_sums[keys] += dvalue
            else:
                write(keys, dkey, dvalue)

    def write(keys: slice, dkey: Array, dvalue: Array) -> None:
        refs.dkey[0, 0, keys] = (LN2 * dkey).astype(refs.dkey.dtype)
        refs.dvalue[0, 0, keys] = dvalue.astype(refs.dvalue.dtype)

    if not several:
        begin()
        parts.for_each_case(plan, refs, step, visit)
        return
    pl.when((member == 0) & (j == 0))(begin)
    parts.for_each_case(plan, refs, step, visit)

    @pl.when((member == pl.num_programs(3) - 1) & (j == plan.steps - 1))
    def _():
        write(slice(None), refs.dkey_sums[...], refs.dvalue_sums[...])
