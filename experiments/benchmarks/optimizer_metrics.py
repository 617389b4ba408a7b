"""What logging the optimizer's state of health costs a training run.

The model, batch and optimizer of `icml train` by default: GradientStabilizer and OLion on a small mixture of experts.
A call is `olion_run_metrics` with four matrices, a new quartet every time, its figures fetched. `call` compares one
call with one step; `overhead` times twenty steps with and without a call, the way the training loop makes it, and
spreads the difference over the hundred steps that a call serves: short stretches allow many rounds. `stabilizer` is
`stabilizer_run_metrics`, which is part of every step, as a program of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_most
from jaxlib_icml.lm import LMConfig
from jaxlib_icml.optim import StabilizerState, find_states, olion_run_metrics, stabilizer_run_metrics
from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.step import make_train_program

RUN = TrainConfig()
VOCAB = 2048


class _Training:
    """A run that goes on and on over the same batch."""

    def __init__(self, config: LMConfig):
        program = make_train_program(config, make_optimizer(RUN.optimizer), make_mesh())
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (RUN.batch_size, config.context_length + 1))
        self.batch = {
            "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
            "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        }
        self.state = program.init(jax.random.key(0))
        self.program_step = program.step
        self.calls = 0
        self.matrices = len(olion_run_metrics(self.state.opt_state, self.state.params, num_matrices=10**9).each)
        summary = jax.jit(lambda before, after: stabilizer_run_metrics(before, after).summary)
        scalars = jax.device_get(find_states(self.state.opt_state, StabilizerState)[0])  # apart from donated buffers
        self.stabilizer = lambda: summary(scalars, scalars)

    def step(self) -> float:
        """One step, its loss fetched."""
        self.state, metrics = self.program_step(self.state, self.batch, jnp.float32(1e-3))
        return float(metrics.loss)

    def call(self) -> dict[str, float]:
        """One look at the momentum."""
        figures = olion_run_metrics(self.state.opt_state, self.state.params, call=self.calls).summary
        self.calls += 1
        return {name: float(value) for name, value in figures.items()}

    def steps(self, number: int, with_call: bool) -> float:
        """A stretch of training, at most one call in it."""
        loss = 0.0
        for i in range(number):
            loss = self.step()
            if with_call and i == number - 1:
                self.call()
        return loss


def run(context: Context) -> BenchmarkOutcome:
    """Time single calls and steps, then stretches of steps."""
    small: dict[str, Any] = {"width": 32, "num_layers": 1, "context_length": 32}
    config = dataclasses.replace(RUN.model, vocab_size=VOCAB, **context.pick(smoke=small, laptop={}, full={}))
    training = _Training(config)
    every = RUN.diagnose_every
    stretch = context.pick(smoke=3, laptop=20, full=20)
    for _ in range(-(-training.matrices // 4)):  # compiles for every shape
        training.call()
    repeats = context.pick(smoke=3, laptop=41, full=81)
    single: dict[str, Callable[[], Any]] = {
        "step": training.step,
        "call": training.call,
        "stabilizer": training.stabilizer,
    }
    times = {"single": paired_times(single, repeats=repeats)}
    context.log(f"one call takes {times['single'].speedup('step', over='call')} steps; now {stretch} steps at a time")
    stretches: dict[str, Callable[[], Any]] = {
        "without": lambda: training.steps(stretch, False),
        "with": lambda: training.steps(stretch, True),
    }
    times["stretch"] = paired_times(stretches, repeats=context.pick(smoke=3, laptop=15, full=41), warmup=1)
    call = times["single"].speedup("step", over="call")
    measured = times["stretch"].speedup("without", over="with")
    overhead = Ratio(*(1 + (x - 1) * stretch / every for x in (measured.median, measured.lower, measured.upper)))
    return BenchmarkOutcome(
        {
            "call": call,
            "stabilizer": times["single"].speedup("step", over="stabilizer"),
            "overhead": overhead,
        },
        times,
        data={
            "matrices": training.matrices,
            "matrices_per_call": 4,
            "steps_per_call": every,
            "amortised_from_single_calls": 1 + call.median / every,
            "figures": training.call(),
        },
        notes=(
            f"{stretch} steps with a call take {measured.median:.3f} times those without; a call serves {every} steps.",
            f"From single calls, 1 + call/{every} is {1 + call.median / every:.4f}.",
        ),
    )


BENCHMARK = Benchmark(
    name="optimizer_metrics",
    title="Logging isotropy, signs and spikes of the optimizer during training (default run of icml train)",
    targets=(
        Target("call", "time of one call over time of one training step", at_most(2.0)),
        Target("stabilizer", "time of the stabilizer's figures over time of one training step", at_most(0.02)),
        Target(
            "overhead",
            "time of a hundred steps with a call over time without",
            at_most(1.02),
        ),
    ),
    run=run,
)
