"""Attention on Hopper GPUs (Mosaic GPU), backward: one kernel for dq, one for dk and dv, both without atomic sums.

Weights are recomputed from the log-sum-exp. A thread block owns 128 rows (dq), or 128 keys of one key head (dk, dv: the
query heads that share it are visited one after the other, so their sum stays in registers too). Two warpgroups
multiply, a third fetches, as in `gpu_forward`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas import _compat
from kernels_pallas.flash import gpu
from kernels_pallas.flash.gpu import COLUMNS, ROWS, WARPGROUPS, WGMMA
from kernels_pallas.flash.rules import NOTHING

OF_WARPGROUP = 64
OWNED = WARPGROUPS * OF_WARPGROUP
"""Rows (dq) or keys (dk, dv) of a thread block."""


class BackwardConfig(NamedTuple):
    """Block sizes: the kernel of dq takes `block_keys` keys in a step, that of dk and dv `block_rows` rows."""

    block_keys: int
    block_rows: int
    stages_dq: int
    stages_dkv: int

    def smem_bytes(self, dim: int) -> int:
        """Shared memory of a thread block of the larger kernel: owned blocks, ring, vectors and barriers."""
        ring = max(self.stages_dq * self.block_keys, self.stages_dkv * self.block_rows)
        return 2 * dim * 2 * (OWNED + ring) + gpu.SMEM_RESERVED


def candidates(dim: int, two_masks: bool = False) -> list[BackwardConfig]:
    """All that fit shared memory, and registers without spills; `two_masks` for windows of segments."""
    rows = (64, 128) if dim == 64 else (64,)
    stages_dkv = (2,) if two_masks and dim == 128 else (2, 3, 4)
    found = itertools.starmap(BackwardConfig, itertools.product((64, 128), rows, (2, 3, 4), stages_dkv))
    return [config for config in found if config.smem_bytes(dim) <= gpu.SMEM_BYTES]


def heuristic(dim: int, two_masks: bool = False) -> BackwardConfig:
    """The largest blocks, then the most stages."""
    return max(candidates(dim, two_masks))


def gradients(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    grad_out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads _"],
    delta: Float[Array, "batch heads _"],
    places: gpu.Places,
    *,
    rule: gpu.Rule,
    scale: float,
    config: BackwardConfig,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """Gradients of query, key and value; delta is the row sum of out * grad_out. See `flash.rules`."""
    block = max(OWNED, config.block_rows)
    tail = ((0, 0), (0, 0), (0, -lse.shape[2] % block))
    # What sums of products begin with: scores - lse / scale, and d weights - delta.
    start_scores = jnp.pad(jnp.maximum(-lse / scale, -NOTHING), tail, constant_values=-NOTHING)
    start_dweights = jnp.pad(-delta, tail)
    padded = gpu.padded(places, block, max(OWNED, config.block_keys))
    arrays = (query, key, value, grad_out, start_scores, start_dweights, *padded)
    statics = {"rule": rule, "scale": scale, "config": config, "interpret": interpret}
    return _dq(arrays, places, **statics), *_dkv(arrays, places, **statics)


class _Inputs(NamedTuple):
    plan: Any
    query: Any
    key: Any
    value: Any
    grad_out: Any
    start_scores: Any
    start_dweights: Any
    positions: Any
    row_ids: Any
    key_ids: Any


class _Scratch(NamedTuple):
    """Shared memory: two blocks that a warpgroup owns with their vectors, two rings with theirs, barriers."""

    owned: tuple[Any, Any]
    owned_vectors: tuple[Any, ...]
    ring: tuple[Any, Any]
    ring_vectors: tuple[Any, ...]
    count: Any  # 0, 1, ...: loaded where it is needed, which keeps it out of registers everywhere else
    owned_here: Any
    here: tuple[Any, Any]  # first and second block of a step, each with its vectors
    free: tuple[Any, Any]


def _scratch(dtype, dim, owned_vectors, ring_vectors, first_vectors, block, stages):
    """`*_vectors` are dtypes; `first_vectors` of the ring's arrive with the first block of a step."""
    transforms = gpu.swizzled(dim)
    own = plgpu.SMEM((WARPGROUPS, OF_WARPGROUP, dim), dtype, transforms=transforms)
    ring = plgpu.SMEM((stages, block, dim), dtype, transforms=transforms)
    barrier = functools.partial(plgpu.Barrier, num_barriers=stages)
    return _Scratch(
        (own, own),
        tuple(plgpu.SMEM((WARPGROUPS, OF_WARPGROUP), x) for x in owned_vectors),
        (ring, ring),
        tuple(plgpu.SMEM((stages, block), x) for x in ring_vectors),
        plgpu.SMEM((WARPGROUPS, block), jnp.int32),
        plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2 + len(owned_vectors)),
        (barrier(num_arrivals=1 + first_vectors), barrier(num_arrivals=1 + len(ring_vectors) - first_vectors)),
        (barrier(num_arrivals=WARPGROUPS), barrier(num_arrivals=WARPGROUPS)),
    )


def _call(kernel, name, out_type, scratch, grid, inputs, interpret):
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[scratch],
        grid=grid,
        grid_names=("block", "batch", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.COMPILER_PARAMS,
        kernel_name=name,
        interpret=interpret,
    )(inputs)


def _fetch(scratch, step, stages, first, second):
    """The third warpgroup: the copies of one step into the ring; both arguments list (source, ring)."""
    slot = lax.rem(step, jnp.int32(stages))
    for copies, here, free in zip((first, second), scratch.here, scratch.free, strict=True):
        pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        for source, ring in copies:
            plgpu.copy_gmem_to_smem(source, ring.at[slot], here.at[slot])


def _dq(arrays, places, *, rule, scale, config, interpret):
    query, key, *_ = arrays
    batch, rows, heads, dim = query.shape
    plan = gpu.key_plan(rule, places, rows, key.shape[1], OWNED, config.block_keys)
    integers = rule.gathered + rule.segmented
    scratch = _scratch(
        query.dtype,
        dim,
        (jnp.float32,) * 2 + (jnp.int32,) * integers,
        (jnp.int32,) * rule.segmented,
        int(rule.segmented),
        config.block_keys,
        config.stages_dq,
    )
    kernel = functools.partial(_dq_kernel, rule=rule, scale=scale, config=config, interpret=interpret is not None)
    grid = (pl.cdiv(rows, OWNED), batch, heads)
    return _call(
        kernel, "flash_dq", _compat.shape_like(query.shape, query), scratch, grid, _Inputs(plan, *arrays), interpret
    )


def _dq_kernel(inputs, dq, scratch, *, rule, scale, config, interpret):
    batch, head, warpgroup = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
    block = inputs.plan.shape[1] - 1 - lax.axis_index("block")  # the longest first
    plan = gpu.read_plan(inputs.plan, batch, block, sinks=rule.sinks > 0)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(inputs.query.shape[2] // inputs.key.shape[2]))

        @pl.loop(0, plan.steps)
        def _(step):
            keys = pl.ds(plan.block(step) * config.block_keys, config.block_keys)
            first = [(inputs.key.at[batch, keys, kv_head], scratch.ring[0])]
            if rule.segmented:
                first.append((inputs.key_ids.at[batch, keys], scratch.ring_vectors[0]))
            second = [(inputs.value.at[batch, keys, kv_head], scratch.ring[1])]
            _fetch(scratch, step, config.stages_dq, first, second)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        first_row = block * OWNED + warpgroup * OF_WARPGROUP
        rows = pl.ds(first_row, OF_WARPGROUP)
        queries, grads = (x.at[warpgroup] for x in scratch.owned)
        here = scratch.owned_here.at[warpgroup]
        plgpu.copy_gmem_to_smem(inputs.query.at[batch, rows, head], queries, here)
        plgpu.copy_gmem_to_smem(inputs.grad_out.at[batch, rows, head], grads, here)
        vectors = [inputs.start_scores.at[batch, head, rows], inputs.start_dweights.at[batch, head, rows]]
        vectors += [x.at[batch, rows] for x in (inputs.positions, inputs.row_ids) if x is not None]
        for source, target in zip(vectors, scratch.owned_vectors, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[warpgroup], here)
        plgpu.barrier_wait(here)
        start_scores, start_dweights, *integers = (gpu.load(x.at[warpgroup], ROWS) for x in scratch.owned_vectors)
        positions = integers.pop(0) if rule.gathered else first_row + gpu.count(OF_WARPGROUP, ROWS)
        row_ids = integers.pop(0) if rule.segmented else None
        shape = (OF_WARPGROUP, config.block_keys)
        factor, masked = gpu.score_units(scale)
        count = _count(scratch, warpgroup, config.block_keys)

        def visit(step, acc):
            slot = lax.rem(step, jnp.int32(config.stages_dq))
            key_block = plan.block(step)
            keys, values = (x.at[slot] for x in scratch.ring)

            first_key = key_block * config.block_keys
            vectors = gpu.Vectors(
                rows=lambda: positions - first_key,
                keys=count,
                row_ids=lambda: row_ids,
                key_ids=lambda: gpu.load(scratch.ring_vectors[0].at[slot], COLUMNS),
            )
            edges = plan.edges(key_block, of_rows=False)

            def weights_of(scores):
                scores = gpu.masked(scores, rule, vectors, masked, row_axis=0, first_key=first_key, **edges)
                return jnp.exp2(factor * scores)

            def spread(x):
                return lax.broadcast_in_dim(x, shape, [0])

            plgpu.barrier_wait(scratch.here[0].at[slot])
            wait = functools.partial(plgpu.barrier_wait, scratch.here[1].at[slot])
            weights, dweights = gpu.multiply_two(
                (spread(start_scores), queries, keys),
                (lambda: spread(start_dweights), grads, values),
                between=wait,
                of_first=weights_of,
                overlap=_overlaps(rule),
                interpret=interpret,
            )
            if rule.segmented:
                plgpu.commit_smem()  # ids were loaded before they are overwritten
            plgpu.barrier_arrive(scratch.free[1].at[slot])
            acc = gpu.multiply_add(acc, (weights * dweights).astype(inputs.key.dtype), keys, interpret=interpret)
            plgpu.barrier_arrive(scratch.free[0].at[slot])
            return acc

        zeros = plgpu.layout_cast(jnp.zeros((OF_WARPGROUP, inputs.query.shape[3]), jnp.float32), WGMMA)
        queries[...] = (scale * lax.fori_loop(0, plan.steps, visit, zeros)).astype(dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, dq.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)


def _overlaps(rule):
    """Whether weights are computed while the next product is under way; two masks leave too few registers for that."""
    return not gpu.two_masks(rule)


def _count(scratch, warpgroup, size):
    """Writes 0, 1, ... to shared memory; returns a function that loads it as a vector along columns."""
    count = scratch.count.at[warpgroup]
    count[...] = gpu.count(size, COLUMNS)
    plgpu.commit_smem()  # also a barrier
    return lambda: gpu.load(count, COLUMNS)


def _dkv(arrays, places, *, rule, scale, config, interpret):
    query, key, value, *_ = arrays
    batch, seq, kv_heads, dim = key.shape
    plan = gpu.row_plan(rule, places, query.shape[1], seq, config.block_rows, OWNED)
    integers = rule.gathered + rule.segmented
    scratch = _scratch(
        query.dtype,
        dim,
        (jnp.int32,) * rule.segmented,
        (jnp.float32,) + (jnp.int32,) * integers + (jnp.float32,),
        1 + integers,
        config.block_rows,
        config.stages_dkv,
    )
    kernel = functools.partial(_dkv_kernel, rule=rule, scale=scale, config=config, interpret=interpret is not None)
    grid = (pl.cdiv(seq, OWNED), batch, kv_heads)
    out_type = [_compat.shape_like(x.shape, x) for x in (key, value)]
    return _call(kernel, "flash_dkv", out_type, scratch, grid, _Inputs(plan, *arrays), interpret)


def _dkv_kernel(inputs, dk, dv, scratch, *, rule, scale, config, interpret):
    batch, kv_head, warpgroup = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
    block = lax.axis_index("block")
    plan = gpu.read_plan(inputs.plan, batch, block)
    group = inputs.query.shape[2] // inputs.key.shape[2]
    steps = group * plan.steps

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, steps)
        def _(step):
            head = kv_head * group + lax.div(step, plan.steps)
            rows = pl.ds(plan.block(lax.rem(step, plan.steps)) * config.block_rows, config.block_rows)
            *vectors, start_dweights = scratch.ring_vectors
            first = [(inputs.query.at[batch, rows, head], scratch.ring[0])]
            sources = [inputs.start_scores.at[batch, head, rows]]
            sources += [x.at[batch, rows] for x in (inputs.positions, inputs.row_ids) if x is not None]
            first += zip(sources, vectors, strict=True)
            second = [
                (inputs.grad_out.at[batch, rows, head], scratch.ring[1]),
                (inputs.start_dweights.at[batch, head, rows], start_dweights),
            ]
            _fetch(scratch, step, config.stages_dkv, first, second)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        first_key = block * OWNED + warpgroup * OF_WARPGROUP
        owned = pl.ds(first_key, OF_WARPGROUP)
        keys, values = (x.at[warpgroup] for x in scratch.owned)
        here = scratch.owned_here.at[warpgroup]
        plgpu.copy_gmem_to_smem(inputs.key.at[batch, owned, kv_head], keys, here)
        plgpu.copy_gmem_to_smem(inputs.value.at[batch, owned, kv_head], values, here)
        if rule.segmented:
            plgpu.copy_gmem_to_smem(inputs.key_ids.at[batch, owned], scratch.owned_vectors[0].at[warpgroup], here)
        plgpu.barrier_wait(here)
        shape = (OF_WARPGROUP, config.block_rows)
        factor, masked = gpu.score_units(scale)
        count = _count(scratch, warpgroup, config.block_rows)

        def visit(step, carry):
            dk_acc, dv_acc = carry
            slot = lax.rem(step, jnp.int32(config.stages_dkv))
            row_block = plan.block(lax.rem(step, plan.steps))
            queries, grads = (x.at[slot] for x in scratch.ring)

            def vector(i):
                return gpu.load(scratch.ring_vectors[i].at[slot], COLUMNS)

            def rows():
                return vector(1) - first_key if rule.gathered else count() + (row_block * config.block_rows - first_key)

            vectors = gpu.Vectors(
                rows=rows,
                keys=lambda: gpu.count(OF_WARPGROUP, ROWS),
                row_ids=lambda: vector(1 + rule.gathered),
                key_ids=lambda: gpu.load(scratch.owned_vectors[0].at[warpgroup], ROWS),
            )
            edges = plan.edges(row_block, of_rows=True)

            def weights_of(scores):
                scores = gpu.masked(scores, rule, vectors, masked, row_axis=1, first_key=first_key, **edges)
                return jnp.exp2(factor * scores)

            def spread(i):
                return lax.broadcast_in_dim(vector(i), shape, [1])

            plgpu.barrier_wait(scratch.here[0].at[slot])
            wait = functools.partial(plgpu.barrier_wait, scratch.here[1].at[slot])
            weights, dweights = gpu.multiply_two(
                (spread(0), keys, queries),
                (lambda: spread(-1), values, grads),
                between=wait,
                of_first=weights_of,
                overlap=_overlaps(rule),
                interpret=interpret,
            )
            narrow = weights.astype(inputs.key.dtype)
            dv_acc = gpu.multiply_add(dv_acc, narrow, grads, interpret=interpret)
            dscores = weights * dweights
            plgpu.commit_smem()  # vectors were loaded before they are overwritten
            plgpu.barrier_arrive(scratch.free[1].at[slot])
            dk_acc = gpu.multiply_add(dk_acc, dscores.astype(inputs.key.dtype), queries, interpret=interpret)
            plgpu.barrier_arrive(scratch.free[0].at[slot])
            return dk_acc, dv_acc

        zeros = plgpu.layout_cast(jnp.zeros((OF_WARPGROUP, inputs.key.shape[3]), jnp.float32), WGMMA)
        dk_acc, dv_acc = lax.fori_loop(0, steps, visit, (zeros, zeros))
        keys[...] = (scale * dk_acc).astype(dk.dtype)
        values[...] = dv_acc.astype(dv.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(keys, dk.at[batch, owned, kv_head])
        plgpu.copy_smem_to_gmem(values, dv.at[batch, owned, kv_head])
        plgpu.wait_smem_to_gmem(0)
