"""The TPU kernels of attention: values and gradients interpreted on a CPU, races, and compiled for chips not there."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import (
    aot,
    autotune,
    causal_attention,
    dispatch,
    sliding_window_attention,
    static_report,
    testing,
)
from kernels_pallas.causal_attention import pallas_tpu as causal
from kernels_pallas.flash import tpu_configs, tpu_forward
from kernels_pallas.flash.rules import NOTHING
from kernels_pallas.flash.tpu_blocks import Gathered
from kernels_pallas.flash.tpu_configs import BackwardConfig, Case, ForwardConfig
from kernels_pallas.flash.tpu_export import unless_partitioned
from kernels_pallas.gathered_attention import pallas_tpu as gathered
from kernels_pallas.gathered_attention.api import gathered_attention
from kernels_pallas.sliding_window_attention import pallas_tpu as window
from kernels_pallas.sliding_window_attention import xla as window_xla
from tests.kernels_pallas.attention_cases import (
    assert_matches,
    causal_visible,
    formulas,
    make_inputs,
    random_rows,
    random_segments,
    window_visible,
)

# Several blocks along every axis already for short sequences: all of a band in one step, and one block a step.
FUSED = ForwardConfig(256, 128, 128, 9), BackwardConfig(256, 128, 128, 9, 256, 128, 128, 9)
STEPPED = ForwardConfig(256, 128, 128, 1), BackwardConfig(128, 128, 128, 1, 256, 128, 256, 1)


def run(module, q, k, v, g, *extras, configs=(None, None), interpret=True, **statics):
    """out, lse, dq, dk, dv of the interpreted kernels."""

    @jax.jit
    def both(q, k, v, g, *extras):
        out, lse = module.forward(q, k, v, *extras, **statics, config=configs[0], interpret=interpret)
        grads = module.backward(q, k, v, *extras, out, lse, g, **statics, config=configs[1], interpret=interpret)
        return out, lse, *grads

    statics = {"scale": q.shape[-1] ** -0.5} | statics
    return both(q, k, v, g, *extras)


def check(got, want, tolerances=(1e-5, 2e-5)):
    out, _, *grads = got
    assert_matches((out, *grads), want, *tolerances)


# (rows, heads, kv_heads, dim, window, sinks, segmented, configs): one head for one to eight of the query, three head
# sizes, lengths around blocks, windows around and beyond them, and what heuristics choose.
WINDOWS = (
    (300, 4, 1, 64, 100, 0, False, FUSED),
    (385, 2, 2, 80, 200, 5, False, FUSED),
    (300, 8, 1, 64, 40, 0, True, FUSED),
    (385, 2, 1, 128, 129, 130, False, STEPPED),
    pytest.param(270, 2, 2, 64, 300, 0, True, STEPPED, marks=pytest.mark.slow),
    (1, 2, 1, 80, 1, 0, False, (None, None)),
    (200, 2, 2, 64, 1, 3, False, (None, None)),
)


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim", "size", "sinks", "segmented", "configs"), WINDOWS)
def test_window(rows, heads, kv_heads, dim, size, sinks, segmented, configs):
    inputs = make_inputs(rows, rows, heads, kv_heads, dim)
    ids = random_segments(1, rows) if segmented else None
    got = run(window, *inputs, ids, None, configs=configs, window=size, sinks=sinks)
    visible = window_visible(np.arange(rows)[None], rows, size, sinks, ids)
    check(got, formulas(*inputs, visible))
    nothing = ~visible.any(axis=2)[:, None].repeat(heads, axis=1)
    assert (np.asarray(got[1])[nothing] == np.float32(NOTHING)).all()
    assert np.abs(np.asarray(got[1])[~nothing]).max() < 100


@pytest.mark.parametrize(
    ("segmented", "configs"),
    [
        (False, STEPPED),
        (True, (None, None)),
        pytest.param(True, STEPPED, marks=pytest.mark.slow),
        pytest.param(False, (None, None), marks=pytest.mark.slow),
    ],
)
def test_causal(segmented, configs):
    inputs = make_inputs(300, 300, 4, 2, 64)
    ids = random_segments(1, 300) if segmented else None
    got = run(causal, *inputs, ids, configs=configs)
    # Id 0 is an id like any other here.
    check(got, formulas(*inputs, causal_visible(np.arange(300)[None], 300, None if ids is None else ids + 1)))


@pytest.mark.parametrize(
    ("rows", "seq", "heads", "kv_heads", "dim", "segmented"),
    [(200, 390, 4, 1, 64, False), (150, 300, 2, 2, 80, True), (1, 200, 2, 1, 128, False)],
)
def test_gathered(rows, seq, heads, kv_heads, dim, segmented):
    inputs = make_inputs(rows, seq, heads, kv_heads, dim, batch=2)
    positions = random_rows(2, seq, rows, seed=3)
    ids = random_segments(2, seq) if segmented else None
    got = run(gathered, *inputs, positions, ids, configs=STEPPED)
    check(got, formulas(*inputs, causal_visible(positions, seq, ids)))


@pytest.mark.parametrize("seq", [100, 300])
def test_no_row_is_chosen(seq):
    inputs = make_inputs(140, seq, 2, 2, 64, batch=2)
    positions = jnp.full((2, 140), seq).at[1, 0].set(5)
    out, lse, *grads = run(gathered, *inputs, positions, None, configs=STEPPED)
    for x in (out, *grads):
        assert (np.asarray(x[0]) == 0).all()
        assert np.isfinite(np.asarray(x[1])).all()
    assert (np.asarray(lse[0]) == np.float32(NOTHING)).all()
    check((out, lse, *grads), formulas(*inputs, causal_visible(positions, seq)))


@pytest.mark.parametrize("operation", ["window", "gathered"])
def test_bfloat16(operation):
    if operation == "window":
        inputs = make_inputs(300, 300, 2, 1, 64, dtype=jnp.bfloat16)
        got = run(window, *inputs, None, None, configs=FUSED, window=100, sinks=4)
        want = formulas(*inputs, window_visible(np.arange(300)[None], 300, 100, 4))
    else:
        inputs = make_inputs(140, 300, 2, 1, 64, dtype=jnp.bfloat16)
        positions = random_rows(1, 300, 140)
        got = run(gathered, *inputs, positions, None, configs=STEPPED)
        want = formulas(*inputs, causal_visible(positions, 300))
    assert all(x.dtype == jnp.bfloat16 for x in (got[0], *got[2:]))
    check(got, want, (2e-2, 2e-2))


@pytest.mark.slow
def test_large_scores_stay_finite():
    q, k, v, g = make_inputs(200, 200, 2, 1, 64)
    inputs = (100.0 * q, 10.0 * k, v, g)
    got = run(window, *inputs, None, None, configs=STEPPED, window=150, sinks=0)
    # A score of 6000 carries a float32 rounding error of about 2e-4 into its exponential.
    check(got, formulas(*inputs, window_visible(np.arange(200)[None], 200, 150)), (3e-3, 3e-3))


@functools.cache
def _gathered_case():
    @jax.jit
    def both(q, k, v, g, positions):
        call = {"scale": 0.125, "interpret": True}
        out, lse = gathered.forward(q, k, v, positions, None, config=STEPPED[0], **call)
        return out, *gathered.backward(q, k, v, positions, None, out, lse, g, config=STEPPED[1], **call)

    return both, make_inputs(150, 300, 1, 1, 64)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 320), st.integers(0, 320), st.integers(0, 2**20))
def test_any_ascending_positions(low, high, seed):
    both, inputs = _gathered_case()
    low, high = sorted((low, high))
    positions = np.random.default_rng(seed).integers(low, high + 1, (1, 150), np.int32)
    positions.sort(axis=1)
    # Where rows see one key or none, gradients are zero but for rounding.
    assert_matches(both(*inputs, positions), formulas(*inputs, causal_visible(positions, 300)), 1e-5, 2e-4)


# Plans.

SIZES = st.sampled_from([128, 256, 384, 512])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 1200), st.integers(1, 1200), SIZES, SIZES, st.booleans(), st.sampled_from([1, 3, 9]), SIZES)
def test_a_band_is_visited_once(size, rows, outer, inner, keys_outer, blocks, strip):
    plan = tpu_configs.band_plan(min(size, rows), rows, outer, inner, blocks, keys_outer=keys_outer)
    strip = min(strip, plan.outer)
    seen = np.zeros((plan.length, plan.length), int)
    for i, j in itertools.product(range(plan.outer_blocks), range(plan.steps)):
        taken = [visited for condition, visited in plan.cases(None, 0, i, j) if condition is None or bool(condition)]
        assert len(taken) <= 1
        for start in range(0, plan.outer, strip) if taken else ():
            length = min(strip, plan.outer - start)
            for part in plan.slices(start, length, taken[0], None, 0, i, j):
                offset = np.arange(length)[:, None] - np.arange(part.size)
                mask = (offset >= (-part.size if part.lowest is None else part.lowest)) & (
                    offset <= (length if part.highest is None else part.highest)
                )
                block = int(plan.inner_block(None, 0, i, j, part.slot))
                first, other = i * plan.outer + start, block * plan.inner + part.start
                seen[first : first + length, other : other + part.size] += mask
    seen = seen.T if keys_outer else seen
    lag = np.arange(plan.length)[:, None] - np.arange(plan.length)
    np.testing.assert_array_equal(seen, (lag >= 0) & (lag < plan.window))


CASES = st.builds(
    Case,
    rows=st.sampled_from([128, 512, 4096, 32768]),
    seq=st.sampled_from([128, 2048, 65536]),
    group=st.sampled_from([1, 4, 8]),
    dim=st.sampled_from([64, 80, 128, 256]),
    window=st.sampled_from([None, 1, 100, 256, 1024, 5000]),
    sinks=st.sampled_from([0, 4, 1024]),
    segmented=st.booleans(),
    gathered=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(CASES)
def test_chosen_blocks_fit_the_memory_of_every_chip(case):
    case = case._replace(window=None, sinks=0) if case.gathered else case._replace(seq=case.rows)
    forward, backward = tpu_configs.forward_heuristic(case), tpu_configs.backward_heuristic(case)
    for kind, (outer, inner, strip, blocks) in {
        "forward": forward,
        "query": backward[:4],
        "key_value": backward[4:],
    }.items():
        plan = case.plan(outer, inner, blocks, keys_outer=kind == "key_value")
        assert (plan.outer, plan.inner) == (outer, inner)
        assert outer % 128 == inner % 128 == strip % 128 == 0
        assert tpu_configs.vmem_bytes(kind, plan, case, strip) <= 14 * 2**20
    assert forward in tpu_configs.forward_candidates(case._asdict())
    assert backward in tpu_configs.backward_candidates(case._asdict())


def test_block_sizes_come_from_the_context():
    q, k, v, _ = make_inputs(300, 300, 2, 2, 64)
    key = Case.of(q, k, None, 100, 0, False)._asdict()
    assert (key["rows"], key["window"], key["gathered"]) == (512, 100, False)
    entry = autotune.Entry("sliding_window_attention", "pallas_tpu.forward", key, {**FUSED[0]._asdict(), "strip": 100})
    forward = functools.partial(window.forward, scale=1.0, window=100, sinks=0, interpret=True)
    with (
        autotune.tuned(autotune.TuningResult("v5e", "static", (entry,))),
        pytest.raises(ValueError, match="config must have positive multiples of 128"),
    ):
        jax.eval_shape(forward, q, k, v, None, None)
    assert jax.eval_shape(forward, q, k, v, None, None)[0].shape == q.shape


def test_what_the_kernels_take():
    def of(dtype, dim=64):
        return jax.ShapeDtypeStruct((1, 8, 2, dim), dtype)

    question = {"scale": 1.0, "window": 8, "sinks": 0, "segmented": False, "chunk": False}
    for x in (of("bfloat16"), of("float32", 80)):
        assert causal.unsupported(x, x) is None
        assert gathered.unsupported(x, x, segmented=True) is None
        assert window.unsupported(x, x, **question | {"sinks": 4}) is None
        assert window.unsupported(x, x, **question | {"segmented": True}) is None
    assert "float16" in causal.unsupported(of("float16"), of("float16"))
    assert "head size 512" in gathered.unsupported(of("float32", 512), of("float32", 512), segmented=False)
    for change, reason in (
        ({"chunk": True}, "q_positions"),
        ({"sinks": 4, "segmented": True}, "sinks with segment_ids"),
        ({"sinks": 2000}, "sinks 2000"),
    ):
        assert reason in window.unsupported(of("float32"), of("float32"), **question | change)
    assert causal.unsupported_device() is None
    x = jnp.ones((1, 8, 2, 64))
    with pytest.raises(ValueError, match="starts must be None"):
        window.forward(x, x, x, None, jnp.zeros(1, jnp.int32), scale=1.0, window=4, sinks=0)


# What the interpreter of TPU kernels sees: races, memory read before it is written or beyond its end.


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["fused", "stepped", "gathered"])
def test_no_race_and_no_stray_read(operation):
    inputs = make_inputs(256, 256, 2, 1, 64, batch=2)
    with testing.race_free() as interpret:
        if operation == "gathered":
            positions = random_rows(2, 256, 256)
            got = run(gathered, *inputs, positions, None, configs=STEPPED, interpret=interpret)
            visible = causal_visible(positions, 256)
        else:
            configs = tuple(
                type(c)(*(128 if size == 256 else size for size in c))
                for c in {"fused": FUSED, "stepped": STEPPED}[operation]
            )
            got = run(window, *inputs, None, None, configs=configs, window=120, sinks=3, interpret=interpret)
            visible = window_visible(np.tile(np.arange(256), (2, 1)), 256, 120, 3)
        jax.block_until_ready(got)
    check(got, formulas(*inputs, visible))


def test_what_is_never_written_is_seen(monkeypatch):
    """The negative control: without their sums in scratch, kernels that visit nothing leave their outputs unwritten."""
    monkeypatch.setattr(Gathered, "accumulates", property(lambda self: False))
    inputs = make_inputs(128, 128, 1, 1, 64)
    with testing.race_free() as interpret:
        out, *_ = run(gathered, *inputs, jnp.full((1, 128), 128), None, configs=STEPPED, interpret=interpret)
        assert np.isnan(np.asarray(out)).any()


@pytest.mark.slow
def test_programs_for_two_platforms_keep_both_branches():
    def loss(q, k, v, positions):
        return (
            jnp.sum(sliding_window_attention(q, k, v, window=64) ** 2)
            + jnp.sum(causal_attention(q, k, v) ** 2)
            + jnp.sum(gathered_attention(q, k, v, positions) ** 2)
        )

    q, k, v, _ = make_inputs(200, 200, 2, 1, 64)
    positions = random_rows(1, 200, 200)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    with dispatch.for_every_platform():
        exported = jax.export.export(gradient, platforms=("cpu", "tpu"))(q, k, v, positions)
    assert exported.platforms == ("cpu", "tpu")
    assert exported.mlir_module().count("@tpu_custom_call") == 9
    for got, want in zip(exported.call(q, k, v, positions), gradient(q, k, v, positions), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Compiled for chips that are not there.


def gradients(operation, *extras, **kwargs):
    """A function of query, key, value and extras to output and gradients."""

    def both(q, k, v, *extras):
        out, pull_back = jax.vjp(lambda q, k, v: operation(q, k, v, *extras, **kwargs), q, k, v)
        return out, *pull_back(out)

    return both


def compiled_cases(batch, rows, heads, kv_heads, dim, dtype):
    """Functions and arguments for every operation, with their number of kernels."""
    x = jax.ShapeDtypeStruct
    q, k = x((batch, rows, heads, dim), dtype), x((batch, rows, kv_heads, dim), dtype)
    ids, chosen = x((batch, rows), jnp.int32), max(1, rows // 5)
    qc, positions = x((batch, chosen, heads, dim), dtype), x((batch, chosen), jnp.int32)

    def segmented(operation, **kwargs):
        return lambda q, k, v, ids: operation(q, k, v, segment_ids=ids, **kwargs)

    sinks = 4 if rows > 200 else 3  # rows of a kernel of their own
    yield gradients(functools.partial(sliding_window_attention, window=200)), (q, k, k), 3
    yield gradients(functools.partial(sliding_window_attention, window=90, sinks=sinks)), (q, k, k), 4
    yield gradients(segmented(sliding_window_attention, window=256)), (q, k, k, ids), 3
    yield gradients(causal_attention), (q, k, k), 3
    yield gradients(segmented(causal_attention)), (q, k, k, ids), 3
    yield gradients(gathered_attention), (qc, k, k, positions), 3
    packed = gradients(lambda q, k, v, p, ids: gathered_attention(q, k, v, p, segment_ids=ids))
    yield packed, (qc, k, k, positions, ids), 3


def assert_compiles(chip, *sizes):
    for function, args, kernels in compiled_cases(*sizes):
        text = aot.compile_for(chip, function, *args).as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == kernels, (sizes, args)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("chip", aot.TPUS)
@pytest.mark.parametrize("sizes", [(2, 1000, 4, 2, 64, "bfloat16"), (1, 300, 8, 1, 80, "float32")], ids=str)
def test_none_compiles_to_the_kernels(chip, sizes):
    for function, args, kernels in compiled_cases(*sizes):
        text = aot.compile_for(chip, function, *args).as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == kernels, args


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "dtype", "size", "sinks"),
    [(2048, "float32", 256, 4), (2048, "float32", 2048, 0), (8192, "bfloat16", 2100, 130), (8192, "bfloat16", 6000, 0)],
)
def test_long_sequences_compile(rows, dtype, size, sinks):
    # v5e: the least memory that a kernel gets. Bands in one step, one block a step, and the whole sequence.
    x = jax.ShapeDtypeStruct((1, rows, 2, 128), dtype)
    function = gradients(functools.partial(sliding_window_attention, window=size, sinks=sinks))
    assert "tpu_custom_call" in aot.compile_for("v5e", function, x, x, x).as_text()


@pytest.mark.aot
@pytest.mark.parametrize("spec", [P("x", None, None, None), P(None, None, "x", None)], ids=["batch", "heads"])
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_kernels_on_a_mesh(kind, spec):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = Mesh(aot.make_mesh("v5e", (4,), ("x",)).devices, ("x",), axis_types=(axis,))
    x = jax.ShapeDtypeStruct((4, 256, 4, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    function = gradients(functools.partial(sliding_window_attention, window=64))
    with jax.set_mesh(mesh):
        if kind == "shard_map":
            function = jax.shard_map(function, in_specs=(spec,) * 3, out_specs=(spec,) * 4)
        text = jax.jit(function).lower(x, x, x).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "all-gather" not in text
    assert "bf16[1,4,256,128]" in text if spec[0] else "bf16[4,1,256,128]" in text


@pytest.mark.aot
def test_programs_that_xla_partitions_have_no_kernels():
    mesh = aot.make_mesh("v5e", (4,), ("x",))
    x = jax.ShapeDtypeStruct((4, 256, 4, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    function = gradients(functools.partial(sliding_window_attention, window=64))
    assert "tpu_custom_call" not in jax.jit(function).lower(x, x, x).compile().as_text()


@pytest.mark.aot
def test_partitioned_programs_take_something_else():
    def forward(q, k, v):
        return window.forward(q, k, v, None, None, scale=1.0, window=64, sinks=0)[0]

    def default(q, k, v):
        return window_xla.forward(q, k, v, None, None, scale=1.0, window=64, sinks=0)[0]

    either = functools.partial(unless_partitioned, forward, default)
    x = jax.ShapeDtypeStruct((4, 256, 4, 128), jnp.bfloat16)
    assert "tpu_custom_call" in aot.compile_for("v5e", either, x, x, x).as_text()
    mesh = aot.make_mesh("v5e", (4,), ("x",))
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("x")))
    assert "tpu_custom_call" not in jax.jit(either).lower(x, x, x).compile().as_text()
    with pytest.raises(NotImplementedError, match="cannot be automatically partitioned"):
        jax.jit(forward).lower(x, x, x)
    inside = jax.shard_map(either, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert "tpu_custom_call" in jax.jit(inside).lower(x, x, x).compile().as_text()


# The compiler's cycle estimates, for four heads, 4096 keys of 128 entries, in bfloat16 on v5e. Arguments are those of
# the kernels themselves, in HBM: what XLA computes before a kernel it may leave in VMEM.

SPLASH_CAUSAL, SPLASH_LOCAL = 110_056, 61_480
"""JAX's splash attention with blocks of 512, causal and `LocalMask((255, 0))`: estimates without the arithmetic."""


def forward_program(rows, size=None, is_gathered=False):
    """A program for `static_report`: the forward kernel with the blocks that the heuristic chooses."""
    case = Case(rows, 4096, 1, 128, size, 0, False, is_gathered, "bfloat16")
    case = case._replace(rows=1 << (rows - 1).bit_length())
    outer, inner, strip, blocks = tpu_configs.forward_heuristic(case)
    x, h = jax.ShapeDtypeStruct, 4
    k = x((1, h, 4096, 128), jnp.bfloat16)
    if not is_gathered:
        plan = tpu_configs.band_plan(size or rows, rows, outer, inner, blocks, keys_outer=False)
        return functools.partial(tpu_forward.forward, plan, strip=strip, name="kernel"), (k, k, k)
    length = -(-rows // outer) * outer
    plan = Gathered(1, length // outer, 4096 // inner, outer, inner, False)
    arguments = x((1, h, length, 128), jnp.bfloat16), k, k, x((plan.outer_blocks,), jnp.int32)
    places = x((1, 1, 1, length), jnp.int32)
    return functools.partial(tpu_forward.forward, plan, strip=strip, name="kernel"), (*arguments, places)


@pytest.mark.aot
@pytest.mark.slow
def test_estimated_cycles():
    kwargs = ({"rows": 4096, "size": 256}, {"rows": 819, "is_gathered": True}, {"rows": 4096, "is_gathered": True})
    programs = [static_report.Program("v5e", f"{__name__}:forward_program", dict(k)) for k in kwargs]
    local, fifth, all_rows = (sum(found.values()) for found in static_report.estimated_cycles(programs))
    # Multiplications alone: every strip of 256 rows with 512 keys, but the first one with 256.
    least = 4 * (15 * 512 + 256) * 256 * 128 * 2 / (4 * 128**2)
    assert least < local <= 0.9 * SPLASH_LOCAL
    assert local <= 0.6 * SPLASH_CAUSAL
    assert fifth <= 0.30 * all_rows
