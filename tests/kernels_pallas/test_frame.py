"""The frame of the kernels: where block sizes come from, what the commands do, what every implementation must do."""

import contextlib
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import (
    UnsupportedError,
    aot,
    autotune,
    bench,
    causal_attention,
    chips,
    dispatch,
    for_every_platform,
    llo,
    ptx,
    supported,
    symmetric_product,
    testing,
    timing,
    tuner,
)
from kernels_pallas.__main__ import main
from kernels_pallas.autotune import Entry, TuningResult
from kernels_pallas.spec import operations, specs
from kernels_pallas.symmetric_product import pallas_tpu

KEY = {"n": 256, "k": 256, "dtype": "float32"}
KERNEL = "pallas_tpu.forward"


def result(block, chip="v5e", key=KEY):
    entry = Entry("symmetric_product", KERNEL, key, {"block": block, "block_k": 128}, cost=10, heuristic_cost=12.5)
    return TuningResult(chip, "static", (entry,))


def looked_up():
    return autotune.lookup("symmetric_product", KERNEL, KEY)


# Where block sizes come from.


def grid_of(function, x):
    """The grid of the only pallas_call in the trace."""
    (equation,) = (e for e in jax.make_jaxpr(function)(x, x).eqns if e.primitive.name == "pallas_call")
    return equation.params["grid_mapping"].grid


def test_order_is_explicit_then_context_then_table_then_heuristic(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 256, 256), jnp.float32)
    kernel = functools.partial(pallas_tpu.symmetric_product, interpret=True)
    tables = {"v5e": result(128)}
    monkeypatch.setattr(autotune, "shipped", tables.get)
    heuristic = pallas_tpu.heuristic(256, 256, 4)
    steps = 256 // heuristic.block_k
    assert heuristic.block == 256
    assert grid_of(kernel, x)[1:] == (1, steps)
    with autotune.for_chip("v5e"):
        assert grid_of(kernel, x)[1:] == (2, 2)  # three blocks of 128 in two sections, two steps
        with autotune.tuned(result(256)):
            assert grid_of(kernel, x)[1:] == (1, 2)
            explicit = functools.partial(kernel, config=pallas_tpu.Config(128, 256))
            assert grid_of(explicit, x)[1:] == (2, 1)
        with autotune.only_heuristics():
            assert grid_of(kernel, x)[1:] == (1, steps)
    with autotune.for_chip("v5p"):
        assert grid_of(kernel, x)[1:] == (1, steps)


def test_contexts_nest_and_end():
    assert looked_up() is None
    with autotune.tuned(result(128)):
        assert looked_up() == {"block": 128, "block_k": 128}
        with autotune.tuned(result(512)):
            assert looked_up() == {"block": 512, "block_k": 128}
        with contextlib.suppress(KeyError), autotune.tuned(result(512)):
            raise KeyError
        assert looked_up()["block"] == 128
        with autotune.tuned(result(512, key=KEY | {"n": 384})):
            assert looked_up()["block"] == 128  # the inner one does not have this case
        assert autotune.lookup("symmetric_product", "pallas_gpu.forward", KEY) is None
    assert looked_up() is None


def test_jitted_functions_are_traced_again_for_other_block_sizes():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(looked_up())
        return x + 1

    outer = jax.jit(lambda x: inner(x) * 2)
    x = jnp.ones(3)
    outer(x)
    with autotune.tuned(result(128)):
        outer(x)
        outer(x)
    with autotune.tuned(result(512)):
        outer(x)
    with autotune.tuned(result(128)):  # equal, not the same object
        outer(x)
    outer(x)
    assert traced == [None, {"block": 128, "block_k": 128}, {"block": 512, "block_k": 128}]


def test_operations_see_the_block_sizes_of_the_context(monkeypatch):
    """Through the cached functions of `flash.rules`, forward and backward."""
    seen = []

    class Kernels:
        @staticmethod
        def forward(query, key, value, segment_ids, *, scale):
            seen.append(("forward", autotune.active()))
            return xla.forward(query, key, value, segment_ids, scale=scale)

        @staticmethod
        def backward(*args, scale):
            seen.append(("backward", autotune.active()))
            return xla.backward(*args, scale=scale)

    xla = dispatch.module("causal_attention", "xla")
    module = dispatch.module
    monkeypatch.setattr(dispatch, "module", lambda op, name: Kernels if name == "xla" else module(op, name))
    q = jnp.ones((1, 8, 2, 4))
    gradient = jax.jit(jax.grad(lambda q: causal_attention(q, q, q, implementation="xla").sum()))
    gradient(q)
    with autotune.tuned(result(128)):
        gradient(q)
        gradient(q)
        inside = autotune.active()
    states = [(name, state == inside) for name, state in seen]
    assert set(states) == {("forward", False), ("backward", False), ("forward", True), ("backward", True)}


def test_shipped_tables_are_read_whole():
    for name in chips.CHIPS:
        table = autotune.shipped(name)
        if table is not None:
            assert table.chip == name
            assert TuningResult.from_json(table.to_json()) == table
    assert autotune.shipped(None) is None


def shipped_entries():
    tables = [table for name in chips.CHIPS if (table := autotune.shipped(name)) is not None]
    return [(table.chip, entry) for table in tables for entry in table.entries]


def test_shipped_block_sizes_are_candidates_and_no_worse_than_the_heuristic():
    entries = shipped_entries()
    assert entries
    for chip, entry in entries:
        implementation, _, name = entry.kernel.partition(".")
        module = dispatch.module(entry.operation, implementation)
        candidates = getattr(module, f"{name}_candidates", None) or module.candidates
        assert dict(entry.config) in [c._asdict() for c in candidates(dict(entry.key))], (chip, entry)
        assert entry.cost is not None
        assert entry.heuristic_cost is None or entry.cost <= entry.heuristic_cost, (chip, entry)


# JSON.

scalars = st.one_of(st.text(max_size=5), st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.floats(-9, 9))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(chips.CHIPS)),
    st.sampled_from(autotune.METHODS),
    st.lists(
        st.tuples(
            st.dictionaries(st.text(max_size=4), scalars, max_size=3),
            st.dictionaries(st.text(max_size=4), st.integers(-5, 10**6), max_size=3),
            st.one_of(st.none(), st.floats(0, 1e9)),
        ),
        max_size=4,
        unique_by=lambda entry: json.dumps(entry[0], sort_keys=True),
    ),
)
def test_json_round_trip(chip, method, raw):
    entries = tuple(Entry("op", KERNEL, key, config, cost) for key, config, cost in raw)
    found = TuningResult(chip, method, entries)
    again = TuningResult.from_json(found.to_json())
    assert again == found
    assert hash(again) == hash(found)
    with autotune.tuned(again):
        for key, config, _ in raw:
            assert autotune.lookup("op", KERNEL, key) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(extra=1), r"unknown keys \['extra'\]"),
        (lambda r: r["entries"][0].update(blocks=1), r"unknown keys \['blocks'\]"),
        (lambda r: r.pop("chip"), r"must have the keys \['chip'\]"),
        (lambda r: r["entries"][0].pop("config"), r"must have the keys \['config'\]"),
        (lambda r: r.update(chip="v99"), "chip must be one of"),
        (lambda r: r.update(format=2), "format must be 1"),
        (lambda r: r.update(method="guessed"), "method must be one of"),
        (lambda r: r.update(entries={}), "entries must be a list"),
        (lambda r: r["entries"].append(r["entries"][0]), "one entry for every kernel and key"),
        (lambda r: r["entries"][0].update(kernel="xla.forward"), "kernel must be like"),
        (lambda r: r["entries"][0].update(kernel=3), "kernel must be a string"),
        (lambda r: r["entries"][0].update(operation="../x"), "operation must be"),
        (lambda r: r["entries"][0].update(config={"block": 1.5}), "config must hold integers"),
        (lambda r: r["entries"][0].update(config={"block": True}), "config must hold integers"),
        (lambda r: r["entries"][0].update(config=[1]), "config must be an object"),
        (lambda r: r["entries"][0].update(key={"n": [1]}), "key must hold JSON scalars"),
        (lambda r: r["entries"][0].update(cost=-1), "cost must be a finite number"),
    ],
)
def test_damaged_results_are_refused(change, message):
    record = json.loads(result(128).to_json())
    change(record)
    with pytest.raises(ValueError, match=message):
        TuningResult.from_json(json.dumps(record))


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_what_is_no_result_is_refused(text):
    with pytest.raises(ValueError, match=r"must be"):
        TuningResult.from_json(text)


def test_merging_replaces_the_same_cases():
    other = result(512, key=KEY | {"n": 512})
    both = result(128).merged(other).merged(result(256))
    assert {e.case: e.config["block"] for e in both.entries} == {
        result(256).entries[0].case: 256,
        other.entries[0].case: 512,
    }
    with pytest.raises(ValueError, match="chip must be 'v5e'"):
        result(128).merged(result(128, chip="v6e"))


def test_unknown_fields_of_a_config_are_refused_by_the_kernel():
    entry = Entry("symmetric_product", KERNEL, KEY, {"block": 128, "rows": 4})
    x = jnp.ones((1, 256, 256))
    with autotune.tuned(TuningResult("v5e", "static", (entry,))), pytest.raises(TypeError, match="rows"):
        pallas_tpu.symmetric_product(x, x, interpret=True)


# Chips, and what the compilers write.


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v4", "v4"),
        ("TPU v4 lite", None),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("cpu", None),
    ],
)
def test_devices_are_recognised(kind, chip):
    assert chips.of_device(kind) == chip


def test_chips_are_those_that_can_be_compiled_for():
    assert set(chips.CHIPS) == set(aot.CHIPS)
    assert {name for name, chip in chips.CHIPS.items() if chip.is_tpu} == set(aot.TPUS)


def test_roofline():
    arithmetic, memory = chips.CHIPS["v5e"].seconds(flops=197 * 10**12, bytes_moved=819 * 10**9 // 2)
    assert (arithmetic, memory) == (1.0, 0.5)
    assert chips.CHIPS["v5e"].seconds(197 * 10**12, 0, passes=6)[0] == 6.0


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (168, 0, 384, 1),
        (32, 0, 1024, 2),
        (32, 232_448, 128, 1),
        (64, 57_344, 128, 4),
        (255, 0, 512, 0),
        (16, 0, 64, 32),
    ],
)
def test_occupancy(registers, shared, threads, blocks):
    assert ptx.occupancy(registers, shared, threads) == blocks


def test_schedule_of_a_hot_loop():
    columns = "MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
    rows = [[0] * 11 for _ in range(8)]
    for i, matmuls in zip((2, 3, 4, 6), (4, 2, 2, 1), strict=True):
        rows[i][0] = matmuls
    rows[4][9] = rows[6][9] = 1
    table = "\n".join(" ".join(map(str, row)) for row in rows)
    utilization = f"== CAPACTIY:\n{columns}\n 4 4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n{table}\n"
    depths = (0, 1, 2, 2, 2, 2, 1, 0)
    listing = "\n".join(f" {hex(i)} {'LB' if i == 2 else '  '}: {'>' * d} {{ %1 = nop }}" for i, d in enumerate(depths))
    assert llo.loop_depths(listing) == list(depths)
    found = llo.schedule(utilization, listing, vmem=7)
    assert found == llo.Schedule(bundles=8, mxu=(4 + 2 + 2) / (4 * 4), spills=2, vmem=7)


def test_what_cannot_be_tuned_is_said():
    with pytest.raises(ValueError, match="'h100'"):
        tuner.check("h100", None)
    with pytest.raises(ValueError, match="'v4'"):
        tuner.check("v4", "static")
    with pytest.raises(ValueError, match="got 'v5e' on a CPU"):
        tuner.check("v5e", "measured")
    with pytest.raises(ValueError, match="chip must be one of"):
        tuner.check("v99", None)
    with pytest.raises(ValueError, match="method must be"):
        tuner.check("v5e", "guessed")


def test_measured_tuning_takes_the_quickest_that_runs(monkeypatch):
    """On this CPU, as if it were a TPU: kernels are interpreted, and one candidate does not run."""
    spec = next(s for s in specs("symmetric_product") if s.name == "2x300x200 float32")
    kernel = pallas_tpu.symmetric_product

    def interpreted(x, y, *, config=None):
        if config == pallas_tpu.Config(256, 128):
            raise RuntimeError("does not fit")
        return kernel(x, y, config=config, interpret=True)

    few = [pallas_tpu.Config(*blocks) for blocks in ((128, 128), (256, 128), (384, 256))]
    monkeypatch.setattr(pallas_tpu, "symmetric_product", interpreted)
    monkeypatch.setattr(pallas_tpu, "candidates", lambda key: few)
    monkeypatch.setattr(chips, "present", lambda: "v5e")
    monkeypatch.setattr(tuner, "interleaved", lambda runs, rounds: {i: [10.0 - i] * rounds for i in runs})
    lines = []
    found = tuner.tune(spec, "v5e", on_result=lines.append)
    (entry,) = found.entries
    assert found.method == "measured"
    assert dict(entry.config) == {"block": 384, "block_k": 256}
    assert (entry.cost, entry.heuristic_cost) == (7.0, 10.0)
    assert any("block=256 block_k=128: no: does not fit" in line for line in lines)


def test_cases_that_estimates_cannot_judge_are_left_out(monkeypatch):
    monkeypatch.setattr(aot, "missing", lambda chip: None)
    spec = next(s for s in specs("gathered_attention") if not s.small)
    lines = []
    assert tuner.tune(spec, "v5e", on_result=lines.append) == TuningResult("v5e", "static", ())
    assert lines == [f"gathered_attention [{spec.name}]: left out, it has to be measured"]


# What every implementation must do.

SPECS = [spec for operation in operations() for spec in specs(operation)]
SMALL = [spec for spec in SPECS if spec.small]
by_name = pytest.mark.parametrize("spec", SMALL, ids=lambda spec: f"{spec.operation} {spec.name}")


def test_every_operation_has_small_and_large_cases():
    assert {"causal_attention", "gathered_attention", "sliding_window_attention", "symmetric_product"} <= set(
        operations()
    )
    for operation in operations():
        assert {spec.small for spec in specs(operation)} == {True, False}
        names = [spec.name for spec in specs(operation)]
        assert len(set(names)) == len(names)


@pytest.mark.slow
@by_name
def test_xla_matches_the_reference(spec):
    testing.check(spec, spec.runs("xla", gradient=True))


@pytest.mark.slow
@by_name
def test_tpu_kernels_match_the_reference_without_races(spec):
    if not spec.passes("pallas_tpu"):
        pytest.skip("the kernels do not take this case")
    with testing.race_free() as interpret:
        testing.check(spec, testing.interpreted(spec, "pallas_tpu", interpret=interpret))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this version of JAX has no GPU interpreter")
@by_name
def test_gpu_kernels_match_the_reference_without_races(spec):
    if not spec.passes("pallas_gpu"):
        pytest.skip("the kernels do not take this case")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    testing.check(spec, testing.interpreted(spec, "pallas_gpu", interpret=interpret))


def test_a_wrong_implementation_does_not_pass():
    spec = next(s for s in SMALL if s.operation == "causal_attention")

    def run(*args):
        out, dq, *rest = spec.runs("xla", gradient=True)(*args)
        return out, 1.1 * dq, *rest

    with pytest.raises(AssertionError, match="gradient 0"):
        testing.check(spec, run)
    with pytest.raises(AssertionError, match="value"):
        testing.check(spec, lambda *args: tuple(jnp.nan * x for x in spec.runs("xla", gradient=True)(*args)))


@by_name
def test_shapes_are_those_of_the_arrays(spec):
    def shape(x):
        return None if x is None else (x.shape, x.dtype)

    assert [shape(x) for x in spec.make(3)] == [shape(x) for x in spec.shapes]
    for implementation in ("pallas_tpu", "pallas_gpu"):
        for kernel in spec.passes(implementation):
            assert (kernel.operation, kernel.implementation) == (spec.operation, implementation)
            assert kernel.flops >= 0


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=() if spec.small else pytest.mark.slow) for spec in SPECS],
    ids=lambda spec: f"{spec.operation} {spec.name}",
)
def test_a_kernel_looks_up_one_case_and_has_candidates(spec):
    """The contract between kernels and the tuner."""
    for implementation in ("pallas_tpu", "pallas_gpu"):
        for kernel in spec.passes(implementation):
            key = kernel.key()
            if key is None:
                continue
            candidates = kernel.candidates()
            assert candidates, (spec.name, kernel.kernel)
            assert len(set(candidates)) == len(candidates)
            entry = Entry(spec.operation, kernel.kernel, key, candidates[-1]._asdict())
            again = TuningResult.from_json(TuningResult("v5e", "static", (entry,)).to_json())
            assert again.entries == (entry,)
            with autotune.tuned(again):
                jax.eval_shape(kernel.function, *kernel.args)  # takes what the table says


def test_a_race_is_seen():
    def copy(x, wait):
        def kernel(x_ref, o_ref, scratch, done):
            transfer = pltpu.make_async_copy(x_ref, scratch, done)
            transfer.start()
            if wait:
                transfer.wait()
            o_ref[...] = scratch[...]
            if not wait:
                transfer.wait()

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA(())],
            interpret=interpret,
        )(x)

    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
    with testing.race_free() as interpret:
        np.testing.assert_array_equal(copy(x, wait=True), x)
    with pytest.raises(Exception, match=r"(?i)race"), testing.race_free() as interpret:
        jax.block_until_ready(copy(x, wait=False))


# Dispatch.


def test_supported_says_why_not():
    reasons = supported(symmetric_product, jax.ShapeDtypeStruct((200, 200), jnp.float16))
    assert reasons["reference"] is None
    assert reasons["xla"] is None
    assert "cpu" in reasons["pallas_tpu"]
    assert "cpu" in reasons["pallas_gpu"]


@pytest.mark.parametrize("spec", [s for s in SMALL if s.gradients], ids=lambda s: f"{s.operation} {s.name}")
def test_kernels_of_other_platforms_are_refused_by_name(spec):
    for name in ("pallas_tpu", "pallas_gpu", ("pallas_gpu", "pallas_tpu")):
        with pytest.raises(UnsupportedError, match="cpu"):
            jax.eval_shape(functools.partial(spec.call, implementation=name), *spec.shapes)
    fallen = jax.eval_shape(functools.partial(spec.call, implementation=("pallas_tpu", "xla")), *spec.shapes)
    assert fallen.dtype == spec.dtype


def test_none_is_xla_on_a_cpu():
    spec = next(s for s in SMALL if s.operation == "sliding_window_attention")
    arrays = spec.make(0)
    got, want = (jax.jit(functools.partial(spec.call, implementation=i))(*arrays) for i in (None, "xla"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("operation", [o for o in operations() if o != "token_conditional_attention"])
def test_programs_keep_the_branches_of_all_platforms(operation):
    spec = next(s for s in specs(operation) if not s.small)
    kernels = [name for name in dispatch.KERNELS if spec.passes(name)]
    if not kernels:
        pytest.skip("no kernel takes this case")
    with for_every_platform():
        exported = jax.export.export(jax.jit(functools.partial(spec.call, implementation=None)))(*spec.shapes)
        jaxpr = str(jax.make_jaxpr(functools.partial(spec.call, implementation=None))(*spec.shapes))
    assert exported.platforms == ("cpu",)
    assert "platform_index" in jaxpr


# Timing and the commands.


def test_interleaved_timing_takes_turns():
    order = []
    now = [0.0]

    def work(name, seconds):
        order.append(name)
        now[0] += seconds

    functions = {name: functools.partial(work, name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0))}
    seconds = timing.interleaved(functions, rounds=3, clock=lambda: now[0])
    assert order == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert timing.ratio(seconds["a"], seconds["b"]) == timing.Ratio(0.5, 0.5, 0.5)


def test_bench_at_smoke_size(tmp_path, capsys):
    out = tmp_path / "bench.json"
    argv = ["bench", "--op", "sliding_window_attention", "--sizes", "64", "--heads", "2", "--dim", "16"]
    assert main([*argv, "--impl", "xla", "--dtype", "float32", "--rounds", "2", "--json", str(out)]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["kind"] == "kernels"
    timed = {(row["pass"], row["implementation"]) for row in record["data"]}
    assert timed == {(what, name) for what in ("forward", "forward and backward") for name in ("xla", "jax.nn")}
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in record["data"])
    assert "jax.nn" in capsys.readouterr().out


def test_bench_out_of_time_says_what_is_missing():
    spec = bench.sized("symmetric_product", 64, "float32", 1, 1)
    table = bench.bench([spec], deadline=-1.0, clock=lambda: 0.0)
    assert not table.rows
    assert "Out of time before symmetric_product [1x64x64 float32]." in table.notes


@pytest.mark.parametrize("text", ["", "k", "8k..", "4k..2k", "-1", "1.5k", "a,b", "0"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="--sizes must"):
        bench.sizes_of(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "--op", "nothing"], "operation must be one of"),
        (["bench", "--op", "symmetric_product", "--case", "nothing"], "--case: no case has 'nothing'"),
        (["bench", "--op", "symmetric_product", "--sizes", "64", "--impl", "pallas_tpu"], "needs a TPU"),
        (["bench", "--op", "symmetric_product", "--sizes", "64", "--impl", "fast"], "--impl must be of"),
        (["bench", "--rounds", "0"], "--rounds must be at least 1"),
        (["report", "--chip", "v99"], "chip must be one of"),
        (["tune", "--chip", "h100"], "'h100'"),
        (["tune"], "--chip"),
        ([], "report|bench|tune"),
    ],
)
def test_mistakes_are_one_line_and_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.skipif(aot.missing("v5e") is None, reason="the compiler is installed")
@pytest.mark.parametrize("argv", [["report", "--chip", "v5e"], ["tune", "--chip", "v5e"]])
def test_a_missing_compiler_is_one_line_and_code_2(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == (
        "kernels_pallas: error: compiling for v5e needs libtpu: pip install 'jaxlib-icml[aot]'\n"
    )
