"""What needs the compilers: evidence, static tuning, and that every kernel compiles with the block sizes it takes."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import aot, autotune, chips, llo, ptx, static_report, tuner
from kernels_pallas.__main__ import main
from kernels_pallas.spec import Spec, find, operations, specs
from kernels_pallas.static_report import Program
from kernels_pallas.symmetric_product import pallas_tpu

pytestmark = pytest.mark.aot

SPEC = "1x1024x1024 bfloat16"
PROGRAM = "kernels_pallas.spec:program"


def program(chip, config=None, spec=SPEC):
    implementation = "pallas_tpu" if chips.CHIPS[chip].is_tpu else "pallas_gpu"
    kwargs = {"operation": "symmetric_product", "spec": spec, "implementation": implementation, "name": "forward"}
    return Program(chip, PROGRAM, kwargs | {"config": config})


def too_large():
    """Blocks that no VMEM holds."""
    x = jax.ShapeDtypeStruct((1, 4096, 512), jnp.float32)
    return functools.partial(pallas_tpu.symmetric_product, config=pallas_tpu.Config(4096, 512)), (x, x)


@functools.cache
def found(chip):
    (evidence,) = static_report.evidence([program(chip)])
    assert evidence.error is None
    return evidence


def probed(chip):
    """The schedule or code of the kernel; skips where this version of the compiler no longer writes it."""
    (kernel,) = found(chip).kernels
    written = kernel.schedule if chips.CHIPS[chip].is_tpu else kernel.code
    if written is None:
        pytest.skip(f"the compiler for {chip} wrote nothing about the kernel: its undocumented flags changed")
    return kernel, written


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_schedule_of_a_tpu_kernel(chip):
    kernel, schedule = probed(chip)
    assert kernel.name == "symmetric_product"
    assert isinstance(schedule, llo.Schedule)
    assert schedule.bundles > 100
    # Half of the time at least is multiplying on chips with arrays of 128 x 128.
    assert (0.5 if chip != "v6e" else 0.1) < schedule.mxu <= 1.0
    config = pallas_tpu.heuristic(1024, 1024, 2)
    # What the heuristic counts, but for products that live in registers, and scratch of the compiler's own.
    declared = 4 * config.block * (config.block_k + config.block) * 2 + 4 * config.block**2
    assert declared <= schedule.vmem <= declared + 2**18
    if chip == "v4":
        assert kernel.cycles is None  # its compiler has no model of DMA
    else:
        assert kernel.cycles == static_report.estimated_cycles([program(chip)])[0]["symmetric_product"]


@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_code_of_a_gpu_kernel(chip):
    _, code = probed(chip)
    assert isinstance(code, ptx.Code)
    # Two tiles of 128 x 128, four pairs of blocks of 128 x 64, and barriers.
    assert 2 * 128 * 128 * 2 + 4 * 2 * 128 * 64 * 2 <= code.shared < 200 * 2**10
    assert code.threads == 128
    assert code.spills == 0
    # One step is a 128 x 128 x 64 product in instructions of 64 x 128 x 16.
    assert code.wgmma == 2 * 4
    assert code.hgmma in (None, code.wgmma)
    assert code.registers * code.threads <= 65536
    assert code.blocks_per_multiprocessor == 1


def test_bytes_are_those_of_the_arrays():
    evidence = found("v5e")
    assert evidence.argument_bytes == 2 * 1024 * 1024 * 2
    assert evidence.output_bytes == 1024 * 1024 * 2
    assert evidence.temp_bytes == 0


def test_a_program_that_does_not_fit_costs_only_itself():
    programs = [program("v5e"), Program("v5e", f"{__name__}:too_large", {}), program("v5e")]
    first, refused, last = static_report.evidence(programs, schedules=False)
    assert "vmem" in refused.error.lower()
    assert refused.cycles is None
    assert first.cycles == last.cycles == found("v5e").cycles


def test_tuning_finds_the_least_estimate(monkeypatch):
    spec = find("symmetric_product", SPEC)
    few = [pallas_tpu.Config(block, block_k) for block in (128, 256, 512) for block_k in (512, 1024)]
    monkeypatch.setattr(pallas_tpu, "candidates", lambda key: few)
    lines = []
    result = tuner.tune(spec, "v5e", on_result=lines.append)
    (entry,) = result.entries
    costs = [int(line.rpartition(": ")[2].split()[0]) for line in lines if line.endswith(" cycles")]
    assert len(costs) == 1 + len(few)
    assert entry.cost == min(costs)
    assert entry.cost <= entry.heuristic_cost == costs[0]
    # Applied: the kernel that is compiled then is the one that was estimated.
    again = autotune.TuningResult.from_json(result.to_json())
    (kernel,) = spec.passes("pallas_tpu")
    with autotune.tuned(again):
        text = aot.compile_for("v5e", kernel.function, *kernel.args).as_text()
    chosen = pallas_tpu.Config(**entry.config)
    explicit = functools.partial(pallas_tpu.symmetric_product, config=chosen)
    assert kernels_of(text) == kernels_of(aot.compile_for("v5e", explicit, *kernel.args).as_text())
    other = functools.partial(pallas_tpu.symmetric_product, config=pallas_tpu.Config(128, 128))
    assert kernels_of(text) != kernels_of(aot.compile_for("v5e", other, *kernel.args).as_text())


def kernels_of(text):
    """The body of the Pallas kernel in a compiled program."""
    return [line.partition('"body":"')[2].partition('"')[0] for line in text.splitlines() if "tpu_custom_call" in line]


def test_a_chip_takes_its_own_table(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16)
    key = pallas_tpu.tuning_key(256, 256, jnp.bfloat16)
    entry = autotune.Entry("symmetric_product", "pallas_tpu.forward", key, {"block": 128, "block_k": 128})
    tables = {"v5e": autotune.TuningResult("v5e", "static", (entry,))}
    monkeypatch.setattr(autotune, "shipped", tables.get)
    kernel = jax.jit(pallas_tpu.symmetric_product)  # one function for all chips
    explicit = functools.partial(pallas_tpu.symmetric_product, config=pallas_tpu.Config(128, 128))
    of_table = kernels_of(aot.compile_for("v5e", explicit, x, x).as_text())
    assert kernels_of(aot.compile_for("v5e", kernel, x, x).as_text()) == of_table
    assert kernels_of(aot.compile_for("v5p", kernel, x, x).as_text()) != of_table


def test_report_at_smoke_size(tmp_path, capsys):
    out = tmp_path / "report.json"
    argv = ["report", "--op", "symmetric_product", "--case", "300x200 bfloat16", "--chip", "v5p", "h100"]
    assert main([*argv, "--json", str(out)]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [row["chip"] for row in record["data"]] == ["v5p", "h100"]
    assert all(row["error"] is None and row["kernels"] for row in record["data"])
    tpu, gpu = record["data"]
    assert tpu["flops"] == gpu["flops"] == 300 * 301 * 200
    assert tpu["bytes"] == (2 * 300 * 200 + 300 * 300) * 2
    assert tpu["bound_seconds"]["memory"] == pytest.approx(tpu["bytes"] / 2.765e12)
    assert "roofline" in capsys.readouterr().out


def test_tune_writes_a_table_and_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "candidates", lambda key: [pallas_tpu.Config(256, 1024)])
    other = autotune.Entry("symmetric_product", "pallas_tpu.forward", {"n": 1}, {"block": 128, "block_k": 256})
    path = tmp_path / "v5e.json"
    path.write_text(autotune.TuningResult("v5e", "static", (other,)).to_json(), encoding="utf-8")
    argv = ["tune", "--chip", "v5e", "--op", "symmetric_product", "--case", "1x1024x1024 bfloat16"]
    assert main([*argv, "--out", str(path)]) == 0
    table = autotune.TuningResult.from_json(path.read_text(encoding="utf-8"))
    assert other in table.entries
    assert len(table.entries) == 2


def large(operation) -> list[Spec]:
    return [spec for spec in specs(operation) if not spec.small]


@pytest.mark.slow
@pytest.mark.parametrize("chip", aot.CHIPS)
@pytest.mark.parametrize("operation", [name for name in operations() if name != "token_conditional_attention"])
def test_every_kernel_compiles_as_shipped_and_by_heuristic(operation, chip):
    implementation = "pallas_tpu" if chips.CHIPS[chip].is_tpu else "pallas_gpu"
    for spec in specs(operation):
        for kernel in spec.passes(implementation):
            shipped = aot.compile_for(chip, kernel.function, *kernel.args)
            assert ("tpu_custom_call" if chips.CHIPS[chip].is_tpu else "mosaic_gpu") in shipped.as_text()
            if not spec.small:
                assert aot.compile_for(chip, kernel.at(None), *kernel.args) is not None


@pytest.mark.slow
@pytest.mark.parametrize("operation", [name for name in operations() if name != "token_conditional_attention"])
def test_gpu_kernels_spill_nothing_and_fit(operation):
    cases = [(spec, kernel) for spec in large(operation) for kernel in spec.passes("pallas_gpu")]
    programs = [
        Program(
            "h100",
            "kernels_pallas.report:as_shipped",
            {"operation": operation, "spec": spec.name, "implementation": "pallas_gpu", "name": kernel.name},
        )
        for spec, kernel in cases
    ]
    for (spec, kernel), evidence in zip(cases, static_report.evidence(programs), strict=True):
        assert evidence.error is None
        for compiled in evidence.kernels:
            code = compiled.code
            assert code.spills == 0, (spec.name, kernel.name)
            assert code.blocks_per_multiprocessor >= 1, (spec.name, kernel.name)
            assert code.wgmma > 0
            assert code.hgmma in (None, code.wgmma)
