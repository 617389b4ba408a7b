"""On a GPU: every kernel against the reference, and the benchmark that compares with cuDNN."""

import jax
import pytest

from kernels_pallas import testing
from kernels_pallas.__main__ import main
from kernels_pallas.spec import operations, specs

CASES = [spec for operation in operations() for spec in specs(operation) if spec.small]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: f"{spec.operation} {spec.name}")
def test_kernels_match_the_reference(spec):
    if spec.operation != "token_conditional_attention" and not spec.passes("pallas_gpu"):
        pytest.skip("the kernels do not take this case")
    testing.check(spec, spec.runs("pallas_gpu", gradient=True))


def test_benchmark_against_cudnn(tmp_path):
    out = tmp_path / "gpu.json"
    ops = ("sliding_window_attention", "token_conditional_attention")
    argv = ["bench", "--op", *ops, "--sizes", "1k", "--impl", "pallas_gpu", "--rounds", "3", "--json", str(out)]
    assert main(argv) == 0
    assert '"cudnn' in out.read_text(encoding="utf-8")
