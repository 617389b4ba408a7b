"""What logging the optimizer's state of health costs a training run.

The model, batch and optimizer of `icml train` by default: GradientStabilizer and OLion on a small mixture of experts.
A call is `olion_run_metrics` with four matrices, a new quartet every time, and `stabilizer_run_metrics`, with the
figures fetched. `call` compares one call with one step; `overhead` times the hundred steps between two calls with and
without a call, the way the training loop makes it.
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
        self.summary = jax.jit(lambda before, after: stabilizer_run_metrics(before, after).summary)

    def step(self) -> float:
        """One step, its loss fetched."""
        self.state, metrics = self.program_step(self.state, self.batch, jnp.float32(1e-3))
        return float(metrics.loss)

    def before(self) -> StabilizerState:
        """The stabilizer's scalars, kept from being donated."""
        return jax.device_get(find_states(self.state.opt_state, StabilizerState)[0])

    def call(self, before: StabilizerState | None = None) -> dict[str, float]:
        """One call of both functions."""
        before = self.before() if before is None else before
        figures = olion_run_metrics(self.state.opt_state, self.state.params, call=self.calls).summary
        figures = {**figures, **self.summary(before, find_states(self.state.opt_state, StabilizerState)[0])}
        self.calls += 1
        return {name: float(value) for name, value in figures.items()}

    def steps(self, number: int, with_call: bool) -> float:
        """A stretch of training, at most one call in it."""
        loss = 0.0
        for i in range(number):
            before = self.before() if with_call and i == number - 1 else None
            loss = self.step()
            if before is not None:
                self.call(before)
        return loss


def run(context: Context) -> BenchmarkOutcome:
    """Time single calls and steps, then stretches of steps."""
    small: dict[str, Any] = {"width": 32, "num_layers": 1, "context_length": 32}
    config = dataclasses.replace(RUN.model, vocab_size=VOCAB, **context.pick(smoke=small, laptop={}, full={}))
    training = _Training(config)
    every = context.pick(smoke=3, laptop=RUN.diagnose_every, full=RUN.diagnose_every)
    for _ in range(-(-training.matrices // 4)):  # compiles for every shape
        training.call()
    repeats = context.pick(smoke=3, laptop=41, full=81)
    single: dict[str, Callable[[], Any]] = {"step": training.step, "call": training.call}
    times = {"single": paired_times(single, repeats=repeats)}
    context.log(f"one call takes {times['single'].speedup('step', over='call')} steps; now {every} steps at a time")
    stretches: dict[str, Callable[[], Any]] = {
        "without": lambda: training.steps(every, False),
        "with": lambda: training.steps(every, True),
    }
    times["stretch"] = paired_times(stretches, repeats=context.pick(smoke=3, laptop=3, full=21), warmup=1)
    call = times["single"].speedup("step", over="call")
    amortised = Ratio(*(1 + x / every for x in (call.median, call.lower, call.upper)))
    return BenchmarkOutcome(
        {"call": call, "overhead": times["stretch"].speedup("without", over="with")},
        times,
        data={
            "matrices": training.matrices,
            "matrices_per_call": 4,
            "steps_per_call": every,
            "amortised_from_single_calls": amortised.median,
            "figures": training.call(),
        },
        notes=(f"A call after every {every} steps: 1 + call/{every} is {amortised.median:.4f} from single calls.",),
    )


BENCHMARK = Benchmark(
    name="optimizer_metrics",
    title="Logging isotropy, signs and spikes of the optimizer during training (default run of icml train)",
    targets=(
        Target("call", "time of one call over time of one training step", at_most(2.0)),
        Target(
            "overhead",
            "time of a hundred steps with a call over time without",
            at_most(1.02),
        ),
    ),
    run=run,
)
