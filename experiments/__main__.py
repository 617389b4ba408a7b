"""The command `python -m experiments`: list, run, report, bench.

A mistake of the caller is one line on standard error and exit code 2; an experiment that fails shows its
traceback, does not stop the others, and makes the exit code 1.
"""

import argparse
import difflib
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from experiments.catalogue import HOUSE, Catalogue
from experiments.protocol import SCALES, Scale
from experiments.records import RESULTS, write_together


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(
    argv: Sequence[str] | None = None,
    *,
    catalogue: Catalogue = HOUSE,
    results: Path = RESULTS,
    console: Console | None = None,
) -> int:
    """Runs the command.

    Args:
      argv: Arguments without the program's name; `sys.argv[1:]` by default.
      catalogue: Where experiments are looked for.
      results: Where results of scales laptop and full go.
      console: Where output goes; standard output by default.

    Returns:
      The exit code: 0, 1 when something failed or the report is stale, 2 for a mistake of the caller, 130
      when interrupted.
    """
    console = console or Console()
    try:
        arguments = _parser().parse_args(argv)
        match arguments.command:
            case "list":
                return _list(catalogue, console)
            case "report":
                return _report(arguments.check, results, console)
            case "run":
                return _run(arguments, catalogue, results, console)
            case _:
                return _bench(arguments, catalogue, results, console)
    except ValueError as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments: interrupted; finished results are kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m experiments", description="Reproductions of the papers' claims.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|run|report|bench")
    commands.add_parser("list", help="name the experiments and benchmarks, with their claims")
    report = commands.add_parser("report", help="regenerate RESULTS.md and the README's method table")
    report.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    run = commands.add_parser("run", help="run experiments and judge their claims")
    bench = commands.add_parser("bench", help="run benchmarks and compare with their targets")
    for command in (run, bench):
        command.add_argument("names", nargs="*", metavar="NAME", help="which; all of them by default")
        command.add_argument(
            "--scale",
            default="laptop",
            metavar="|".join(SCALES),
            help="smoke: seconds, judges nothing; laptop (default): minutes on two cores; full: accelerators",
        )
        command.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="where results go; by default experiments/results, and a temporary folder at scale smoke",
        )
    run.add_argument("--seeds", type=int, metavar="N", help="repeat over N seeds; default: as the experiment says")
    run.add_argument("--data", metavar="PATH", help="your own data (path or glob), for experiments that take it")
    return parser


def _list(catalogue: Catalogue, console: Console) -> int:
    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for name in catalogue.experiments():
        experiment = catalogue.experiment(name)
        line(f"{name}  {experiment.title} ({experiment.paper})")
        for claim in experiment.claims:
            line(f"    - {claim.statement}")
    for name in catalogue.benchmarks():
        line(f"bench {name}  {catalogue.benchmark(name).title}")
    return 0


def _report(check: bool, results: Path, console: Console) -> int:
    from experiments.report import stale_files

    report = {"report": results.parent / "RESULTS.md", "readme": results.parents[1] / "README.md"}
    stale = stale_files(results, **report)
    for path in stale:
        console.print(f"{path.name}: {'stale' if check else 'written'}", markup=False, highlight=False)
    if check:
        return 1 if stale else 0
    write_together({path: _writer(text) for path, text in stale.items()})
    if not stale:
        console.print("everything is up to date", markup=False, highlight=False)
    return 0


def _writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _run(arguments: argparse.Namespace, catalogue: Catalogue, results: Path, console: Console) -> int:
    from experiments.runner import run_experiment

    scale = _scale(arguments.scale)
    names = _names(arguments.names, catalogue.experiments(), "experiment")
    folder = _folder(arguments.out, scale, results)
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    if arguments.data is not None and not glob(arguments.data):
        raise ValueError(f"--data: there is nothing at {arguments.data}")

    def run(name: str) -> dict[str, Any]:
        experiment = catalogue.experiment(name)
        return run_experiment(
            experiment,
            scale=scale,
            folder=folder,
            console=console,
            seeds=arguments.seeds,
            data=arguments.data,
        )

    if arguments.data is not None:
        for name in names:
            if not catalogue.experiment(name).accepts_data:
                raise ValueError(f"--data: {name} does not take data of your own")
    return _each(names, run)


def _bench(arguments: argparse.Namespace, catalogue: Catalogue, results: Path, console: Console) -> int:
    from experiments.runner import run_benchmark

    scale = _scale(arguments.scale)
    names = _names(arguments.names, catalogue.benchmarks(), "benchmark")
    folder = _folder(arguments.out, scale, results)
    return _each(
        names,
        lambda name: run_benchmark(catalogue.benchmark(name), scale=scale, folder=folder, console=console),
    )


def _each(names: Sequence[str], run: Callable[[str], Any]) -> int:
    failed = []
    for name in names:
        try:
            run(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        print(f"experiments: failed: {', '.join(failed)}; earlier results are untouched", file=sys.stderr)
    return 1 if failed else 0


def _scale(given: str) -> Scale:
    for scale in SCALES:
        if scale == given:
            return scale
    raise ValueError(f"--scale must be one of {', '.join(SCALES)}; got {given!r}")


def _names(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known) or 'none'}"
            raise ValueError(f"unknown {what} {name!r}; {hint}")
    return list(dict.fromkeys(given)) or list(known)


def _folder(out: Path | None, scale: Scale, results: Path) -> Path:
    if scale == "smoke":
        if out is not None and out.resolve().is_relative_to(results.resolve()):
            raise ValueError("--out: results of scale smoke must not go over the ones that are kept")
        return out or Path(tempfile.mkdtemp(prefix="experiments-smoke-"))
    return out or results


if __name__ == "__main__":
    sys.exit(main())
