"""What a run is given: its scale, its seeds, a scratch folder, and a way to say how far it is."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from experiments.protocol import Scale

Choice = TypeVar("Choice")


class Phase:
    """One bar of the display; made by `Context.progress`."""

    def __init__(self, progress: Progress, description: str, total: int):
        self.description, self.total, self.done = description, total, 0
        self._progress = progress
        self._task: TaskID = progress.add_task(description, total=total, text="")

    def advance(self, steps: int = 1, **values: float) -> None:
        """Moves the bar by `steps`, and shows `values` behind it (`loss=2.31`)."""
        quarters_before = 4 * self.done // self.total
        self.done += steps
        text = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.update(self._task, advance=steps, text=text)
        if self._progress.disable and 4 * self.done // self.total > quarters_before:
            self._progress.console.print(
                f"{self.description}: {self.done}/{self.total} {text}".rstrip(), markup=False, highlight=False
            )


@dataclass
class Context:
    """Handed to `Experiment.run` and `Benchmark.run`.

    Attributes:
      scale: smoke (seconds: does it run), laptop (minutes on two cores, claims are judged), full
        (accelerators).
      seeds: The seeds to repeat everything over.
      data: The user's own data (a path or a glob) in place of the default, where the experiment accepts it.
      scratch: An empty folder that is deleted after the run.
      bars: The display.
      seconds: Seconds spent in each phase so far, by description.
    """

    scale: Scale
    seeds: tuple[int, ...]
    data: str | None
    scratch: Path
    bars: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    def pick(self, *, smoke: Choice, laptop: Choice, full: Choice) -> Choice:
        """Returns the value of this run's scale."""
        choices: Mapping[str, Choice] = {"smoke": smoke, "laptop": laptop, "full": full}
        return choices[self.scale]

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Phase]:
        """Shows a bar of `total` steps while the block runs; its time is recorded under `description`.

        Raises:
          ValueError: If `total` is below 1.
        """
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        start = time.perf_counter()
        try:
            yield Phase(self.bars, description, total)
        finally:
            spent = time.perf_counter() - start
            self.seconds[description] = self.seconds.get(description, 0.0) + spent

    def log(self, message: str) -> None:
        """Prints one line above the bars."""
        self.bars.console.print(message, markup=False, highlight=False)


def bars(console: Console) -> Progress:
    """Returns the display: bars on a terminal, and a plain line at each quarter elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        disable=not console.is_terminal,
    )
