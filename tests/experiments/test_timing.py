"""Paired timing: what is called when, and that the ratios are those of the recorded seconds."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.benchmarks.timing import PairedTimes, Ratio, paired_times

seconds = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20)


class FakeTime:
    """A clock that only the timed functions move."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def work(self, name, cost):
        def function():
            self.calls.append(name)
            self.now += cost
            return {"out": jnp.zeros(2)}

        return function

    def __call__(self):
        return self.now


def test_rounds_interleave_and_every_function_takes_each_place():
    clock = FakeTime()
    names = ["a", "b", "c"]
    paired_times({name: clock.work(name, 1.0) for name in names}, repeats=6, warmup=0, clock=clock)
    rounds = [clock.calls[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(order) == names for order in rounds)
    for place in range(3):
        assert sorted(order[place] for order in rounds) == sorted(names * 2)


def test_warmup_comes_first_and_is_not_measured():
    clock = FakeTime()
    costs = iter([100.0, 100.0, 1.0, 1.0, 1.0])

    def slow_start():
        clock.now += next(costs)

    times = paired_times({"f": slow_start}, repeats=3, warmup=2, clock=clock)
    assert times.seconds["f"] == (1.0, 1.0, 1.0)


def test_times_are_per_call_and_the_speedup_is_exact():
    clock = FakeTime()
    fns = {"fast": clock.work("fast", 2.0), "slow": clock.work("slow", 5.0)}
    finished = []
    times = paired_times(fns, repeats=4, warmup=1, calls=3, on_round=finished.append, clock=clock)
    assert times.rounds == 4
    assert finished == [1, 2, 3, 4]
    assert times.median("fast") == pytest.approx(2.0)
    assert times.speedup("fast", over="slow") == Ratio(2.5, 2.5, 2.5)
    assert len(clock.calls) == 2 * (1 + 4 * 3)


def test_jax_results_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr("jax.block_until_ready", lambda tree: waited.append(tree) or tree)
    paired_times({"f": lambda: {"x": 1}}, repeats=2, warmup=1, calls=3)
    assert waited == [{"x": 1}] * 7


@settings(max_examples=50, deadline=None)
@given(seconds, st.floats(0.01, 100))
def test_a_common_slowdown_of_a_round_leaves_the_ratio_alone(noise, factor):
    """The point of pairing: whatever slows a whole round cancels."""
    times = PairedTimes({"a": tuple(noise), "b": tuple(factor * value for value in noise)})
    ratio = times.speedup("a", over="b")
    np.testing.assert_allclose([ratio.lower, ratio.median, ratio.upper], factor, rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(seconds, st.randoms(use_true_random=False))
def test_the_median_ratio_is_the_sorted_middle(first, random):
    second = [random.uniform(1e-3, 1e3) for _ in first]
    ratios = sorted(b / a for a, b in zip(first, second, strict=True))
    middle = len(ratios) // 2
    expected = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    ratio = PairedTimes({"a": tuple(first), "b": tuple(second)}).speedup("a", over="b")
    assert ratio.median == pytest.approx(expected)
    assert ratios[0] <= ratio.lower <= ratio.median <= ratio.upper <= ratios[-1]


def test_the_table_names_every_function_and_its_speedup():
    times = PairedTimes({"ours": (0.001, 0.002, 0.001), "theirs": (0.003, 0.003, 0.003)})
    header, ours, theirs = times.table(over="theirs").splitlines()
    assert "speed over theirs" in header
    assert ours.startswith("ours")
    assert "1 ms" in ours
    assert " 3 [2.25, 3]" in ours
    assert theirs.endswith("1 [1, 1]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"repeats": 0}, "repeats"), ({"calls": 0}, "calls"), ({"warmup": -1}, "warmup")],
)
def test_bad_counts_are_named(arguments, named):
    with pytest.raises(ValueError, match=f"{named} must be at least"):
        paired_times({"f": lambda: None}, **arguments)


def test_nothing_to_time_is_an_error():
    with pytest.raises(ValueError, match="functions is empty"):
        paired_times({})


def test_an_exception_leaves_garbage_collection_on():
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        paired_times({"f": fail}, warmup=0)
    assert gc.isenabled()
