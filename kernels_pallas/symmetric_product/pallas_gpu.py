"""The symmetric product on Hopper GPUs (Mosaic GPU): one thread block for every block on and above the diagonal.

A warpgroup accumulates a block of x yᵀ in registers with `wgmma` while the next operands arrive in shared memory. The
block leaves through shared memory to its own place; its transpose, made by the layout in which registers are
stored, to the mirrored one. On the diagonal the transpose is read back to replace the lower triangle.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas import _compat
from kernels_pallas.symmetric_product.blocks import padded, upper_blocks

KERNEL_NAME = "symmetric_product"

_DTYPES = (jnp.bfloat16, jnp.float16)
_BLOCK, _BLOCK_K = 128, 64
_STAGES = 4  # blocks of operands in flight: 32 KiB each of 227 KiB of shared memory, beside two tiles of 32 KiB


def unsupported(n: int, k: int, dtype: Any) -> str | None:
    """Returns why the kernel does not take (n, k) operands of `dtype`, None if it does."""
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name} (bfloat16 or float16)"
    if n < _BLOCK or k < _BLOCK:
        return f"n = {n}, k = {k} (both at least {_BLOCK})"
    return None


def unsupported_device() -> str | None:
    """Returns why this machine's GPU cannot run the kernel; None if it can, or if there is no GPU to ask."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    return None if capability == "9.0" else f"compute capability {capability} (9.0, Hopper)"


def symmetric_product(
    x: Float[Array, "batch n k"], y: Float[Array, "batch n k"], *, interpret: Any = None
) -> Float[Array, "batch n n"]:
    """See `api.symmetric_product`.

    Args:
      x: bfloat16 or float16.
      y: Shape and dtype of `x`.
      interpret: As in `plgpu.kernel`.

    Returns:
      x yᵀ, exactly symmetric.
    """
    n = x.shape[1]
    x, y = (padded(a, _BLOCK, _BLOCK_K) for a in (x, y))
    batch, rows, _ = x.shape
    block_rows, block_columns = upper_blocks(rows // _BLOCK)
    swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 64 16-bit numbers: 128 bytes
    kernel = plgpu.kernel(
        functools.partial(_kernel, swizzle=swizzle),
        out_type=_compat.shape_like((batch, rows, rows), x),
        scratch_types=[
            plgpu.SMEM((_BLOCK, _BLOCK), x.dtype, transforms=swizzle),
            plgpu.SMEM((_BLOCK, _BLOCK), x.dtype, transforms=swizzle),
        ],
        grid=(len(block_rows), batch),
        grid_names=("pair", "matrix"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=KERNEL_NAME,
        interpret=interpret,
    )
    return kernel(jnp.asarray(block_rows), jnp.asarray(block_columns), x, y)[:, :n, :n]


def _kernel(rows, columns, x, y, out, tile, mirror, *, swizzle):
    pair, matrix = jax.lax.axis_index("pair"), jax.lax.axis_index("matrix")
    i, j = rows[pair], columns[pair]
    i_rows, j_rows = (pl.ds(index * _BLOCK, _BLOCK) for index in (i, j))

    def accumulate(accumulator):
        def step(_, x_block, y_block):
            plgpu.wgmma(accumulator, x_block, y_block.T)
            plgpu.wgmma_wait(1)  # the last but one is done: its operands may be overwritten

        operand = plgpu.BlockSpec((_BLOCK, _BLOCK_K), lambda step: (0, step), transforms=swizzle, delay_release=1)
        plgpu.emit_pipeline(
            step, grid=(x.shape[2] // _BLOCK_K,), in_specs=[operand, operand], max_concurrent_steps=_STAGES
        )(x.at[matrix, i_rows], y.at[matrix, j_rows])
        return accumulator[...]

    block = pl.run_scoped(accumulate, plgpu.ACC((_BLOCK, _BLOCK), jnp.float32)).astype(out.dtype)
    mirror.T[...] = plgpu.layout_cast(block, plgpu.Layout.WGMMA_TRANSPOSED)
    tile[...] = block

    @pl.when(i == j)
    def _():
        plgpu.commit_smem()  # also a barrier: every thread has stored its part of the transpose
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, block.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )
        transposed = plgpu.layout_cast(mirror[...], plgpu.Layout.WGMMA)
        tile[...] = jnp.where(row > column, transposed, block)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out.at[matrix, i_rows, j_rows])

    @pl.when(i != j)
    def _():
        plgpu.copy_smem_to_gmem(mirror, out.at[matrix, j_rows, i_rows])

    plgpu.wait_smem_to_gmem(0)
