import dataclasses

import pytest

from jaxlib_icml.training.config import (
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    differences,
    updated,
    with_preset,
)
from jaxlib_icml.training.optimizers import learning_rate_at


def test_tables_nest_and_round_trip():
    config = updated(with_preset("tiny-dense"), {"steps": 7, "model": {"width": 96}, "optimizer": {"learning_rate": 1}})
    assert (config.steps, config.model.width, config.optimizer.learning_rate) == (7, 96, 1.0)
    assert updated(TrainConfig(), dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 1}, "stepz: unknown key; did you mean steps"),
        ({"model": {"widht": 1}}, r"model.widht: unknown key; did you mean width"),
        ({"model": 3}, "model: must be a table"),
        ({"steps": "ten"}, "steps: must be int"),
        ({"steps": True}, "steps: must be int"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name: must be one of olion, adamw"),
        ({"optimizer": {"learning_rate": -1.0}}, "learning_rate"),
        ({"optimizer": {"learning_rate": float("nan")}}, "learning_rate"),
        ({"optimizer": {"final_fraction": 2.0}}, "final_fraction"),
        ({"optimizer": {"clip_norm": 0.0}}, "clip_norm"),
        ({"steps": 0}, "steps"),
        ({"minutes": 0.0}, "minutes"),
        ({"steps": 1, "minutes": 1.0}, "steps, minutes"),
        ({"batch_size": 6, "accumulation_steps": 4}, "accumulation_steps"),
        ({"tokenizer": {"vocab_size": 10}}, "vocab_size"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        updated(TrainConfig(), values)


def test_only_how_long_how_fast_and_where_may_change_on_resume():
    base = TrainConfig(steps=5)
    faster = updated(base, {"steps": 9, "optimizer": {"learning_rate": 1.0}, "mesh": {"data": 1}, "run_dir": "x"})
    assert differences(base, faster) == []
    other = updated(base, {"model": {"width": 96, "num_heads": 2}, "tokenizer": {"vocab_size": 300}})
    assert differences(base, other) == [
        "model.width: 128 -> 96",
        "model.num_heads: 4 -> 2",
        "tokenizer.vocab_size: 2048 -> 300",
    ]


def test_default_run_is_limited_by_time():
    assert TrainConfig().time_limit == 300
    assert TrainConfig(minutes=15.0).time_limit == 900
    assert TrainConfig(steps=3).time_limit is None
    assert TokenizerConfig(kind="bytes", vocab_size=1).kind == "bytes"


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("constant", [1, 1, 1]), ("linear", [1, 0.55, 0.1]), ("cosine", [1, 0.55, 0.1])],
)
def test_schedules_run_from_the_peak_to_the_final_fraction(decay, expected):
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay=decay, final_fraction=0.1)
    got = [learning_rate_at(config, 100, progress) / 2 for progress in (0.0, 0.5, 1.0)]
    assert got == pytest.approx(expected)
    assert [learning_rate_at(config, step, 0.0) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert learning_rate_at(config, 9, 1.7) == learning_rate_at(config, 9, 1.0)
