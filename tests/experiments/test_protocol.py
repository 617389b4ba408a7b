"""Claims: when they hold, how numbers are shown, and that declarations are checked."""

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.protocol import Benchmark, Target
from experiments.benchmarks.timing import Ratio
from experiments.protocol import Claim, Experiment, Measured, at_least, at_most, between

numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers)
def test_expectations_are_the_inequalities_they_show(bound, value):
    assert at_least(bound).holds(value) == (value >= bound)
    assert at_most(bound).holds(value) == (value <= bound)
    low, high = sorted((bound, value))
    assert between(low, high).holds((low + high) / 2)
    assert not between(low, high).holds(high + 1)


def test_expectations_read_like_sentences():
    assert at_most(-0.15, "nats").text == "≤ -0.15 nats"
    assert at_least(2).text == "≥ 2"
    assert between(0.9, 1.1, "x").text == "0.9 to 1.1 x"
    with pytest.raises(ValueError, match="low must not exceed high"):
        between(2, 1)


@given(st.lists(numbers, min_size=2, max_size=8))
def test_the_spread_is_that_of_the_statistics_module(values):
    measured = Measured(tuple(values))
    assert measured.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert measured.std == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
    assert (measured.low, measured.high) == (min(values), max(values))


def test_numbers_are_shown_with_unit_range_and_count():
    assert Measured((0.25,)).show("bits") == "0.25 bits"
    assert Measured((1.0, 2.0)).show() == "1.5 (1 to 2, n=2)"
    with pytest.raises(ValueError, match="values is empty"):
        Measured(())


@pytest.mark.parametrize(
    ("judged_on", "values", "held"),
    [("mean", (0.0, 3.0), True), ("every seed", (0.0, 3.0), False), ("every seed", (1.0, 3.0), True)],
)
def test_judged_on_the_mean_or_on_every_seed(judged_on, values, held):
    claim = Claim("c", "large", "", at_least(1.0), judged_on=judged_on)
    assert claim.held(Measured(values), "laptop") is held


def test_smoke_and_scales_without_expectation_are_not_judged():
    everywhere = Claim("c", "large", "", at_least(1.0))
    full_only = Claim("c", "large", "", {"full": at_least(1.0)})
    assert everywhere.held(Measured((2.0,)), "smoke") is None
    assert full_only.held(Measured((2.0,)), "laptop") is None
    assert full_only.held(Measured((2.0,)), "full") is True


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("expected", [at_least(0.0), at_most(0.0)])
def test_a_number_that_is_not_finite_never_holds(bad, expected):
    assert Claim("c", "s", "", expected).held(Measured((bad, 0.0)), "laptop") is False
    assert Target("t", "s", expected).met(Ratio(bad, bad, bad)) is False


def _experiment(**changes):
    claim = Claim("c", "s", "", at_least(0.0))
    good = Experiment(
        name="family/method", title="t", paper="p", claims=(claim,), run=lambda _: None, plot=lambda *_: None
    )
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "method"}, "name must be <family>/<method>"),
        ({"name": "../x/y"}, "name must be <family>/<method>"),
        ({"claims": ()}, "claims of family/method is empty"),
        ({"claims": (Claim("c", "s", "", at_least(0.0)),) * 2}, "same id twice"),
        ({"seeds": 0}, "seeds of family/method must be at least 1, got 0"),
    ],
)
def test_declarations_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        _experiment(**changes)


def test_benchmark_declarations_are_checked():
    target = Target("t", "s", at_least(1.0))
    for targets, message in (((), "targets of b is empty"), ((target, target), "same id twice")):
        with pytest.raises(ValueError, match=message):
            Benchmark("b", "title", targets, run=lambda _: None)
