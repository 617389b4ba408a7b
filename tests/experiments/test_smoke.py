"""Every experiment and benchmark runs at scale smoke, figure and files included; nothing is judged."""

import io
import json

import pytest
from rich.console import Console

from experiments.catalogue import HOUSE
from experiments.runner import run_benchmark, run_experiment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", HOUSE.experiments())
def test_experiment_runs(name, tmp_path):
    console = Console(file=io.StringIO())
    run_experiment(HOUSE.experiment(name), scale="smoke", folder=tmp_path, console=console)
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert {claim["held"] for claim in record["claims"]} == {None}
    assert (tmp_path / f"{name}.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", HOUSE.benchmarks())
def test_benchmark_runs(name, tmp_path):
    try:
        benchmark = HOUSE.benchmark(name)
        run_benchmark(benchmark, scale="smoke", folder=tmp_path, console=Console(file=io.StringIO()))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        pytest.skip("needs the [bench] extra")
    record = json.loads((tmp_path / f"benchmarks/{name}.json").read_text(encoding="utf-8"))
    assert all(target["median"] > 0 and target["met"] is None for target in record["targets"])
