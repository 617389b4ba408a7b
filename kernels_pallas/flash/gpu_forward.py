"""Attention on Hopper GPUs (Mosaic GPU), forward: one thread block for 128 rows of a query head.

Two warpgroups of 64 rows each multiply and take the softmax, a third fetches blocks of keys and values with TMA, a ring
of them ahead. While one warpgroup is at its softmax the other one has the tensor cores: they meet at a barrier twice a
step. Scores and sums stay in registers. Which blocks of keys a thread block visits is read from its `gpu.Plan`.
"""

import functools
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

ROWS_OF_WARPGROUP = 64
BLOCK_ROWS = WARPGROUPS * ROWS_OF_WARPGROUP


class ForwardConfig(NamedTuple):
    """Block sizes: `block_keys` keys in a step, `stages` steps in shared memory."""

    block_keys: int
    stages: int

    def smem_bytes(self, dim: int) -> int:
        """Shared memory of a thread block: q, the ring of keys and values, vectors and barriers."""
        return 2 * dim * (BLOCK_ROWS + 2 * self.stages * self.block_keys) + gpu.SMEM_RESERVED


def candidates(dim: int) -> list[ForwardConfig]:
    """All that fit shared memory, and registers without spills."""
    configs = [ForwardConfig(keys, stages) for keys in (64, 128) for stages in (2, 3, 4)]
    return [config for config in configs if config.smem_bytes(dim) <= gpu.SMEM_BYTES]


def heuristic(dim: int) -> ForwardConfig:
    """The largest block of keys, then the most stages."""
    return max(candidates(dim))


def attend(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    places: gpu.Places,
    *,
    rule: gpu.Rule,
    scale: float,
    config: ForwardConfig,
    interpret: Any = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """Output and log-sum-exp; see `flash.rules`."""
    batch, rows, heads, dim = query.shape
    blocks = pl.cdiv(rows, BLOCK_ROWS)
    plan = gpu.key_plan(rule, places, rows, key.shape[1], BLOCK_ROWS, config.block_keys)
    inputs = gpu.Inputs(plan, query, key, value, *gpu.padded(places, BLOCK_ROWS, config.block_keys))
    transforms = gpu.swizzled(dim)
    ring = (config.stages, config.block_keys)
    barriers = functools.partial(plgpu.Barrier, num_barriers=config.stages)
    scratch = _Scratch(
        rows=plgpu.SMEM((WARPGROUPS, ROWS_OF_WARPGROUP, dim), query.dtype, transforms=transforms),
        keys=plgpu.SMEM((*ring, dim), query.dtype, transforms=transforms),
        values=plgpu.SMEM((*ring, dim), query.dtype, transforms=transforms),
        lse=plgpu.SMEM((WARPGROUPS, ROWS_OF_WARPGROUP), jnp.float32),
        positions=plgpu.SMEM((WARPGROUPS, ROWS_OF_WARPGROUP), jnp.int32) if rule.gathered else None,
        row_ids=plgpu.SMEM((WARPGROUPS, ROWS_OF_WARPGROUP), jnp.int32) if rule.segmented else None,
        key_ids=plgpu.SMEM(ring, jnp.int32) if rule.segmented else None,
        rows_here=plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=1 + rule.gathered + rule.segmented),
        keys_here=barriers(num_arrivals=1 + rule.segmented),
        values_here=barriers(),
        keys_free=barriers(num_arrivals=WARPGROUPS),
        values_free=barriers(num_arrivals=WARPGROUPS),
        turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, rule=rule, scale=scale, config=config, interpret=interpret is not None),
        out_type=[
            _compat.shape_like(query.shape, query),
            _compat.shape_like((batch, heads, blocks * BLOCK_ROWS), query, jnp.float32),
        ],
        scratch_types=[scratch],
        grid=(blocks, batch, heads),
        grid_names=("block", "batch", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.COMPILER_PARAMS,
        kernel_name="flash_forward",
        interpret=interpret,
    )
    out, lse = kernel(inputs)
    return out, lse[:, :, :rows]


class _Scratch(NamedTuple):
    rows: Any  # q, at the end the output
    keys: Any
    values: Any
    lse: Any
    positions: Any
    row_ids: Any
    key_ids: Any
    rows_here: Any
    keys_here: Any
    values_here: Any
    keys_free: Any
    values_free: Any
    turn: Any


def _kernel(inputs, out, lse, scratch, *, rule, scale, config, interpret):
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    blocks = inputs.plan.shape[1]
    block = blocks - 1 - lax.axis_index("block")  # the longest first
    plan = gpu.read_plan(inputs.plan, batch, block, sinks=rule.sinks > 0)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _attend_rows(inputs, out, lse, scratch, plan, rule, scale, config, interpret, batch, head, block, warpgroup)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(inputs.query.shape[2] // inputs.key.shape[2]))
        _fetch_keys(inputs, scratch, plan, config, batch, kv_head)


def _fetch_keys(inputs, scratch, plan, config, batch, kv_head):
    """The third warpgroup: keys and values of every step into the ring, in the order in which they are needed."""

    @pl.loop(0, plan.steps)
    def _(step):
        slot = lax.rem(step, jnp.int32(config.stages))
        keys = pl.ds(plan.block(step) * config.block_keys, config.block_keys)

        @pl.when(step >= config.stages)
        def _():
            plgpu.barrier_wait(scratch.keys_free.at[slot])

        here = scratch.keys_here.at[slot]
        plgpu.copy_gmem_to_smem(inputs.key.at[batch, keys, kv_head], scratch.keys.at[slot], here)
        if scratch.key_ids is not None:
            plgpu.copy_gmem_to_smem(inputs.key_ids.at[batch, keys], scratch.key_ids.at[slot], here)

        @pl.when(step >= config.stages)
        def _():
            plgpu.barrier_wait(scratch.values_free.at[slot])

        here = scratch.values_here.at[slot]
        plgpu.copy_gmem_to_smem(inputs.value.at[batch, keys, kv_head], scratch.values.at[slot], here)


def _attend_rows(inputs, out, lse, scratch, plan, rule, scale, config, interpret, batch, head, block, warpgroup):
    """A warpgroup that multiplies: all steps for its 64 rows."""
    first_row = block * BLOCK_ROWS + warpgroup * ROWS_OF_WARPGROUP
    rows = pl.ds(first_row, ROWS_OF_WARPGROUP)
    dim = inputs.query.shape[3]
    queries, here = scratch.rows.at[warpgroup], scratch.rows_here.at[warpgroup]
    plgpu.copy_gmem_to_smem(inputs.query.at[batch, rows, head], queries, here)
    for source, target in ((inputs.positions, scratch.positions), (inputs.row_ids, scratch.row_ids)):
        if target is not None:
            plgpu.copy_gmem_to_smem(source.at[batch, rows], target.at[warpgroup], here)
    plgpu.barrier_wait(here)
    if scratch.positions is None:
        positions = first_row + gpu.count(ROWS_OF_WARPGROUP, ROWS)
    else:
        positions = gpu.load(scratch.positions.at[warpgroup], ROWS)
    row_ids = None if scratch.row_ids is None else gpu.load(scratch.row_ids.at[warpgroup], ROWS)

    def meet():
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    factor, masked = gpu.score_units(scale)
    shape = (ROWS_OF_WARPGROUP, config.block_keys)

    def visit(step, carry):
        total, largest, acc = carry
        slot = lax.rem(step, jnp.int32(config.stages))
        key_block = plan.block(step)
        plgpu.barrier_wait(scratch.keys_here.at[slot])
        scores = gpu.multiply(queries, scratch.keys.at[slot], transposed=True, before_wait=meet, interpret=interpret)

        first_key = key_block * config.block_keys
        vectors = gpu.Vectors(
            rows=lambda: positions - first_key,
            keys=lambda: gpu.count(config.block_keys, COLUMNS),
            row_ids=lambda: row_ids,
            key_ids=lambda: gpu.load(scratch.key_ids.at[slot], COLUMNS),
        )
        edges = plan.edges(key_block, of_rows=False)
        scores = gpu.masked(scores, rule, vectors, masked, row_axis=0, first_key=first_key, **edges)
        if rule.segmented:
            plgpu.commit_smem()  # ids were loaded before they are overwritten
        plgpu.barrier_arrive(scratch.keys_free.at[slot])
        new_largest = jnp.maximum(largest, factor * scores.max(axis=1))
        weights = jnp.exp2(factor * scores - lax.broadcast_in_dim(new_largest, shape, [0]))
        shrink = jnp.exp2(largest - new_largest)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + weights.sum(axis=1)
        narrow = weights.astype(inputs.query.dtype)
        total, new_largest, acc, narrow = lax.optimization_barrier((total, new_largest, acc, narrow))
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.values_here.at[slot])
        plgpu.barrier_wait(scratch.turn)
        acc = gpu.multiply_add(acc, narrow, scratch.values.at[slot], interpret=interpret)
        plgpu.barrier_arrive(scratch.values_free.at[slot])
        return total, new_largest, acc

    pl.when(warpgroup == 1)(meet)  # half a step behind
    carry = (
        plgpu.layout_cast(jnp.zeros(ROWS_OF_WARPGROUP, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.full(ROWS_OF_WARPGROUP, 0.5 * masked * factor, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((ROWS_OF_WARPGROUP, dim), jnp.float32), WGMMA),
    )
    total, largest, acc = lax.fori_loop(0, plan.steps, visit, carry)
    pl.when(warpgroup == 0)(meet)

    some = total > 0
    total = jnp.where(some, total, 1.0)
    scratch.lse.at[warpgroup][...] = jnp.where(some, (largest + jnp.log2(total)) * gpu.LOG_2, NOTHING)
    queries[...] = (acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])).astype(out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, out.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(scratch.lse.at[warpgroup], lse.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0)
