"""Attention on Hopper GPUs: plans of blocks, kernels in JAX's interpreter, their machine code, and runs on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels_pallas import aot, causal_attention, dispatch, gathered_attention, ptx, sliding_window_attention
from kernels_pallas.flash import gpu, gpu_backward, gpu_forward, gpu_passes
from kernels_pallas.flash.gpu_backward import BackwardConfig
from kernels_pallas.flash.gpu_forward import ForwardConfig
from tests.kernels_pallas.attention_cases import (
    assert_matches,
    causal_visible,
    formulas,
    make_inputs,
    random_rows,
    random_segments,
    value_and_grads,
    window_visible,
)

HEAD_SIZES = (64, 80, 128)
SMALL = {"forward": ForwardConfig(64, 2), "backward": BackwardConfig(64, 64, 2, 2)}


class Case:
    """A call of one of the operations, and what it must show."""

    def __init__(self, kind, seq, heads, kv_heads, dim, *, rows=None, window=None, sinks=0, segmented=False, batch=1):
        self.kind, self.seq, self.rows, self.batch, self.dim = kind, seq, rows or seq, batch, dim
        self.heads, self.kv_heads, self.segmented = heads, kv_heads, segmented
        self.statics = {"scale": dim**-0.5} | ({"window": window, "sinks": sinks} if window else {})
        self.ids = random_segments(batch, seq) if segmented else None
        self.positions = random_rows(batch, seq, self.rows) if kind == "gathered" else None

    def __str__(self):
        statics = " ".join(f"{k}{v}" for k, v in self.statics.items() if k != "scale")
        return f"{self.kind} {self.rows}x{self.seq} h{self.heads}/{self.kv_heads} d{self.dim} {statics}" + (
            " segments" if self.segmented else ""
        )

    @property
    def operation(self):
        return {"window": "sliding_window_attention"}.get(self.kind, f"{self.kind}_attention")

    @property
    def extras(self):
        return {
            "causal": (self.ids,),
            "window": (self.ids, None),
            "gathered": (self.positions, self.ids),
        }[self.kind]

    def arrays(self, dtype=jnp.bfloat16):
        return make_inputs(self.rows, self.seq, self.heads, self.kv_heads, self.dim, batch=self.batch, dtype=dtype)

    def visible(self):
        places = np.broadcast_to(np.arange(self.seq), (self.batch, self.seq))
        if self.kind == "window":
            return window_visible(places, self.seq, self.statics["window"], self.statics["sinks"], self.ids)
        if self.kind == "gathered":
            return causal_visible(self.positions, self.seq, self.ids)
        ids = None if self.ids is None else self.ids + 1  # 0 is an id like any other
        return causal_visible(places, self.seq, ids)

    def call(self, q, k, v, **options):
        """The public function."""
        if self.kind == "gathered":
            return gathered_attention(q, k, v, self.positions, segment_ids=self.ids, **options)
        if self.kind == "window":
            statics = {name: self.statics[name] for name in ("window", "sinks")}
            return sliding_window_attention(q, k, v, **statics, segment_ids=self.ids, **options)
        return causal_attention(q, k, v, segment_ids=self.ids, **options)


# Plans: numbers in, numbers out, no GPU needed.


def rule_and_places(kind, rows, seq, window, sinks, segmented, seed):
    """Also the positions and ids of the rows, as numpy arrays; -1 sees nothing."""
    ids = random_segments(2, seq, seed) if segmented else None
    if kind == "gathered":
        given = random_rows(2, seq, rows, seed)
        places = gpu_passes.gathered_places(given, ids, seq)
        return gpu.Rule(gathered=True, segmented=segmented), places, np.asarray(places.positions)
    positions = np.broadcast_to(np.arange(rows), (2, rows))
    if kind == "window":
        rule = gpu.Rule(window=window, sinks=0 if segmented else sinks, segmented=segmented)
        return rule, gpu_passes.window_places(ids), positions
    return gpu.Rule(segmented=segmented), gpu_passes.causal_places(ids), positions


def conditions(rule, places, positions, seq):
    """What must hold of a pair (row, key) to be visible, each (batch, rows, seq)."""
    t, s = positions[:, :, None], np.arange(seq)
    near = np.ones((*positions.shape, seq), bool)
    if rule.window is not None:
        near = (s > t - rule.window) | (s < rule.sinks)
    same = np.ones_like(near)
    if rule.segmented:
        same = np.asarray(places.row_ids)[:, :, None] == np.asarray(places.key_ids)[:, None, :]
    return {"causal": s <= t, "window": near, "segments": same}


def assert_plan(plan, holds, outer, inner, *, of_rows, counts):
    """Every block with a visible pair is visited, once, and with the masks that its pairs (where `counts`) need."""
    plan = np.asarray(plan)
    visible = functools.reduce(np.logical_and, holds.values()) & counts
    for b, o in np.ndindex(2, plan.shape[1]):
        numbers = gpu.Plan(*plan[min(b, plan.shape[0] - 1), o])
        visited = [int(numbers.block(step)) for step in range(int(numbers.steps))]
        assert len(set(visited)) == len(visited)
        own = slice(o * outer, (o + 1) * outer)
        seen = np.flatnonzero(visible[b, own].any(axis=0))
        assert set(seen // inner) <= set(visited)
        for block in visited:
            edges = numbers.edges(block, of_rows=of_rows)
            pairs = np.s_[b, own, block * inner : (block + 1) * inner]
            for name, values in holds.items():
                if not edges[name] and edges[name] is not None:
                    assert values[pairs][counts[pairs]].all(), (name, o, block)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(["causal", "window", "gathered"]),
    st.sampled_from([5, 37]),
    st.just(16),
    st.integers(1, 70),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([(8, 4), (4, 8)]),
    st.integers(0, 2**20),
)
def test_plans_visit_what_is_visible_with_the_masks_it_needs(kind, seq, rows, window, sinks, segmented, sizes, seed):
    rows = rows if kind == "gathered" else seq
    block_rows, block_keys = sizes
    rule, places, positions = rule_and_places(kind, rows, seq, window, sinks, segmented, seed)
    holds = conditions(rule, places, positions, seq)
    # Keys that do not exist must be masked too, except for rows that do not matter.
    holds = {name: np.pad(x, ((0, 0), (0, 0), (0, block_keys))) for name, x in holds.items()}
    holds |= {name: holds[name] | (np.arange(seq + block_keys) >= seq) for name in ("window", "segments")}
    plan = gpu.key_plan(rule, places, rows, seq, block_rows, block_keys)
    everything = np.ones_like(holds["causal"])
    assert_plan(plan, holds, block_rows, block_keys, of_rows=False, counts=everything)
    # The weights of rows that see nothing are 0 in the backward pass, whatever the mask.
    holds = {name: x[:, :, :seq].swapaxes(1, 2) for name, x in holds.items()}
    counts = np.broadcast_to(positions[:, None, :] >= 0, holds["causal"].shape)
    plan = gpu.row_plan(rule, places, rows, seq, block_rows, block_keys)
    assert_plan(plan, holds, block_keys, block_rows, of_rows=True, counts=counts)


def test_a_window_visits_its_band_and_the_sinks_only():
    rule = gpu.Rule(window=256, sinks=4)
    plan = gpu.Plan(*np.asarray(gpu.key_plan(rule, gpu.Places(), 4096, 4096, 128, 128))[0, 20])
    assert [int(plan.block(i)) for i in range(int(plan.steps))] == [0, 18, 19, 20]
    rows = gpu.Plan(*np.asarray(gpu.row_plan(rule, gpu.Places(), 4096, 4096, 128, 128))[0, 20])
    assert [int(rows.block(i)) for i in range(int(rows.steps))] == [20, 21, 22]


def test_packed_sequences_skip_other_sequences():
    ids = jnp.repeat(jnp.arange(1, 5), 256)[None]
    places = gpu_passes.causal_places(ids)
    plan = np.asarray(gpu.key_plan(gpu.Rule(segmented=True), places, 1024, 1024, 128, 128))
    assert [(int(first), int(last)) for first, last in plan[0, :, 1:3]] == [
        (0, 1), (0, 2), (2, 3), (2, 4), (4, 5), (4, 6), (6, 7), (6, 8),
    ]  # fmt: skip
    # Both keys of blocks are of one segment: only the diagonal needs a mask.
    assert gpu.Plan(*plan[0, 3]).edges(2, of_rows=False) == {"causal": False, "window": False, "segments": False}


@pytest.mark.parametrize("two_masks", [False, True])
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_every_candidate_fits_shared_memory(dim, two_masks):
    forward, backward = gpu_forward.candidates(dim), gpu_backward.candidates(dim, two_masks)
    assert gpu_forward.heuristic(dim) in forward
    assert gpu_backward.heuristic(dim, two_masks) in backward
    assert all(config.smem_bytes(dim) <= 232_448 for config in (*forward, *backward))
    assert len(set(forward)) == len(forward) > 1
    assert len(set(backward)) == len(backward) > 1


def test_bad_configs():
    case = Case("causal", 128, 1, 1, 128)
    module = dispatch.module(case.operation, "pallas_gpu")
    q, k, v, _ = case.arrays()
    for config in (ForwardConfig(96, 2), ForwardConfig(128, 1), ForwardConfig(128, 4)):
        with pytest.raises(ValueError, match=r"^config must"):
            module.forward(q, k, v, None, scale=1.0, config=config)


def test_what_the_kernels_refuse():
    def array(dim=64, dtype="bfloat16"):
        return jax.ShapeDtypeStruct((1, 256, 2, dim), jnp.dtype(dtype))

    causal, window, gathered = (
        dispatch.module(f"{name}_attention", "pallas_gpu").unsupported
        for name in ("causal", "sliding_window", "gathered")
    )
    statics = {"scale": 1.0, "window": 8, "sinks": 2, "segmented": False, "chunk": False}
    for dtype in ("bfloat16", "float16"):
        for dim in HEAD_SIZES:
            assert causal(array(dim, dtype), array(dim, dtype)) is None
            assert window(array(dim, dtype), array(dim, dtype), **statics) is None
            assert gathered(array(dim, dtype), array(dim, dtype), segmented=True) is None
    assert "float32" in causal(array(dtype="float32"), array(dtype="float32"))
    assert "head size 96" in gathered(array(96), array(96), segmented=False)
    assert "q_positions" in window(array(), array(), **statics | {"chunk": True})
    assert "sinks" in window(array(), array(), **statics | {"segmented": True})
    assert window(array(), array(), **statics | {"segmented": True, "sinks": 0}) is None


@pytest.mark.parametrize("version", ["cuda 12080", "PJRT C API\ncuda 12090"])
def test_the_cuda_that_miscompiles_masks_is_refused(version):
    assert "CUDA 12" in gpu._miscompiled(version)
    assert gpu._miscompiled("cuda 12091") is gpu._miscompiled("cuda 12070") is gpu._miscompiled("rocm") is None


@pytest.mark.parametrize("kind", ["causal", "window", "gathered"])
def test_kernels_trace_under_shard_map_and_vmap(kind):
    """Results vary over the mesh as inputs do; a mapped axis is part of the batch."""
    rows, window = (30, None) if kind == "gathered" else (None, 5 if kind == "window" else None)
    case = Case(kind, 40, 4, 2, 64, rows=rows, window=window, batch=1)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    run = value_and_grads(case.call, jit=False)
    stacked = [jnp.concatenate([x, x]) for x in case.arrays()]
    with dispatch.for_every_platform():
        mapped = jax.make_jaxpr(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(*stacked)
        batched = jax.make_jaxpr(jax.vmap(run))(*(x[:, None] for x in stacked))
    for jaxpr in (mapped, batched):
        assert all(name in str(jaxpr) for name in ("flash_forward", "flash_dq", "flash_dkv"))
    assert f"bf16[2,{case.rows},4,64]" in str(batched).replace("bfloat16", "bf16")


# Kernels in the interpreter: values, and no thread reads what another has not finished writing.


def interpreted(case, dtype):
    module = dispatch.module(case.operation, "pallas_gpu")

    def passes(q, k, v, g):
        kwargs = {"interpret": plgpu.InterpretGPUParams(detect_races=True), **case.statics}
        out, lse = module.forward(q, k, v, *case.extras, config=SMALL["forward"], **kwargs)
        return out, *module.backward(q, k, v, *case.extras, out, lse, g, config=SMALL["backward"], **kwargs)

    arrays = case.arrays(dtype)
    assert_matches(passes(*arrays), formulas(*arrays, case.visible()), 1e-2, 1.5e-2)


needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this version of JAX has no GPU interpreter"
)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 200, 2, 1, 64),
        Case("causal", 139, 2, 2, 80, segmented=True),
        Case("window", 301, 2, 1, 64, window=70, sinks=5),
        Case("window", 261, 1, 1, 128, window=70, segmented=True),
        Case("gathered", 300, 2, 2, 64, rows=140, batch=2),
        Case("gathered", 200, 2, 1, 64, rows=131, segmented=True),
        Case("gathered", 9, 1, 1, 64, rows=3),
    ],
    ids=str,
)
def test_interpreted_kernels_match_formulas_without_races(case):
    interpreted(case, jnp.bfloat16)


@needs_interpreter
def test_interpreted_kernels_in_float16():
    interpreted(Case("causal", 40, 1, 1, 64), jnp.float16)


@needs_interpreter
def test_a_missing_wait_would_be_seen(monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    case = Case("causal", 128, 1, 1, 64)
    q, k, v, _ = case.arrays()
    module = dispatch.module(case.operation, "pallas_gpu")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.raises(Exception, match=r"RACE DETECTED|phase|barrier|waited"):
        jax.block_until_ready(module.forward(q, k, v, None, scale=1.0, interpret=interpret))


# Machine code, without a GPU.


def compiled(case, chip, dtype=jnp.bfloat16, batch=2):
    """Output and gradients through the public function, compiled for a chip."""
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), dtype) for x in case.arrays()]
    extras = [None if x is None else jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in case.extras]

    def run(q, k, v, g, extras):
        if case.kind == "gathered":
            case.positions, case.ids = extras
        else:
            case.ids = extras[0]
        return value_and_grads(case.call, jit=False)(q, k, v, g)

    positions, ids = case.positions, case.ids
    try:
        return aot.compile_for(chip, run, *shapes, extras)
    finally:
        case.positions, case.ids = positions, ids


CODE_CASES = [
    case
    for dim in HEAD_SIZES
    for case in (
        Case("causal", 1003, 8, 2, dim),
        Case("causal", 1024, 4, 4, dim, segmented=True),
        Case("window", 1003, 8, 1, dim, window=100),
        Case("window", 1000, 8, 2, dim, window=256, sinks=4),
        Case("window", 1003, 4, 4, dim, window=200, segmented=True),
        Case("gathered", 1003, 8, 2, dim, rows=333),
        Case("gathered", 1024, 4, 4, dim, rows=200, segmented=True),
    )
]


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("case", CODE_CASES, ids=str)
def test_machine_code(case, tmp_path, monkeypatch):
    """No register is spilled, a block fits a multiprocessor, products are tensor core instructions and no others."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    for name, value in ptx.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert compiled(case, "h100").as_text().count('custom_call_target="mosaic_gpu') == 3
    found = {name.rsplit("_", 1)[0]: code for name, code in ptx.kernels(tmp_path).items()}
    two_masks = case.kind == "window" and case.segmented
    forward, backward = gpu_forward.heuristic(case.dim), gpu_backward.heuristic(case.dim, two_masks)
    # Instructions are 64 rows high, as wide as the block, and take 16 of the sum; a loop's body is there once.
    of_dim = case.dim // 16
    expected = {
        "flash_forward": of_dim + forward.block_keys // 16,
        "flash_dq": 2 * of_dim + backward.block_keys // 16,
        "flash_dkv": 2 * of_dim + 2 * backward.block_rows // 16,
    }
    limits = {
        "flash_forward": forward.smem_bytes(case.dim),
        "flash_dq": backward.smem_bytes(case.dim),
        "flash_dkv": backward.smem_bytes(case.dim),
    }
    assert found.keys() == expected.keys()
    for name, code in found.items():
        assert code.spills == 0, name
        assert code.threads == 384
        assert code.registers <= 168
        assert code.blocks_per_multiprocessor >= 1
        assert code.shared <= limits[name] <= 232_448
        assert code.wgmma == expected[name]
    if ptx.nvdisasm() is None:
        pytest.skip("the rest needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    assert {name: code.hgmma for name, code in found.items()} == expected


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_candidates_spill_nothing(dim, tmp_path, monkeypatch):
    """The largest blocks of every size; stages make no difference to registers."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    for name, value in ptx.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    case = Case("window", 1024, 4, 2, dim, window=200, segmented=True)
    module = dispatch.module(case.operation, "pallas_gpu")
    q, k, v, g = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.arrays())
    ids, lse = jax.ShapeDtypeStruct((1, 1024), jnp.int32), jax.ShapeDtypeStruct((1, 4, 1024), jnp.float32)
    for config in {c.block_keys: c for c in gpu_forward.candidates(dim)}.values():
        function = functools.partial(module.forward, config=config, **case.statics)
        aot.compile_for("h200", lambda q, k, v, ids, f=function: f(q, k, v, ids, None), q, k, v, ids)
    for config in {c[:2]: c for c in gpu_backward.candidates(dim, two_masks=True)}.values():
        function = functools.partial(module.backward, config=config, **case.statics)
        aot.compile_for("h200", lambda *a, f=function: f(*a[:4], None, *a[4:]), q, k, v, ids, q, lse, g)
    codes = ptx.kernels(tmp_path)
    assert len(codes) >= 5  # where only the number of keys differs, the kernel of dk and dv is the same
    assert {name: code.spills for name, code in codes.items() if code.spills} == {}


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["h100", "h200"])
@pytest.mark.parametrize("kind", ["causal", "window", "gathered"])
def test_none_compiles_to_the_kernels_except_for_float32(kind, chip):
    case = Case(kind, 203, 4, 2, 64, rows=70 if kind == "gathered" else None, window=64 if kind == "window" else None)
    assert compiled(case, chip, jnp.float16).as_text().count('custom_call_target="mosaic_gpu') == 3
    assert "mosaic_gpu" not in compiled(case, chip, jnp.float32).as_text()


@pytest.mark.aot
def test_kernels_compile_with_64_bit_types_switched_on():
    q, k = (jax.ShapeDtypeStruct((1, 200, heads, 64), jnp.bfloat16) for heads in (4, 2))
    module = dispatch.module("gathered_attention", "pallas_gpu")

    def run(q, k, positions):
        out, lse = module.forward(q, k, k, positions, positions, scale=0.1)
        return module.backward(q, k, k, positions, positions, out, lse, q, scale=0.1)

    with jax.enable_x64(True):
        text = aot.compile_for("h100", run, q, k, jax.ShapeDtypeStruct((1, 200), jnp.int64)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3


# On a GPU, in one command: JAX_PLATFORMS=cuda pytest -m gpu tests/kernels_pallas/test_attention_gpu.py

GPU_CASES = [
    case
    for dim in HEAD_SIZES
    for case in (
        Case("causal", 1003, 8, 2, dim, batch=2),
        Case("causal", 640, 4, 4, dim, segmented=True),
        Case("window", 1500, 8, 1, dim, window=300, sinks=4),
        Case("window", 777, 4, 4, dim, window=130, segmented=True, batch=2),
        Case("gathered", 1024, 8, 2, dim, rows=333, batch=2),
        Case("gathered", 901, 4, 4, dim, rows=200, segmented=True),
        Case("gathered", 5, 1, 1, dim, rows=3),
    )
]


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_match_formulas(case):
    arrays = case.arrays(jnp.float16 if case.seq == 1500 else jnp.bfloat16)
    attend = functools.partial(case.call, implementation="pallas_gpu")
    assert_matches(value_and_grads(attend)(*arrays), formulas(*arrays, case.visible()), 2e-2, 2e-2)
