"""Finds experiments and benchmarks by where they lie."""

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from experiments.benchmarks.protocol import Benchmark
from experiments.protocol import Experiment

_NOT_FAMILIES = {"benchmarks", "data", "results", "tpu_pod"}


@dataclass(frozen=True)
class Catalogue:
    """The experiments below a package.

    Names are read from the files without importing them, so that a run pays only for what it runs; a module
    counts when it assigns `EXPERIMENT` (or `BENCHMARK`).

    Attributes:
      root: The folder of the package.
      package: Its import path.
    """

    root: Path
    package: str

    def experiments(self) -> list[str]:
        """Returns the names `<family>/<method>`, sorted."""
        return sorted(
            f"{path.parent.name}/{path.stem}"
            for path in self.root.glob("*/*.py")
            if path.parent.name not in _NOT_FAMILIES and _declares(path, "EXPERIMENT")
        )

    def benchmarks(self) -> list[str]:
        """Returns the names of the benchmarks, sorted."""
        return sorted(p.stem for p in (self.root / "benchmarks").glob("*.py") if _declares(p, "BENCHMARK"))

    def experiment(self, name: str) -> Experiment:
        """Imports and returns the experiment called `name`.

        Raises:
          TypeError: If its module declares something else.
          ValueError: If it calls itself by another name.
        """
        declared = import_module(f"{self.package}.{name.replace('/', '.')}").EXPERIMENT
        if not isinstance(declared, Experiment):
            raise TypeError(f"EXPERIMENT in {name}.py is a {type(declared).__name__}, not an Experiment")
        if declared.name != name:
            raise ValueError(f"the experiment in {name}.py is named {declared.name!r}; it must be {name!r}")
        return declared

    def benchmark(self, name: str) -> Benchmark:
        """Imports and returns the benchmark called `name`.

        Raises:
          TypeError: If its module declares something else.
          ValueError: If it calls itself by another name.
        """
        declared = import_module(f"{self.package}.benchmarks.{name}").BENCHMARK
        if not isinstance(declared, Benchmark):
            raise TypeError(f"BENCHMARK in {name}.py is a {type(declared).__name__}, not a Benchmark")
        if declared.name != name:
            raise ValueError(f"the benchmark in {name}.py is named {declared.name!r}; it must be {name!r}")
        return declared


HOUSE = Catalogue(Path(__file__).parent, "experiments")


def _declares(path: Path, constant: str) -> bool:
    targets = [
        target
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return any(isinstance(target, ast.Name) and target.id == constant for target in targets)
