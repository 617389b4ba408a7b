"""The shared runs of the optimizer experiments: data, schedule, training, loss scaling, summaries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.optim import byte_lm
from experiments.optim.byte_lm import LossScale, Model, Trainer

TEXT = np.arange(256, dtype=np.uint8)


def test_batches_are_windows_of_the_text_and_depend_on_the_seed_alone():
    batches = byte_lm.draw_batches(TEXT, 3, 5, 4, 16)
    assert batches.shape == (5, 4, 17)
    assert batches.dtype == np.uint8
    np.testing.assert_array_equal(np.diff(batches.astype(int), axis=-1), 1)
    np.testing.assert_array_equal(batches, byte_lm.draw_batches(TEXT, 3, 5, 4, 16))
    assert not np.array_equal(batches, byte_lm.draw_batches(TEXT, 4, 5, 4, 16))


def test_even_windows_reach_both_ends():
    windows = byte_lm.even_windows(TEXT, 5, 16)
    assert windows.shape == (5, 17)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 255
    np.testing.assert_array_equal(np.diff(windows.astype(int), axis=-1), 1)


def test_schedule_warms_up_over_a_tenth_and_ends_near_a_tenth():
    steps = 300
    shape = np.array([byte_lm.warmup_cosine(steps)(t) for t in range(steps)])
    np.testing.assert_allclose(shape[:30], np.arange(1, 31) / 30, rtol=1e-5)
    t = np.arange(29, steps)
    np.testing.assert_allclose(
        shape[29:], 0.1 + 0.45 * (1 + np.cos(np.pi * (t - 29) / (steps - 29))), rtol=1e-4, atol=1e-5
    )
    assert 0.1 <= shape[-1] < 0.101


def quadratic(params, windows):
    return 0.5 * jnp.sum((params["w"] - windows[:, 0].astype(jnp.float32)) ** 2)


TOY = Model(quadratic, lambda seed: {"w": jnp.zeros(2)})


def sgd(schedule, numbers):
    return optax.sgd(schedule)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_is_the_loop_that_it_says(segments, scaled):
    steps, rate = 8, 0.3
    batches = byte_lm.draw_batches(TEXT, 0, steps, 2, 1)
    held_out = byte_lm.draw_batches(TEXT, 1, 3, 2, 1)
    factors = np.ones(steps, np.float32)
    factors[5] = 10
    count = lambda state: state[-1].count  # noqa: E731
    trainer = Trainer(TOY, sgd, scaled=scaled, segments=segments, watch=count, probe=count)
    arguments = (TOY.init(0), batches, held_out, np.float32(rate), {"loss_factors": factors})
    result = trainer.compiled(arguments)(*arguments)

    w, losses, norms = np.zeros(2), [], []
    shape = byte_lm.warmup_cosine(steps)
    for t in range(steps):
        x = batches[t, :, 0].astype(float)
        losses.append(0.5 * np.sum((w - x) ** 2))
        gradient = factors[t] * (w - x)
        norms.append(np.linalg.norm(gradient))
        w = w - rate * float(shape(t)) * gradient
    validation = np.mean([0.5 * np.sum((w - x[:, 0]) ** 2) for x in held_out.astype(float)])
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(result["norms"], norms, rtol=1e-5)
    np.testing.assert_allclose(result["params"]["w"], w, rtol=1e-5)
    np.testing.assert_allclose(result["validation"], validation, rtol=1e-5)
    np.testing.assert_array_equal(result["watch"], np.arange(1, steps + 1))
    np.testing.assert_array_equal(result["probe"], steps // segments * np.arange(1, segments + 1))
    assert result["skipped"] == 0


def test_a_step_that_overflows_is_left_out():
    batches = byte_lm.draw_batches(TEXT, 0, 4, 2, 1)
    factors = np.array([1, 1e38, 1, 1], np.float32)  # times 2^15: infinite
    arguments = (TOY.init(0), batches, batches, np.float32(0.1))
    trainer = Trainer(TOY, sgd, scaled=True)
    result = trainer.compiled((*arguments, {"loss_factors": factors}))(*arguments, {"loss_factors": factors})
    assert result["skipped"] == 1
    w = np.zeros(2)
    # The optimizer's own count, and with it the schedule, stands still too.
    for count, t in enumerate((0, 2, 3)):
        w = w - 0.1 * float(byte_lm.warmup_cosine(4)(count)) * (w - batches[t, :, 0])
    np.testing.assert_allclose(result["params"]["w"], w, rtol=1e-5)


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    state, scales = LossScale.start(1024.0), []
    for finite in (True, False, True, True, True, False, False):
        state = state.next(jnp.bool_(finite), growth_interval=3)
        scales.append(float(state.scale))
    assert scales == [1024, 512, 512, 512, 1024, 512, 256]
    floor = LossScale.start(1.0).next(jnp.bool_(False))
    assert float(floor.scale) == 1.0


@pytest.mark.parametrize(
    ("losses", "tolerance", "width"),
    [
        ((1.0, 1.0, 1.0), 0.1, 2.0),  # flat: the whole grid
        ((3.0, 1.0, 2.0), 0.5, 0.75),  # 0.25 to the left, 0.5 to the right
        ((np.nan, 1.0, np.inf), 5.0, 0.0),  # nothing is assumed towards a run that failed
        ((np.nan,) * 3, 1.0, 0.0),
        ((1.0, 5.0, 1.05), 0.1, 0.025),  # the range around the best, not islands beyond
    ],
)
def test_stable_range(losses, tolerance, width):
    assert byte_lm.stable_decades((1e-3, 1e-2, 1e-1), losses, tolerance) == pytest.approx(width, abs=1e-6)


def test_divergence_is_nan_or_worse_than_the_start():
    start = np.array([5.5, 5.0])
    assert byte_lm.diverged({"validation": np.nan, "losses": start})
    assert byte_lm.diverged({"validation": 5.6, "losses": start})
    assert not byte_lm.diverged({"validation": 5.4, "losses": start})


def test_model_is_the_byte_model_and_its_untrained_loss_is_that_of_guessing():
    model = byte_lm.byte_model(byte_lm.SMOKE_MODEL)
    windows = byte_lm.draw_batches(TEXT, 0, 1, 4, 16)[0]
    loss = jax.jit(model.loss)(model.init(0), windows)
    assert abs(float(loss) - np.log(256)) < 0.05
