"""Compiling for chips that are not there: every chip works, and a program that does not fit is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import aot


def test_unknown_chips_are_named():
    with pytest.raises(ValueError, match="'v99'"):
        aot.missing("v99")
    with pytest.raises(ValueError, match="'v99:2x2'"):
        aot.devices("v99:2x2")


@pytest.mark.aot
@pytest.mark.parametrize("chip", aot.CHIPS)
def test_matmul_compiles_for_every_chip(chip):
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    compiled = aot.compile_for(chip, jnp.matmul, x, w)
    assert compiled.memory_analysis().output_size_in_bytes == 256 * 128 * 2
    if chip in aot.TPUS:
        assert compiled.cost_analysis()["flops"] == pytest.approx(2 * 256 * 512 * 128, rel=0.01)


def _copy(x, block):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    params = pltpu.CompilerParams(vmem_limit_bytes=16 * 2**20)
    return pl.pallas_call(
        kernel, out_shape=x, grid=(x.shape[0] // block,), in_specs=[spec], out_specs=spec, compiler_params=params
    )(x)


@pytest.mark.aot
def test_vmem_overflow_is_an_error():
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    assert aot.compile_for("v5e", lambda x: _copy(x, 256), x) is not None
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        aot.compile_for("v5e", lambda x: _copy(x, 8192), x)


@pytest.mark.aot
def test_mesh_needs_enough_devices():
    assert aot.make_mesh("v5p:4x4x4", (16, 4), ("fsdp", "tensor")).devices.shape == (16, 4)
    with pytest.raises(ValueError, match="128 devices"):
        aot.make_mesh("v5p:4x4x4", (32, 4), ("fsdp", "tensor"))
