"""Metrics files that survive kills and resumes, spikes, and the figure."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from jaxlib_icml.training.metrics import MetricsWriter, SpikeDetector, plot_loss, read_metrics


def write_run(folder, records, **options):
    with MetricsWriter(folder, **{"tensorboard": False, **options}) as metrics:
        for step, values in records:
            metrics.write(step, values)


def strict_lines(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_writes_one_object_per_record_and_reads_it_back(tmp_path):
    run = tmp_path / "new" / "run"
    write_run(run, [(1, {"loss": 2.5, "norm": np.float32(0.5)}), (2, {"loss": 2}), (2, {"held_out": 3.0})])
    assert strict_lines(run) == [
        {"step": 1, "loss": 2.5, "norm": 0.5},
        {"step": 2, "loss": 2.0},
        {"step": 2, "held_out": 3.0},
    ]
    metrics = read_metrics(run)
    assert set(metrics) == {"loss", "norm", "held_out"}
    np.testing.assert_array_equal(metrics["loss"], ([1, 2], [2.5, 2.0]))
    assert metrics["loss"][0].dtype == np.int64
    assert metrics["loss"][1].dtype == np.float64


def test_every_record_is_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in range(3):
            metrics.write(step, {"loss": step})
            np.testing.assert_array_equal(read_metrics(tmp_path)["loss"][1], np.arange(step + 1))


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(width=64), max_size=6))
def test_every_float_survives(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, [(i, {"x": value}) for i, value in enumerate(values)])
    strict_lines(folder)
    read = read_metrics(folder).get("x", (np.array([]), np.array([])))[1]
    np.testing.assert_array_equal(read, np.array(values))


def test_non_finite_values_have_their_documented_form(tmp_path):
    write_run(tmp_path, [(0, {"a": math.nan, "b": math.inf, "c": -math.inf})])
    assert strict_lines(tmp_path) == [{"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]


def test_a_line_cut_anywhere_is_dropped_on_reading_and_on_reopening(tmp_path):
    write_run(tmp_path, [(1, {"loss": 1.5}), (12, {"loss": -0.25, "x": math.nan})])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = cut >= len(whole) - 1  # without its newline the record is still whole
        expected = [1.5, -0.25] if complete else [1.5]
        np.testing.assert_array_equal(read_metrics(tmp_path)["loss"][1], expected)
        write_run(tmp_path, [(13, {"loss": 7.0})])
        np.testing.assert_array_equal(read_metrics(tmp_path)["loss"][1], [*expected, 7.0])
        strict_lines(tmp_path)


@pytest.mark.parametrize(("resume_step", "kept"), [(None, [0, 1, 2, 3]), (5, [0, 1, 2, 3]), (2, [0, 1, 2]), (-1, [])])
def test_resuming_drops_later_records(tmp_path, resume_step, kept):
    write_run(tmp_path, [(step, {"loss": step}) for step in range(4)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    write_run(tmp_path, [(9, {"loss": 9.0})], resume_step=resume_step)
    np.testing.assert_array_equal(read_metrics(tmp_path)["loss"][0], [*kept, 9])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]
    strict_lines(tmp_path)


def test_damage_before_the_last_line_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo\n{"step": 3, "loss": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1"), MetricsWriter(tmp_path, tensorboard=False):
        pass


def test_misuse(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(RuntimeError, match="with"):
        writer.write(1, {"loss": 1.0})
    with writer, pytest.raises(ValueError, match="'step' is taken"):
        writer.write(1, {"step": 1.0})
    with pytest.raises(RuntimeError, match="with"):
        writer.write(1, {"loss": 1.0})
    assert read_metrics(tmp_path / "nothing") == {}


def tensorboard_scalars(folder):
    """(tag, step, value) of all events, and the steps at which sessions start, by parsing the files."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars, starts = [], []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length (8), checksum (4), event, checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            if event.session_log.status == SessionLog.START:
                starts.append(event.step)
    return scalars, starts


def test_tensorboard_events(tmp_path):
    write_run(tmp_path, [(1, {"loss": 2.5}), (2, {"loss": 2.0, "norm": math.inf})], tensorboard=True)
    scalars, _ = tensorboard_scalars(tmp_path / "tensorboard")
    assert scalars == [("loss", 1, 2.5), ("loss", 2, 2.0), ("norm", 2, math.inf)]
    write_run(tmp_path, [(2, {"loss": 1.5})], tensorboard=True, resume_step=1)
    assert 2 in tensorboard_scalars(tmp_path / "tensorboard")[1]


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    write_run(tmp_path, [(1, {"loss": 1.0})])
    for module in ("tensorboardX", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"), MetricsWriter(tmp_path):
        pass
    with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"):
        plot_loss(tmp_path)


# Spikes


def test_spikes_against_numpy():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 0.4, 400)
    values[[50, 51, 200, 399]] *= 20
    detector = SpikeDetector(window=30, threshold=3.0)
    marks = [detector.update(value) for value in values]
    for i in range(10, 400):
        recent = values[max(0, i - 30) : i]
        median = np.median(recent)
        scale = max(1.4826 * np.median(np.abs(recent - median)), 0.05 * median)
        assert marks[i] == (values[i] > median + 3 * scale)
    assert not any(marks[:10])
    assert all(marks[i] for i in (50, 51, 200, 399))


def test_quiet_falling_and_shifted_series():
    assert not any(map(SpikeDetector().update, [1.0] * 50 + [1.1]))
    assert not any(map(SpikeDetector().update, np.linspace(10, 1, 300)))
    detector = SpikeDetector(window=20)
    marks = [detector.update(x) for x in [1.0] * 20 + [2.0] * 40]
    assert all(marks[20:30])
    assert not any(marks[31:])


def test_normal_noise_is_rarely_marked():
    detector = SpikeDetector()
    values = 10 + np.random.default_rng(1).normal(size=5000)
    # One-sided four sigma is 3e-5; a window of 100 estimates sigma to about 10%.
    assert np.mean([detector.update(x) for x in values]) < 2e-3


def test_non_finite_values_are_spikes_and_are_forgotten():
    detector = SpikeDetector(window=12)
    assert detector.update(math.nan)
    marks = [detector.update(x) for x in [1.0] * 12 + [math.inf] * 12 + [1.0, 2.0]]
    assert marks == [False] * 12 + [True] * 12 + [False, True]


@pytest.mark.parametrize("options", [{"window": 1}, {"threshold": 0.0}, {"threshold": math.nan}])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match="must be"):
        SpikeDetector(**options)


# The figure


def typical_run(folder, steps=400):
    rng = np.random.default_rng(0)
    detector = SpikeDetector()
    with MetricsWriter(folder, tensorboard=False) as metrics:
        for step in range(1, steps + 1):
            norm = float(rng.lognormal(0, 0.2)) * (30 if step in (150, 290) else 1)
            loss = 2 + 4 * math.exp(-step / 80) + 0.15 * rng.normal() + (2 if step == 150 else 0)
            metrics.write(step, {"loss": loss, "grad_norm": norm, "spike": detector.update(norm)})
            if step % 50 == 0:
                metrics.write(step, {"monitor_bits_per_byte": 2 + 3 * math.exp(-step / 80)})
        metrics.write(steps, {"held_out_bits_per_byte": 2.1})


def test_the_figure_is_a_picture_of_the_run(tmp_path):
    typical_run(tmp_path)
    path = plot_loss(tmp_path, baselines={"3-gram": 2.9, "5-gram": 2.4, "none": math.nan})
    assert path == tmp_path / "loss.png"
    image = imread(path)
    assert image.shape[0] > 800
    assert image.shape[1] > 1000
    assert 0.01 < np.mean(image[..., :3].min(-1) < 0.9) < 0.5  # ink, on paper
    red = (image[..., 0] > 0.7) & (image[..., 1] < 0.3) & (image[..., 2] < 0.3)
    assert red.sum() > 50  # the spikes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


@pytest.mark.parametrize(
    "records",
    [
        [(1, {"loss": 2.0})],
        [(1, {"loss": math.nan}), (2, {"loss": 1.0}), (3, {"loss": math.inf})],
        [(1, {"loss": math.nan, "grad_norm": 0.0})],
        [(1, {"grad_norm": 0.0}), (2, {"grad_norm": 1.0})],
        [(1, {"held_out_loss": 1.0, "loss": 1.5})],
        [(5, {"held_out_bits_per_byte": 3.0})],
    ],
)
def test_sparse_runs_have_figures_too(tmp_path, records):
    write_run(tmp_path, records)
    image = imread(plot_loss(tmp_path, baselines={"1-gram": 4.5}))
    assert np.mean(image[..., :3].min(-1) < 0.9) > 0.001


def test_nothing_to_draw(tmp_path):
    write_run(tmp_path, [(1, {"speed": 3.0})])
    with pytest.raises(ValueError, match="has no loss"):
        plot_loss(tmp_path)
