"""Measures implementations against each other and against other people's, on the device that is there."""

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch, testing
from kernels_pallas.dispatch import supported
from kernels_pallas.spec import Spec, specs, with_gradients
from kernels_pallas.tables import Table
from kernels_pallas.timing import interleaved, ratio

HEADER = ("operation", "case", "pass", "implementation", "median ms", "time over", "ratio [quartiles]")
CHECKED = ("operation", "case", "implementation", "value", "gradients", "within")

_REFERENCE_SIZE = 1024  # the reference holds all scores
_SLOW_SECONDS = 2.0


def sizes_of(text: str) -> list[int]:
    """Sizes as they are given on the command line: `4096`, `8k`, several with commas, or `8k..64k` in powers of two.

    Raises:
      ValueError: Anything else.

    >>> sizes_of("8k..32k"), sizes_of("100,1k")
    ([8192, 16384, 32768], [100, 1024])
    """

    def number(word: str) -> int:
        scale = 1024 if word.endswith("k") else 1
        digits = word.removesuffix("k")
        if not digits.isdigit() or int(digits) < 1:
            raise ValueError(f"--sizes must be like 4096, 8k, 1k,2k or 8k..64k, got {text!r}")
        return int(digits) * scale

    if ".." not in text:
        return [number(word) for word in text.split(",")]
    first, _, last = text.partition("..")
    size, end = number(first), number(last)
    if end < size:
        raise ValueError(f"--sizes must not descend, got {text!r}")
    found = []
    while size <= end:
        found.append(size)
        size *= 2
    return found


def sized(operation: str, size: int, dtype: str, heads: int, dim: int) -> Spec:
    """The operation's case of a size; heads and head size where it has some."""
    make = importlib.import_module(f"kernels_pallas.{operation}.specs").sized
    return make(size, dtype) if operation == "symmetric_product" else make(size, dtype, heads, dim)


def bench(
    cases: Sequence[Spec],
    *,
    implementations: Sequence[str] = (),
    rounds: int = 11,
    deadline: float = float("inf"),
    on_row: Callable[[tuple[str, ...]], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Times every implementation that runs on this device, and the peers, in turns.

    Args:
      cases: What to time.
      implementations: Names; none: all that run here, "reference" only for small cases.
      rounds: How often each is timed.
      deadline: In time of `clock`, when no further case is begun.
      on_row: Called with every row as soon as it is known.
      clock: The time in seconds.

    Returns:
      A row for every case, pass and implementation, over the first peer, or else over "xla".
    """
    rows: list[tuple[str, ...]] = []
    data, notes = [], []
    for spec in cases:
        for gradient in (False, True) if spec.gradients else (False,):
            if clock() > deadline:
                notes.append(f"Out of time before {spec.operation} [{spec.name}].")
                break
            peers = {name: with_gradients(peer, spec.gradients, gradient) for name, peer in spec.peers().items()}
            functions = _functions(spec, implementations, gradient) | peers
            seconds, failures = _timed(functions, spec, gradient, rounds, clock)
            what = "forward and backward" if gradient else "forward"
            notes += [f"{spec.operation} [{spec.name}] {what}, {name}: {why}" for name, why in failures.items()]
            # The strongest peer that there is: cuDNN before others.
            bases = (*sorted(peers, key=lambda name: not name.startswith("cudnn")), "xla", *seconds)
            base = next((name for name in bases if name in seconds), "")
            for name, times in seconds.items():
                found = ratio(times, seconds[base])
                median = float(np.median(times))
                shown = "1" if name == base else str(found)
                row = (spec.operation, spec.name, what, name, f"{1e3 * median:.3f}", base, shown)
                rows.append(row)
                data.append(
                    {
                        "operation": spec.operation,
                        "case": spec.name,
                        "pass": what,
                        "implementation": name,
                        "seconds": times,
                        "over": base,
                        "ratio": found._asdict(),
                    }
                )
                if on_row is not None:
                    on_row(row)
    notes.append("Ratios are formed within rounds in which all are timed in turns; below 1 is faster.")
    return Table("kernels/bench", "Implementations against each other", HEADER, rows, notes, data)


def checked(operations: Sequence[str], on_row: Callable[[tuple[str, ...]], None] | None = None) -> Table:
    """Values and gradients of this device's kernels ("xla" on a CPU) against the reference, on the small cases.

    Returns:
      A row for every case: the largest errors relative to the largest entry, and whether they are within
      `testing.TOLERANCES`; "not run" where no kernel takes the case.
    """
    implementation = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}.get(jax.default_backend(), "xla")
    rows: list[tuple[str, ...]] = []
    data = []
    for spec in (spec for operation in operations for spec in specs(operation) if spec.small):
        errors, verdict = _checked(spec, implementation)
        gradients = [error for name, error in errors.items() if name != "value"]
        value = f"{errors['value']:.1e}" if errors else "-"
        worst = f"{np.max(gradients):.1e}" if gradients else "-"
        row = (spec.operation, spec.name, implementation, value, worst, verdict)
        rows.append(row)
        data.append(dict(zip(CHECKED, row, strict=True)))
        if on_row is not None:
            on_row(row)
    notes = ["Largest error over the largest entry, against the reference in float32."]
    return Table("kernels/check", "Kernels against the reference", CHECKED, rows, notes, data)


def _checked(spec: Spec, implementation: Any) -> tuple[dict[str, float], str]:
    reason = supported(spec.call, *spec.shapes)[implementation]
    if reason is not None:
        return {}, f"not run: {reason}"
    try:
        errors = testing.errors(spec, spec.runs(implementation, gradient=True))
    except Exception as error:  # one broken kernel must not hide the others
        return {}, f"NO: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    value, gradient = testing.TOLERANCES[spec.dtype]
    good = all(error <= (value if name == "value" else gradient) for name, error in errors.items())
    return errors, "yes" if good else "NO"


def _functions(spec: Spec, implementations: Sequence[str], gradient: bool) -> dict[str, Callable[..., Any]]:
    reasons = supported(spec.call, *spec.shapes)
    if unknown := sorted(set(implementations) - set(reasons)):
        raise ValueError(f"--impl must be of {', '.join(reasons)}, got {', '.join(unknown)}")
    small = max(x.shape[1] for x in spec.shapes if x is not None) <= _REFERENCE_SIZE
    usual = [name for name, reason in reasons.items() if reason is None and (small or name != "reference")]
    found = {}
    for name in get_args(dispatch.Name):
        if name not in (implementations or usual):
            continue
        if (reason := reasons[name]) is not None:
            raise dispatch.UnsupportedError(reason)
        found[name] = spec.runs(name, gradient=gradient)
    return found


def _timed(
    functions: dict[str, Callable[..., Any]], spec: Spec, gradient: bool, rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds by name, and why some have none or only one."""
    arrays = spec.make(0)
    args: tuple[Any, ...] = arrays
    if gradient:
        out = jax.eval_shape(functools.partial(spec.call, implementation="xla"), *arrays)
        args = (*arrays, jnp.ones(out.shape, out.dtype))
    quick, slow, failures = {}, {}, {}
    for name, function in functions.items():
        run = functools.partial(jax.jit(function), *args)
        try:
            jax.block_until_ready(run())
        except Exception as error:  # out of memory, or not supported by a peer: the others are still timed
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        start = clock()
        jax.block_until_ready(run())
        once = clock() - start
        if once > _SLOW_SECONDS:
            slow[name] = once
            failures[name] = f"timed once, it took {once:.1f} s"
        else:
            quick[name] = run
    seconds = interleaved(quick, rounds=rounds) if quick else {}
    return seconds | {name: [once] for name, once in slow.items()}, failures
