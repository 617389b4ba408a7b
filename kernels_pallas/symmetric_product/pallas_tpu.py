"""The symmetric product on TPUs: a grid over the blocks on and above the diagonal, each written twice.

Block (i, j) of x yᵀ is accumulated in VMEM, then copied to (i, j) and, transposed, to (j, i) by copies of our own: a
block specification can write only one place. Copies overlap with the next block; two tiles of scratch take turns, and
before a tile is used again the copies that left from it two blocks ago are waited for. The list of blocks is cut
in two sections where the batch is odd, because chips with two cores (v4, v5p) share out the leading, parallel axis
of the grid; every section waits for its own last copies.

Blocks are transposed in float32: v5e has no 16-bit vector arithmetic.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas import _compat, autotune
from kernels_pallas.symmetric_product.blocks import padded, upper_blocks

KERNEL_NAME = "symmetric_product"

_DTYPES = (jnp.bfloat16, jnp.float32)
_VMEM_BYTES = 14 * 2**20  # of the 16 MiB that a kernel gets on v4 and v5e without asking for more
_SMALLEST = 128  # the side of the systolic array and of a tile


class Config(NamedTuple):
    """Block sizes, multiples of 128: `block` rows of x and of y, `block_k` of their entries at a time."""

    block: int
    block_k: int

    def vmem_bytes(self, itemsize: int) -> int:
        """Double-buffered operands, two pairs of tiles, the accumulator, the product and its transpose.

        And for float32 the three bfloat16 parts in which it is multiplied, of both operands.
        """
        buffers = 4 * self.block * (self.block_k + self.block) * itemsize + 3 * self.block**2 * 4
        return buffers + (12 * self.block * self.block_k if itemsize == 4 else 0)

    def cycles(self, n: int, k: int, itemsize: int) -> float:
        """Roughly the cycles that the compiler estimates for one matrix on v5e.

        A block costs its multiplications (four 128 x 128 arrays; float32 takes six passes) and the work on its
        accumulator, a grid step a constant.
        """
        blocks, steps = pl.cdiv(n, self.block), pl.cdiv(k, self.block_k)
        passes = 6 if itemsize == 4 else 1
        multiply = self.block**2 * steps * self.block_k / (4 * 128 * 128) * passes
        return blocks * (blocks + 1) / 2 * (multiply + (steps + 2) * self.block**2 / 512 + 400 * steps)


def unsupported(n: int, k: int, dtype: Any) -> str | None:
    """Returns why the kernel does not take (n, k) operands of `dtype`, None if it does."""
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name} (bfloat16 or float32)"
    if n < _SMALLEST or k < _SMALLEST:
        return f"n = {n}, k = {k} (both at least {_SMALLEST})"
    return None


def unsupported_device() -> str | None:
    """Returns why this machine's device cannot run the kernel: every TPU can."""
    return None


def tuning_key(n: int, k: int, dtype: Any) -> dict[str, Any]:
    """The case that block sizes are looked up for: sizes in whole tiles."""
    return {
        "n": _SMALLEST * pl.cdiv(n, _SMALLEST),
        "k": _SMALLEST * pl.cdiv(k, _SMALLEST),
        "dtype": jnp.dtype(dtype).name,
    }


def candidates(key: Mapping[str, Any]) -> list[Config]:
    """The configs worth trying for a `tuning_key`: not much slower than the quickest by `Config.cycles`."""
    n, k, itemsize = key["n"], key["k"], jnp.dtype(key["dtype"]).itemsize
    fitting = _fitting(k, itemsize)
    least = min(config.cycles(n, k, itemsize) for config in fitting)
    return [config for config in fitting if config.cycles(n, k, itemsize) <= 1.5 * least]


def heuristic(n: int, k: int, itemsize: int) -> Config:
    """Returns the config with the fewest `Config.cycles` among those that fit the VMEM of every chip."""
    return min(_fitting(k, itemsize), key=lambda config: config.cycles(n, k, itemsize))


def _fitting(k: int, itemsize: int) -> list[Config]:
    whole = 128 * pl.cdiv(k, 128)
    steps = sorted({min(block_k, whole) for block_k in (128, 256, 512, 1024, 2048, 4096, whole)})
    configs = (Config(block, block_k) for block in (128, 256, 384, 512) for block_k in steps)
    return [config for config in configs if config.vmem_bytes(itemsize) <= _VMEM_BYTES]


def symmetric_product(
    x: Float[Array, "batch n k"],
    y: Float[Array, "batch n k"],
    *,
    config: Config | None = None,
    triangle: bool = True,
    interpret: Any = False,
) -> Float[Array, "batch n n"]:
    """See `api.symmetric_product`.

    Args:
      x: bfloat16 or float32.
      y: Shape and dtype of `x`.
      config: Block sizes; None takes those that `autotune` has for this case, else `heuristic`.
      triangle: False computes every block, and gives x yᵀ whether symmetric or not: what benchmarks compare with.
      interpret: As in `pallas_call`.

    Returns:
      x yᵀ, exactly symmetric.

    Raises:
      ValueError: Block sizes that are not multiples of 128.
    """
    n, k = x.shape[1:]
    if config is None:
        found = autotune.lookup(KERNEL_NAME, "pallas_tpu.forward", tuning_key(n, k, x.dtype))
        config = heuristic(n, k, x.dtype.itemsize) if found is None else Config(**found)
    if config.block % 128 or config.block_k % 128 or min(config) < 128:
        raise ValueError(f"config must have positive multiples of 128, got {config}")
    x, y = (padded(a, config.block, config.block_k) for a in (x, y))
    out = _call(x, y, config, triangle, interpret)
    return out[:, :n, :n]


def _call(x: Array, y: Array, config: Config, triangle: bool, interpret: Any) -> Array:
    batch, n, k = x.shape
    block, block_k = config
    blocks, steps = n // block, k // block_k
    rows, columns = upper_blocks(blocks) if triangle else np.indices((blocks, blocks), np.int32).reshape(2, -1)
    pairs = len(rows)
    sections = 1 if batch % 2 == 0 or pairs == 1 else 2
    per_section = pl.cdiv(pairs, sections)
    rows, columns = (np.pad(a, (0, sections * per_section - pairs), mode="edge") for a in (rows, columns))

    def operand(which: int) -> pl.BlockSpec:
        def index(part, pair, step, rows, columns):
            matrix, section = jax.lax.div(part, sections), jax.lax.rem(part, sections)
            return matrix, (rows, columns)[which][section * per_section + pair], step

        return pl.BlockSpec((1, block, block_k), index)

    kernel = functools.partial(_kernel, sections=sections, pairs=pairs, triangle=triangle)
    call = pl.pallas_call(
        kernel,
        out_shape=_compat.shape_like((batch, n, n), x),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch * sections, per_section, steps),
            in_specs=[operand(0), operand(1)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((block, block), jnp.float32),
                pltpu.VMEM((2, 2, block, block), x.dtype),  # turn, (block, its transpose)
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * pairs * block**2 * k,
            bytes_accessed=batch * (pairs * block * k + n * k + n * n) * x.dtype.itemsize,
            transcendentals=0,
        ),
        name=KERNEL_NAME if triangle else KERNEL_NAME + "_all_blocks",
        interpret=interpret,
    )
    return call(rows, columns, x, y)


def _kernel(rows, columns, x, y, out, accumulator, tiles, copied, *, sections, pairs, triangle):
    part, pair, step = (pl.program_id(axis) for axis in range(3))
    per_section, steps = pl.num_programs(1), pl.num_programs(2)
    block = accumulator.shape[0]
    matrix, section = jax.lax.div(part, sections), jax.lax.rem(part, sections)
    first = section * per_section
    count = jnp.minimum(per_section, pairs - first)

    def copies(pair):
        """The copies of a block's tile and of its transpose, and whether there is a second one."""
        i, j, turn = rows[first + pair], columns[first + pair], jax.lax.rem(pair, 2)

        def copy(which, i, j):
            i, j = (pl.ds(pl.multiple_of(index * block, block), block) for index in (i, j))
            return pltpu.make_async_copy(tiles.at[turn, which], out.at[matrix, i, j], copied.at[turn, which])

        return copy(0, i, j), copy(1, j, i), (i != j) & triangle

    def start(pair):
        tile, mirror, mirrored = copies(pair)
        tile.start()
        pl.when(mirrored)(mirror.start)

    def wait(pair):
        tile, mirror, mirrored = copies(pair)
        tile.wait()
        pl.when(mirrored)(mirror.wait)

    def write(product):
        turn, i, j = jax.lax.rem(pair, 2), rows[first + pair], columns[first + pair]
        if triangle:
            mirror = product.T
            row, column = (jax.lax.broadcasted_iota(jnp.int32, product.shape, axis) for axis in (0, 1))
            below = row > jnp.where(i == j, column, block)  # never true off the diagonal
            product = jnp.where(below, mirror, product)
            tiles[turn, 1] = mirror.astype(out.dtype)
        tiles[turn, 0] = product.astype(out.dtype)
        start(pair)

        @pl.when(pair == count - 1)
        def _():
            pl.when(pair >= 1)(lambda: wait(pair - 1))
            wait(pair)

    def compute():
        # Before the product, so that nothing keeps the compiler from overlapping it with what follows it.
        pl.when((step == 0) & (pair >= 2))(lambda: wait(pair - 2))
        product = jax.lax.dot_general(
            x[0],
            y[0],
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        if steps == 1:
            write(product)
            return

        @pl.when(step == 0)
        def _():
            accumulator[...] = product

        @pl.when((step > 0) & (step < steps - 1))
        def _():
            accumulator[...] += product

        @pl.when(step == steps - 1)
        def _():
            write(accumulator[...] + product)

    if sections * per_section == pairs:
        compute()
    else:
        pl.when(pair < count)(compute)
