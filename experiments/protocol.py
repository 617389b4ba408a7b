"""What an experiment declares: its claims, how they are measured, and when they hold.

    EXPERIMENT = Experiment(
        name="lm/pretrain",
        title="OLion against tuned AdamW at equal tokens",
        paper="OLion (arXiv 2602.01105)",
        claims=(
            Claim(
                id="olion_below_adamw",
                statement="OLion ends at a lower validation loss than AdamW",
                paper="-0.05 nats (GPT-2 small, 10B tokens)",
                expected=at_most(-0.02, "nats"),
            ),
        ),
        run=run,  # Context -> Outcome({"olion_below_adamw": [one number per seed]}, data={...})
        plot=plot,  # draws the figure from the data of the outcome
    )

A claim that does not hold is recorded as such: it is a result, not an error.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.context import Context

Scale = Literal["smoke", "laptop", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)

NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Expected:
    """A predicate on one number, with the text that the tables show.

    >>> at_most(-0.15, "nats").text
    '≤ -0.15 nats'
    >>> at_most(-0.15, "nats").holds(-0.2)
    True
    """

    text: str
    holds: Callable[[float], bool]
    unit: str = ""


def at_least(bound: float, unit: str = "") -> Expected:
    """Returns the expectation that a number is `bound` or more; `unit` is shown with it."""
    return Expected(f"≥ {bound:g} {unit}".rstrip(), lambda value: value >= bound, unit)


def at_most(bound: float, unit: str = "") -> Expected:
    """Returns the expectation that a number is `bound` or less; `unit` is shown with it."""
    return Expected(f"≤ {bound:g} {unit}".rstrip(), lambda value: value <= bound, unit)


def between(low: float, high: float, unit: str = "") -> Expected:
    """Returns the expectation that a number lies in `[low, high]`; `unit` is shown with it."""
    if not low <= high:
        raise ValueError(f"low must not exceed high, got low={low} and high={high}")
    return Expected(f"{low:g} to {high:g} {unit}".rstrip(), lambda value: low <= value <= high, unit)


@dataclass(frozen=True)
class Measured:
    """One number with its spread over seeds (a number pooled over seeds has a single value)."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty; measure a claim at least once")

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values) if all(map(math.isfinite, self.values)) else math.nan

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation over seeds; 0 for a single value."""
        if len(self.values) == 1:
            return 0.0
        squares = math.fsum((value - self.mean) ** 2 for value in self.values)
        return math.sqrt(squares / (len(self.values) - 1))

    def show(self, unit: str = "") -> str:
        """Returns the number as the tables show it: mean, range and how many.

        >>> Measured((1.0, 2.0, 3.0)).show("nats")
        '2 nats (1 to 3, n=3)'
        """
        number = f"{self.mean:.4g} {unit}".rstrip()
        if len(self.values) == 1:
            return number
        return f"{number} ({self.low:.4g} to {self.high:.4g}, n={len(self.values)})"


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and what would count as reproducing it.

    Attributes:
      id: The key under which `run` returns the measurement.
      statement: The claim in words.
      paper: The paper's number at its full scale, in words; empty when the paper gives none.
      expected: What we expect; a mapping from scale where scales differ. A scale left out is not judged.
      judged_on: Whether the mean over seeds has to meet the expectation, or every seed by itself.
    """

    id: str
    statement: str
    paper: str
    expected: Expected | Mapping[Scale, Expected]
    judged_on: Literal["mean", "every seed"] = "mean"

    @property
    def unit(self) -> str:
        """The unit of the measurement, which scales share."""
        if isinstance(self.expected, Expected):
            return self.expected.unit
        return next((expected.unit for expected in self.expected.values()), "")

    def expected_at(self, scale: Scale) -> Expected | None:
        """Returns the expectation at `scale`, None where there is none."""
        return self.expected if isinstance(self.expected, Expected) else self.expected.get(scale)

    def held(self, measured: Measured, scale: Scale) -> bool | None:
        """Returns whether the claim held, None where it is not judged (always at scale smoke)."""
        expected = self.expected_at(scale)
        if scale == "smoke" or expected is None:
            return None
        if not all(map(math.isfinite, measured.values)):
            return False
        judged = measured.values if self.judged_on == "every seed" else (measured.mean,)
        return all(bool(expected.holds(value)) for value in judged)


@dataclass(frozen=True)
class Outcome:
    """What a run of an experiment found.

    Attributes:
      measured: Claim id to its measurement: one number per seed, or a single number over all seeds.
      data: The raw numbers (anything JSON can hold, and arrays); the figure is drawn from these alone.
      notes: Sentences that a reader of the numbers should know.
    """

    measured: Mapping[str, float | Sequence[float]]
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """The declared object of an experiment module.

    Attributes:
      name: `<family>/<method>`, the module's address.
      title: One line of what is compared with what.
      paper: Title and arXiv id.
      claims: What is measured.
      run: Measures every claim.
      plot: Draws into an empty figure from the data of the outcome, as read back from JSON.
      seeds: Seeds at scales laptop and full; smoke runs one.
      accepts_data: Whether `--data PATH` means something here.
    """

    name: str
    title: str
    paper: str
    claims: tuple[Claim, ...]
    run: Callable[["Context"], Outcome]
    plot: Callable[["Figure", Mapping[str, Any]], None]
    seeds: int = 3
    accepts_data: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name must be <family>/<method> in lower case, got {self.name!r}")
        if not self.claims:
            raise ValueError(f"claims of {self.name} is empty; an experiment needs at least one claim")
        ids = [claim.id for claim in self.claims]
        if len(set(ids)) < len(ids):
            raise ValueError(f"claims of {self.name} have the same id twice: {ids}")
        if self.seeds < 1:
            raise ValueError(f"seeds of {self.name} must be at least 1, got {self.seeds}")
