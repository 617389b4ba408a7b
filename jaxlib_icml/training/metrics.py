"""Metrics of a run: one line of JSON per record, TensorBoard events, spike marks and a figure.

`metrics.jsonl` holds one object per line, `{"step": 12, "loss": 3.25, ...}`. It is strictly valid JSON:
values that JSON has no numbers for are the strings "NaN", "Infinity" and "-Infinity".
"""

import collections
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_FILE = "metrics.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends records to `metrics.jsonl` and to TensorBoard events; a context manager.

    On entry a half-written last line, left by a process that was killed, is removed. With `resume_step`, so
    are records of later steps (the file is replaced by a rename, so that no crash can lose it), and
    TensorBoard is told to forget them.

    Args:
      run_dir: folder of the run, made if missing; events go to its subfolder `tensorboard`.
      tensorboard: also write TensorBoard events (needs tensorboardX).
      resume_step: the step that the run continues from; None keeps all records.

    Raises:
      ImportError: tensorboardX is missing.
      ValueError: `metrics.jsonl` is damaged before its last line.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with MetricsWriter(folder, tensorboard=False) as metrics:
      ...     metrics.write(1, {"loss": 3.5})
      >>> steps, losses = read_metrics(folder)["loss"]
      >>> print(steps, losses)
      [1] [3.5]
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True, resume_step: int | None = None):
        self._run_dir = Path(run_dir)
        self._tensorboard = tensorboard
        self._resume_step = resume_step
        self._file: Any = None
        self._events: Any = None

    def __enter__(self) -> "MetricsWriter":
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / _FILE
        _repair(path, self._resume_step)
        if self._tensorboard:
            self._events = _summary_writer(self._run_dir / "tensorboard", self._resume_step)
        self._file = path.open("a", encoding="utf-8")
        return self

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one record and flush it.

        Args:
          step: number of finished steps.
          values: named numbers (anything that `float` takes); the name "step" is taken.

        Raises:
          ValueError: a value is named "step".
          RuntimeError: the writer is not open.
        """
        if self._file is None:
            raise RuntimeError("MetricsWriter.write needs an open writer: use it in a `with` statement")
        if "step" in values:
            raise ValueError("values: the name 'step' is taken by the step itself")
        numbers = {name: float(value) for name, value in values.items()}
        record = {"step": int(step), **{name: _to_json(value) for name, value in numbers.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, int(step))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def read_metrics(run_dir: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read `metrics.jsonl`, also of a run that is going on or was killed.

    Args:
      run_dir: folder of the run.

    Returns:
      For each name its steps (int64) and values (float64, with NaN and infinities), in the order of writing;
      empty if there is no file.

    Raises:
      ValueError: the file is damaged before its last line.
    """
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in _records(Path(run_dir) / _FILE):
        step = record.pop("step")
        for name, value in record.items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(_NON_FINITE[value] if isinstance(value, str) else float(value))
    return {name: (np.array(s, np.int64), np.array(v, np.float64)) for name, (s, v) in series.items()}


class SpikeDetector:
    """Marks values far above the recent ones.

    A value is a spike if it exceeds median + threshold · scale of the last `window` values, where scale is
    1.4826 · (median absolute deviation), the standard deviation for normal data, but at least 5% of |median|,
    so that a quiet series does not turn its noise into spikes. Median and deviation hardly move with single
    spikes; a lasting rise stops being one after half a window. NaN and infinity are spikes and are not
    remembered. The first ten values (or `window`, if less) are never marked unless they are not finite.

    Args:
      window: how many values to remember, at least 2.
      threshold: how many scales above the median, positive.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> detector = SpikeDetector()
      >>> [detector.update(x) for x in [1.0, 1.1] * 10 + [5.0, 1.0]][-3:]
      [False, True, False]
    """

    def __init__(self, window: int = 100, threshold: int | float = 4.0):
        if window < 2:
            raise ValueError(f"window must be at least 2, got {window}")
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, got {threshold}")
        self._recent: collections.deque[float] = collections.deque(maxlen=window)
        self._needed = min(window, 10)
        self._threshold = threshold

    def update(self, value: int | float) -> bool:
        """Take the next value; whether it is a spike against those before it."""
        value = float(value)
        if not math.isfinite(value):
            return True
        spike = False
        if len(self._recent) >= self._needed:
            median = statistics.median(self._recent)
            deviation = statistics.median(abs(x - median) for x in self._recent)
            spike = value > median + self._threshold * max(1.4826 * deviation, 0.05 * abs(median))
        self._recent.append(value)
        return spike


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _records(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that is not a whole record is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
                raise ValueError("not a record with a step")
        except ValueError as error:
            # Only what no newline ends can be half-written.
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
        records.append(record)
    return records


def _repair(path: Path, resume_step: int | None) -> None:
    """Rewrite the file without a half-written tail and without records after `resume_step`."""
    if not path.exists():
        return
    kept = [r for r in _records(path) if resume_step is None or r["step"] <= resume_step]
    content = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept).encode()
    if content == path.read_bytes():
        return
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _summary_writer(folder: Path, resume_step: int | None) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard events need tensorboardX: pip install 'jaxlib-icml[lm]', or pass tensorboard=False"
        ) from error
    return SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)


def plot_loss(run_dir: str | Path, *, baselines: Mapping[str, float] | None = None) -> Path:
    """Draw `loss.png`: training loss, held-out figures with baselines, and gradient norms with their spikes.

    Drawn are the series `loss` (raw, and smoothed), those whose name contains "held_out" or "monitor" (as
    points; in a panel of their own if they are in bits per byte, else with the training loss), and
    `grad_norm`, with the steps marked where `spike` is 1. Panels without data are left out. Values that are
    not finite are marked at the upper edge.

    Args:
      run_dir: folder of the run, with `metrics.jsonl`.
      baselines: name and value of horizontal lines among the held-out figures, in their unit.

    Returns:
      The path of the figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: the run has no metrics to draw, or `metrics.jsonl` is damaged.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plot_loss needs matplotlib: pip install 'jaxlib-icml[lm]'") from error

    metrics = read_metrics(run_dir)
    held_out = {name: xy for name, xy in metrics.items() if "held_out" in name or "monitor" in name}
    in_bits = {name: xy for name, xy in held_out.items() if name.endswith("bits_per_byte")}
    with_loss = {name: xy for name, xy in held_out.items() if name not in in_bits}
    panels = []
    if "loss" in metrics or with_loss:
        panels.append("loss")
    if in_bits or (baselines and not panels):
        panels.append("bits")
    if "grad_norm" in metrics:
        panels.append("norm")
    if not panels:
        raise ValueError(f"run_dir: {run_dir} has no loss, held-out figures or gradient norms in {_FILE}")

    heights = {"loss": 3.2, "bits": 3.0, "norm": 2.2}
    figure = Figure(figsize=(9, 0.7 + sum(heights[p] for p in panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[heights[p] for p in panels])[:, 0]
    by_name = dict(zip(panels, axes, strict=True))
    if "loss" in by_name:
        _draw_loss(by_name["loss"], metrics.get("loss"), with_loss)
    if "bits" in by_name:
        _draw_held_out(by_name["bits"], in_bits)
        by_name["bits"].set_ylabel("bits per byte")
    _draw_baselines(by_name.get("bits", axes[0]), baselines or {})
    if "norm" in by_name:
        _draw_norm(by_name["norm"], metrics["grad_norm"], metrics.get("spike"))
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9, loc="upper right")
    axes[0].set_title(Path(run_dir).resolve().name, loc="left", fontsize=11)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))

    path = Path(run_dir) / "loss.png"
    partial = Path(run_dir) / ".loss.png"
    figure.savefig(partial, dpi=130, format="png")
    partial.replace(path)
    return path


def _draw_loss(
    axis: Any,
    loss: tuple[np.ndarray, np.ndarray] | None,
    held_out: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    if loss is not None:
        steps, values = _finite(axis, loss)
        axis.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        smooth = _smoothed(values)
        axis.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="training loss (smoothed)")
        if len(values):
            # One wild batch must not flatten the curve.
            low, high = min(values.min(), smooth.min()), max(np.quantile(values, 0.995), smooth.max())
            room = 0.06 * (high - low) or 0.1
            axis.set_ylim(low - room, high + room)
    _draw_held_out(axis, held_out)
    axis.set_ylabel("loss [nats per token]")


def _draw_held_out(axis: Any, series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    markers = "o*sD"
    for i, (name, xy) in enumerate(sorted(series.items(), key=lambda item: -len(item[1][0]))):
        steps, values = _finite(axis, xy)
        label = name.removesuffix("_bits_per_byte").replace("_", " ")
        if len(values):
            label += f" (last: {values[-1]:.3f})"
        axis.plot(
            steps,
            values,
            color=f"C{i + 1}",
            marker=markers[i % len(markers)],
            markersize=5 if i == 0 else 11,
            linewidth=1.2,
            label=label,
            clip_on=False,
            zorder=3 + i,
        )


def _draw_baselines(axis: Any, baselines: Mapping[str, float]) -> None:
    finite = {name: value for name, value in baselines.items() if math.isfinite(value)}
    for name, value in finite.items():
        axis.axhline(value, color="0.45", linestyle="--", linewidth=1)
        text = axis.annotate(
            f"{name}: {value:.3f}",
            (0.01, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            fontsize=8,
            color="0.3",
        )
        text.set_in_layout(False)
    if finite:
        low, high = axis.get_ylim()
        room = 0.05 * (high - low)
        axis.set_ylim(min(low, *(v - room for v in finite.values())), max(high, *(v + room for v in finite.values())))


def _draw_norm(axis: Any, norm: tuple[np.ndarray, np.ndarray], spike: tuple[np.ndarray, np.ndarray] | None) -> None:
    steps, values = _finite(axis, norm)
    axis.plot(steps, values, color="tab:gray", linewidth=0.9)
    if spike is not None:
        marked = np.isin(steps, spike[0][spike[1] == 1])
        if marked.any():
            label = f"spikes ({int(marked.sum())})"
            axis.plot(steps[marked], values[marked], "^", color="tab:red", markersize=5, label=label)
    if np.any(values > 0):
        axis.set_yscale("log")
    axis.set_ylabel("gradient norm")


def _finite(axis: Any, xy: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The finite points; the steps of the others are marked at the upper edge."""
    steps, values = xy
    finite = np.isfinite(values)
    if not finite.all():
        bad = steps[~finite]
        axis.plot(
            bad,
            np.ones(len(bad)),
            "x",
            color="tab:red",
            markersize=6,
            clip_on=False,
            transform=axis.get_xaxis_transform(),
            label=f"not finite ({len(bad)})",
        )
    return steps[finite], values[finite]


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Means over centred windows of a fiftieth of the series, cut at its ends."""
    half = len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    start, stop = np.maximum(i - half, 0), np.minimum(i + half + 1, len(values))
    return (sums[stop] - sums[start]) / (stop - start)
