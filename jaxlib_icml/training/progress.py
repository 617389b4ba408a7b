"""What a person sees while a run works: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import NamedTuple


class Progress(NamedTuple):
    """One step as the reporter shows it."""

    step: int
    fraction: float
    """Share of the run that is over, in [0, 1]."""
    loss: float
    """Nats per token."""
    grad_norm: float
    tokens_per_second: float
    seconds_left: float
    spike: bool
    """The gradient norm stands out from the recent ones."""


def describe(progress: Progress, spikes: int) -> str:
    """The figures of a step in one line."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    mark = " ▲" if progress.spike else ""
    return (
        f"step {progress.step}  loss {progress.loss:.3f}  {progress.tokens_per_second:,.0f} tok/s  "
        f"|g| {progress.grad_norm:.2f}{mark}  spikes {spikes}  {minutes}:{seconds:02d} left"
    )


class Reporter:
    """Shows notes and steps; used as a context manager around the steps. This one is silent."""

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def note(self, text: str) -> None:
        """A line that stays."""

    def step(self, progress: Progress) -> None:
        """One finished step."""


class PlainReporter(Reporter):
    """One line every few seconds.

    Args:
      interval: seconds between lines.
    """

    def __init__(self, interval: float = 10.0):
        self._interval = interval
        self._last = -float("inf")
        self._spikes = 0

    def note(self, text: str) -> None:
        """Print the line."""
        print(text, flush=True)

    def step(self, progress: Progress) -> None:
        """Print a line for spikes and whenever the interval is over."""
        self._spikes += progress.spike
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            print(f"{progress.fraction:4.0%}  {describe(progress, self._spikes)}", flush=True)


class RichReporter(Reporter):
    """A progress bar that stays at the bottom of the terminal."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError as error:
            raise ImportError("the progress bar needs the package rich: pip install 'jaxlib-icml[lm]'") from error
        columns = (
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._console = Console()
        self._bar = Bar(*columns, console=self._console)
        self._task = self._bar.add_task("compiling ...", total=1.0)
        self._spikes = 0

    def __enter__(self) -> "RichReporter":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Print the line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def step(self, progress: Progress) -> None:
        """Redraw the bar."""
        self._spikes += progress.spike
        self._bar.update(self._task, completed=progress.fraction, description=describe(progress, self._spikes))


def make_reporter() -> Reporter:
    """A bar on a terminal, plain lines otherwise.

    Returns:
      The reporter.
    """
    return RichReporter() if sys.stdout.isatty() else PlainReporter()
