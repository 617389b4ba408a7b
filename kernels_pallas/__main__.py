"""The command `python -m kernels_pallas`: report, bench, tune.

A mistake of the caller, a compiler or a chip that is not there is one line on standard error and exit code 2.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from kernels_pallas import bench, report, tuner
from kernels_pallas.aot import CHIPS
from kernels_pallas.autotune import METHODS, TuningResult
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.spec import Spec, operations, specs


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: Arguments without the program's name; `sys.argv[1:]` by default.

    Returns:
      The exit code: 0; 1 where a kernel is wrong or does not compile; 2 for a mistake of the caller or a compiler
      or chip that is not there.
    """
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except (ValueError, ImportError, UnsupportedError) as error:
        print(f"kernels_pallas: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m kernels_pallas", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="report|bench|tune")
    of_report = commands.add_parser("report", help="what the compilers say about every kernel, without a chip")
    of_report.set_defaults(run=_report)
    of_report.add_argument("--chip", nargs="+", default=list(CHIPS), metavar="CHIP", help=f"of {', '.join(CHIPS)}")
    of_bench = commands.add_parser("bench", help="time implementations against each other on this device")
    of_bench.set_defaults(run=_bench)
    of_bench.add_argument("--sizes", metavar="SIZES", help="4096, 1k,2k or 8k..64k; default: the kept cases")
    of_bench.add_argument("--impl", nargs="+", default=[], metavar="NAME", help="default: all that run here")
    of_bench.add_argument("--dtype", default="bfloat16", help="with --sizes (default: %(default)s)")
    of_bench.add_argument("--heads", type=int, default=16, help="with --sizes (default: %(default)s)")
    of_bench.add_argument("--dim", type=int, default=128, help="with --sizes (default: %(default)s)")
    of_bench.add_argument("--rounds", type=int, default=11, help="how often each is timed (default: %(default)s)")
    of_bench.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    of_bench.add_argument(
        "--check", action="store_true", help="first compare all operations' kernels with the reference"
    )
    of_tune = commands.add_parser("tune", help="find block sizes and write a table")
    of_tune.set_defaults(run=_tune)
    of_tune.add_argument("--chip", required=True, metavar="CHIP", help=f"of {', '.join(CHIPS)}")
    of_tune.add_argument("--method", choices=METHODS, help="default: measured where the chip is here, else static")
    of_tune.add_argument("--out", type=Path, metavar="FILE", help="the table; entries that are there already stay")
    for command in (of_report, of_bench, of_tune):
        command.add_argument("--op", nargs="+", default=[], metavar="OP", help=f"of {', '.join(operations())}")
        command.add_argument("--case", default="", metavar="TEXT", help="only cases with this in their name")
    for command in (of_report, of_bench):
        command.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    return parser


def _cases(arguments: argparse.Namespace) -> list[Spec]:
    """The cases asked for; small ones only where named by --case."""
    chosen = [spec for operation in arguments.op or operations() for spec in specs(operation)]
    text = arguments.case
    found = [spec for spec in chosen if (text in spec.name if text else not spec.small)]
    if not found:
        raise ValueError(f"--case: no case has {text!r} in its name; there are: {', '.join(s.name for s in chosen)}")
    return found


def _print(row: tuple[str, ...]) -> None:
    print("  ".join(row), flush=True)


def _report(arguments: argparse.Namespace) -> int:
    table = report.report(_cases(arguments), arguments.chip, on_row=_print)
    print(f"\n{table.text()}")
    if arguments.json is not None:
        table.write(arguments.json, "compiled without a chip")
    return 1 if any(row["error"] for row in table.data) else 0


def _bench(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    device = jax.devices()[0].device_kind
    print(f"{jax.device_count()} x {device}")
    for name in ("rounds", "heads", "dim"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.sizes is None:
        cases = _cases(arguments)
    else:  # all operations at a size before the next: out of time, the largest are missing
        cases = [
            bench.sized(operation, size, arguments.dtype, arguments.heads, arguments.dim)
            for size in bench.sizes_of(arguments.sizes)
            for operation in arguments.op or operations()
        ]
    wrong = 0
    if arguments.check:
        checks = bench.checked(operations(), on_row=_print)
        wrong = sum(row[-1].startswith("NO") for row in checks.rows)
        print(f"\n{checks.text()}\n")
        if arguments.json is not None:
            checks.write(arguments.json.with_suffix(".check.json"), device)
    table = bench.bench(
        cases,
        implementations=arguments.impl,
        rounds=arguments.rounds,
        deadline=begin + arguments.seconds,
        on_row=_print,
    )
    print(f"\n{table.text()}")
    if arguments.json is not None:
        table.write(arguments.json, device)
    return 1 if wrong else 0


def _tune(arguments: argparse.Namespace) -> int:
    tuner.check(arguments.chip, arguments.method)
    kept = None
    if arguments.out is not None and arguments.out.exists():
        kept = TuningResult.from_json(arguments.out.read_text(encoding="utf-8"))
    found = tuner.tune_all(
        _cases(arguments),
        arguments.chip,
        method=arguments.method,
        on_result=lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = (found if kept is None else kept.merged(found)).to_json()
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
