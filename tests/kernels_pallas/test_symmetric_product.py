"""The symmetric product: every implementation against float64, and what must hold around it."""

import functools
import inspect
import re
import shutil
import subprocess

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import UnsupportedError, aot, for_every_platform, static_report, symmetric_product, testing
from kernels_pallas.symmetric_product import blocks, pallas_gpu, pallas_tpu, reference, xla

TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
EVERYWHERE = ("reference", "xla", None)
SMALL = pallas_tpu.Config(128, 128)


def rows(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32), dtype)


def symmetric_pair(n, dtype=jnp.float32, seed=0):
    """Two polynomials of one symmetric matrix: their product is symmetric."""
    square = np.random.default_rng(seed).normal(size=(n, n)) / n**0.5
    square = square + square.T
    return tuple(jnp.asarray(p.astype(np.float32), dtype) for p in (square, np.eye(n) + square @ square))


def wide(x):
    return np.asarray(x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, np.float64)


def assert_symmetric_product(got, x, y=None, dtype=jnp.float32):
    """Exactly symmetric, and the upper triangle is x yᵀ up to rounding of sums and of the result."""
    assert got.dtype == dtype
    got, x, y = wide(got), wide(x), wide(x if y is None else y)
    np.testing.assert_array_equal(got, np.swapaxes(got, -1, -2))
    want = np.triu(x @ np.swapaxes(y, -1, -2))
    # Sums of k terms: the error is relative to the sum of their magnitudes.
    scale = np.abs(x) @ np.swapaxes(np.abs(y), -1, -2)
    assert got.shape == want.shape
    assert (np.abs(np.triu(got) - want) <= TOLERANCES[jnp.dtype(dtype).name] * scale + 1e-30).all()


@functools.partial(jax.jit, static_argnames="implementation")
def call(x, y=None, *, implementation):
    return symmetric_product(x, y, implementation=implementation)


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (2, 130, 200), (2, 0, 3, 4), (5, 0), (0, 5), (3, 2, 20, 9), (801, 30)]
)
def test_gram_matrix(shape, implementation):
    x = rows(shape)
    assert_symmetric_product(call(x, implementation=implementation), x)


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_dtypes(dtype, implementation):
    with jax.enable_x64(dtype == jnp.float64):
        x = rows((2, 140, 150), dtype)
        assert_symmetric_product(call(x, implementation=implementation), x, dtype=dtype)
        x, y = symmetric_pair(800, dtype)  # xla halves the rows
        got = call(x, y, implementation=implementation)
        assert_symmetric_product(got, x, y, dtype=dtype)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**20))
def test_any_shape(batch, n, k, seed):
    x = rows((*batch, n, k), seed=seed)
    assert_symmetric_product(symmetric_product(x), x)
    assert_symmetric_product(symmetric_product(x, implementation="reference"), x)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2))
def test_halving_any_number_of_rows(n, k, halvings):
    x = rows((n, k), seed=n)
    assert_symmetric_product(jax.jit(xla._halved, static_argnums=2)(x, x, halvings), x)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.integers(1, 2), st.integers(100, 400), st.integers(100, 400), st.sampled_from(["float32", "bfloat16"]))
def test_tpu_kernel_on_any_shape(batch, n, k, dtype):
    x = rows((batch, n, k), jnp.dtype(dtype), seed=n + k)
    got = pallas_tpu.symmetric_product(x, x, config=SMALL, interpret=True)
    assert_symmetric_product(got, x, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("batch", "n", "k", "config"),
    [
        (1, 384, 384, SMALL),  # six blocks over two sections, three steps
        (2, 384, 128, SMALL),  # one section for each matrix, one step
        (1, 300, 200, SMALL),  # three blocks over two sections: one has a block less; padded rows and columns
        (1, 128, 130, SMALL),  # a single block
        (1, 512, 256, pallas_tpu.Config(256, 128)),
    ],
)
def test_tpu_kernel_has_no_races(batch, n, k, config):
    x = rows((batch, n, k))
    y = x
    if n == k:
        x, y = (jnp.broadcast_to(a, (batch, n, n)) for a in symmetric_pair(n))
    with testing.race_free() as interpret:
        got = pallas_tpu.symmetric_product(x, y, config=config, interpret=interpret)
        assert_symmetric_product(got, x, y)


def test_a_wait_that_is_missing_would_be_seen(monkeypatch):
    class Unwaited:
        def __init__(self, *args):
            self.start = make_async_copy(*args).start

        def wait(self):
            pass

    make_async_copy = pltpu.make_async_copy
    monkeypatch.setattr(pltpu, "make_async_copy", Unwaited)
    x = rows((1, 384, 128))
    interpret = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode="on_wait")
    assert np.isnan(pallas_tpu.symmetric_product(x, x, config=SMALL, interpret=interpret)).any()


def test_tpu_kernel_computing_all_blocks_is_the_plain_product():
    x, y = rows((1, 384, 256)), rows((1, 384, 256), seed=1)
    got = pallas_tpu.symmetric_product(x, y, config=SMALL, triangle=False, interpret=True)
    np.testing.assert_allclose(got, wide(x) @ np.swapaxes(wide(y), 1, 2), atol=1e-4)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this version of JAX has no GPU interpreter")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (300, 450)])
def test_gpu_kernel_interpreted(n, k, dtype):
    x, y = (a[None] for a in symmetric_pair(n, dtype)) if n == k else (rows((2, n, k), dtype),) * 2
    got = pallas_gpu.symmetric_product(x, y, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert_symmetric_product(got, x, y, dtype=dtype)


def test_kernels_take_what_is_not_quite_symmetric_from_above_the_diagonal():
    x, y = rows((1, 256, 128)), rows((1, 256, 128), seed=1)
    want = np.triu(wide(x) @ np.swapaxes(wide(y), 1, 2))
    want = want + np.swapaxes(np.triu(want, 1), 1, 2)
    for function in (
        reference.symmetric_product,
        functools.partial(xla._halved, halvings=2),
        functools.partial(pallas_tpu.symmetric_product, config=SMALL, interpret=True),
    ):
        np.testing.assert_allclose(function(x, y), want, atol=1e-4)


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("gram", [True, False])
def test_derivatives_are_those_of_the_plain_product(gram, implementation):
    x, y = symmetric_pair(130)
    cotangent = rows((130, 130), seed=2)  # not symmetric

    def loss(product, x, y):
        return jnp.sum(cotangent * jnp.sin(product(x, None if gram else y)))

    def plain(x, y):
        return jnp.matmul(x, (x if y is None else y).T, precision="highest")

    for derivative in (
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x))[1],
        lambda f: jax.grad(lambda x, y: sum(jnp.sum(g**2) for g in jax.grad(f, argnums=(0, 1))(x, y)), argnums=(0, 1)),
    ):
        product = functools.partial(symmetric_product, implementation=implementation)
        got, want = (jax.jit(derivative(functools.partial(loss, f)))(x, y) for f in (product, plain))
        chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_gradients_keep_their_dtype():
    x = rows((2, 150, 140), jnp.bfloat16)
    g = rows((2, 150, 150), jnp.bfloat16, seed=1)
    dx = jax.jit(lambda x: jax.vjp(symmetric_product, x)[1](g)[0])(x)
    assert dx.dtype == jnp.bfloat16
    want = (wide(g) + np.swapaxes(wide(g), 1, 2)) @ wide(x)
    assert np.abs(wide(dx) - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_vmap_equals_a_loop(implementation):
    x, y = rows((3, 2, 20, 140)), rows((2, 20, 140), seed=1)
    product = functools.partial(call, implementation=implementation)
    batched = jax.vmap(product, in_axes=(0, None))(x, y)
    np.testing.assert_allclose(batched, jnp.stack([product(x[i], y) for i in range(3)]), rtol=1e-6)
    moved = jax.vmap(product, in_axes=2, out_axes=1)(jnp.moveaxis(x, 0, 2))
    np.testing.assert_allclose(jnp.moveaxis(moved, 1, 0), product(x), rtol=1e-6)


def test_vmap_folds_into_the_batch_of_a_kernel():
    x = rows((2, 3, 140, 130), jnp.bfloat16)
    with for_every_platform():
        jaxpr = str(jax.make_jaxpr(jax.vmap(jax.vmap(symmetric_product)))(x))
    assert "bf16[6,256,256]" in jaxpr or "bfloat16[6,256,256]" in jaxpr


def test_scan_of_newton_schulz_iterations():
    z = rows((160, 300))
    z = z / jnp.linalg.norm(z)

    @jax.jit
    def orthogonalized(z):
        def step(z, _):
            gram = symmetric_product(z)
            return 1.5 * z - 0.5 * gram @ z, None

        return jax.lax.scan(step, z, length=25)[0]

    np.testing.assert_allclose(symmetric_product(orthogonalized(z)), np.eye(160), atol=1e-4)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x")], ids=["batch", "rows", "columns"])
def test_partitioned_over_two_devices(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = rows((2, 160, 180))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    assert_symmetric_product(jax.device_get(call(sharded, implementation=None)), x)


def test_kernels_only_where_nothing_is_partitioned():
    x = rows((2, 160, 180), jnp.bfloat16)

    def has_kernel(function):
        with for_every_platform():
            return "platform_index" in str(jax.make_jaxpr(function)(x))

    auto, one = (jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,)) for n in (2, 1))
    assert has_kernel(symmetric_product)
    with jax.set_mesh(one):
        assert has_kernel(symmetric_product)
    with jax.set_mesh(auto):
        assert not has_kernel(symmetric_product)
        assert has_kernel(jax.shard_map(symmetric_product, in_specs=P("x"), out_specs=P("x")))


def test_explicit_sharding():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    x = rows((2, 160, 180))
    with jax.set_mesh(mesh):
        got = call(jax.device_put(x, NamedSharding(mesh, P("x"))), implementation=None)
    assert got.sharding.spec == P("x", None, None)
    assert_symmetric_product(jax.device_get(got), x)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = rows((4, 160, 160), jnp.bfloat16)

    def both(x, y):  # y is the same on all devices
        return symmetric_product(x), symmetric_product(y, x[:1])

    got, mixed = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))(x, x[:1])
    assert_symmetric_product(got, x, dtype=jnp.bfloat16)
    assert mixed.shape == (2, 160, 160)


def test_exported_program():
    x = rows((150, 140), jnp.bfloat16)
    exported = jax.export.export(jax.jit(symmetric_product))(x)
    np.testing.assert_array_equal(exported.call(x), symmetric_product(x))


def test_dispatch():
    x = rows((150, 140), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"pallas_tpu: needs a TPU, running on cpu"):
        symmetric_product(x, implementation="pallas_tpu")
    with pytest.raises(UnsupportedError, match=r"pallas_gpu: needs a GPU, running on cpu"):
        symmetric_product(x, implementation=("pallas_gpu", "pallas_tpu"))
    np.testing.assert_array_equal(
        symmetric_product(x, implementation=("pallas_tpu", "reference")),
        symmetric_product(x, implementation="reference"),
    )


@pytest.mark.parametrize(
    ("n", "k", "dtype", "tpu", "gpu"),
    [
        (128, 128, "bfloat16", None, None),
        (128, 128, "float32", None, "float32"),
        (128, 128, "float16", "float16", None),
        (128, 128, "float64", "float64", "float64"),
        (127, 500, "bfloat16", "n = 127", "n = 127"),
        (500, 127, "bfloat16", "k = 127", "k = 127"),
    ],
)
def test_what_the_kernels_take(n, k, dtype, tpu, gpu):
    for module, reason in ((pallas_tpu, tpu), (pallas_gpu, gpu)):
        got = module.unsupported(n, k, jnp.dtype(dtype))
        assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("argument", "x", "y"),
    [
        ("x", np.zeros(3, np.float32), None),
        ("x", np.zeros((3, 3), np.int32), None),
        ("x", np.zeros((3, 3), np.complex64), None),
        ("y", np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float32)),
        ("y", np.zeros((3, 4), np.float32), np.zeros((1, 3, 4), np.float32)),
        ("y", np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float16)),
    ],
)
def test_bad_inputs(argument, x, y):
    with pytest.raises(ValueError, match=f"^{argument} must"):
        inspect.unwrap(symmetric_product)(jnp.asarray(x), None if y is None else jnp.asarray(y))


def test_bad_block_sizes():
    x = rows((1, 256, 256))
    with pytest.raises(ValueError, match=r"^config must"):
        pallas_tpu.symmetric_product(x, x, config=pallas_tpu.Config(64, 128), interpret=True)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_upper_blocks_cover_the_triangle_once(count):
    pairs = list(zip(*map(np.ndarray.tolist, blocks.upper_blocks(count)), strict=True))
    assert pairs == sorted({(i, j) for i in range(count) for j in range(i, count)})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(128, 8192), st.integers(128, 8192), st.sampled_from([2, 4]))
def test_chosen_blocks_fit_the_memory_of_every_tpu(n, k, itemsize):
    config = pallas_tpu.heuristic(n, k, itemsize)
    assert config.block % 128 == config.block_k % 128 == 0
    assert config.vmem_bytes(itemsize) <= 14 * 2**20
    # Padding wastes less than a block of 128 rows would, twice over.
    assert -n % config.block < max(256, 0.25 * n)


@pytest.mark.aot
@pytest.mark.parametrize("chip", aot.CHIPS)
def test_none_compiles_to_the_kernel(chip):
    is_tpu = chip in aot.TPUS
    takes = (jnp.bfloat16, jnp.float32) if is_tpu else (jnp.bfloat16, jnp.float16)
    target = "tpu_custom_call" if is_tpu else "mosaic_gpu"
    for shape, dtype in (
        ((2, 3, 256, 384), takes[0]),
        ((300, 200), takes[1]),
        ((64, 256), takes[0]),
        ((256, 256), "f"),
    ):
        x = jax.ShapeDtypeStruct(shape, dtype)
        text = aot.compile_for(chip, symmetric_product, x).as_text()
        assert (target in text) == (shape[-2] >= 128 and x.dtype in takes), (shape, dtype)
    x = jax.ShapeDtypeStruct((3, 256, 256), takes[0])
    text = aot.compile_for(chip, jax.vmap(lambda x: symmetric_product(x, x)), x).as_text()
    assert text.count(f'custom_call_target="{target}') == 1


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4", "v5e"])  # the least memory that a kernel gets
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_chosen_blocks_compile_at_every_size(chip, dtype):
    for n, k in ((128, 8192), (640, 2560), (768, 3072), (1024, 1024), (2048, 512), (2048, 8192), (8192, 8192)):
        x = jax.ShapeDtypeStruct((1, n, k), dtype)
        assert aot.compile_for(chip, pallas_tpu.symmetric_product, x, x) is not None


@pytest.mark.aot
def test_kernel_in_shard_map_compiles_for_a_mesh():
    mesh = aot.make_mesh("v5e", (4,), ("x",))
    x = jax.ShapeDtypeStruct((8, 256, 384), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    local = jax.shard_map(symmetric_product, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert "tpu_custom_call" in jax.jit(local).lower(x).compile().as_text()
    with jax.set_mesh(mesh):  # without the shard_map: XLA's own products, partitioned
        assert "tpu_custom_call" not in jax.jit(symmetric_product).lower(x).compile().as_text()


@pytest.mark.aot
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs CUDA's ptxas")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gpu_kernel_keeps_its_accumulator_in_registers(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    x = jax.ShapeDtypeStruct((1, 512, 512), dtype)
    aot.compile_for("h100", pallas_gpu.symmetric_product, x, x)
    (ptx,) = tmp_path.glob("*.ptx")
    command = ["ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    # One step is a 128 x 128 x 64 product in instructions of 64 x 128 x 16.
    assert len(re.findall(r"wgmma\.mma_async\S*m64n128k16", ptx.read_text())) == 2 * 4


def estimated(n, k, block, triangle):
    """A program for `static_report`."""
    x = jax.ShapeDtypeStruct((1, n, k), jnp.bfloat16)
    config = pallas_tpu.Config(block, k)
    return functools.partial(pallas_tpu.symmetric_product, config=config, triangle=triangle), (x, x)


@pytest.mark.aot
def test_estimated_cycles():
    programs = [
        static_report.Program(chip, f"{__name__}:estimated", {"n": 2048, "k": 2048, "block": 256, "triangle": triangle})
        for chip in ("v5e", "v5p")
        for triangle in (True, False)
    ]
    v5e, v5e_all, v5p, _ = static_report.estimated_cycles(programs)
    triangle, everything = v5e["symmetric_product"], v5e_all["symmetric_product_all_blocks"]
    # Four arrays of 128 x 128 multiply 36 of 64 blocks of 256; half the time again for all that is not multiplying.
    assert 36 * 256 * 256 * 2048 / 4 / 128**2 < triangle < 1.5 * 36 * 256 * 256 * 2048 / 4 / 128**2
    assert triangle < 0.65 * everything
    assert v5p["symmetric_product"] < 0.6 * triangle  # two cores, at a similar clock
