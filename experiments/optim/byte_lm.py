"""The small byte language model that the optimizer experiments train, whole runs at a time.

Two pre-norm blocks of width 64 read 64 bytes of Python source. A run (all steps and the final validation) is one
compiled program with the learning rate as an argument, so that a sweep compiles once per optimizer; independent runs
share the cores. Every optimizer sees the same initial weights and the same batches for the same seed.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from experiments.context import Context
from jaxlib_icml.lm import LMConfig, Transformer
from jaxlib_icml.lm.loss import loss_fn
from jaxlib_icml.training.corpus import Document, load_corpus

MODEL = LMConfig(vocab_size=256, context_length=64, width=64, num_layers=2, num_heads=4, activation="gelu")
SMOKE_MODEL = replace(MODEL, context_length=16, width=16, num_layers=1, num_heads=2)

# Python's own language reference, as prose: kept out of the first text to serve as a second one.
PROSE = "pydoc_data/topics.py"

Params = Any
Schedule = Callable[[Any], Any]
Factory = Callable[[Schedule, Mapping[str, Any]], optax.GradientTransformation]
"""From a schedule and further (traced) numbers to an optimizer."""


class Text(NamedTuple):
    """Bytes to learn from and bytes held out, uint8."""

    train: np.ndarray
    held_out: np.ndarray


def source_text(context: Context) -> Text:
    """Returns the corpus of a run: Python's standard library, or the user's own data."""
    corpus = load_corpus(context.data)
    context.log(f"corpus: {corpus.description}")
    return Text(_join(corpus.train), _join(corpus.held_out))


def _join(documents: Sequence[Document]) -> np.ndarray:
    return np.frombuffer(b"\n".join(d.utf8 for d in documents if d.name != PROSE), np.uint8)


def draw_batches(text: np.ndarray, seed: int, steps: int, batch_size: int, context_length: int) -> np.ndarray:
    """Returns (steps, batch_size, context_length + 1) windows at random places of `text`, uint8."""
    starts = np.random.default_rng(seed).integers(0, len(text) - context_length, (steps, batch_size, 1))
    return text[starts + np.arange(context_length + 1)]


def even_windows(text: np.ndarray, count: int, context_length: int) -> np.ndarray:
    """Returns (count, context_length + 1) evenly spaced windows of `text`, uint8."""
    starts = np.linspace(0, len(text) - context_length - 1, count).astype(int)[:, None]
    return text[starts + np.arange(context_length + 1)]


def warmup_cosine(steps: int) -> Schedule:
    """Returns the schedule's shape: up over the first tenth of the steps, then a cosine down to 10% of the peak."""
    warmup = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(1 / warmup, 1.0, warmup - 1, steps, end_value=0.1)


class Model(NamedTuple):
    """A pure view: `loss(params, windows)` in nats per byte, and the initial parameters of a seed."""

    loss: Callable[[Params, jax.Array], jax.Array]
    init: Callable[[int], Params]


def byte_model(config: LMConfig = MODEL, alter: Callable[[Transformer], None] | None = None) -> Model:
    """Returns the model of `config`; `alter` may replace parts of the module before it is used."""

    def build(seed: int) -> tuple[Any, Params]:
        model = Transformer(config, rngs=nnx.Rngs(seed))
        if alter is not None:
            alter(model)
        graphdef, state = nnx.split(model)
        return graphdef, nnx.to_pure_dict(state)

    graphdef = build(0)[0]

    def loss(params: Params, windows: jax.Array) -> jax.Array:
        tokens = windows.astype(jnp.int32)
        return loss_fn(graphdef, nnx.State(params), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})[0]

    return Model(loss, lambda seed: build(seed)[1])


class LossScale(NamedTuple):
    """Dynamic loss scaling: half after an overflow, double after `growth_interval` steps without one."""

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def start(cls, scale: float = 2.0**15) -> "LossScale":
        """Returns the state before the first step."""
        return cls(jnp.float32(scale), jnp.int32(0))

    def next(self, finite: jax.Array, growth_interval: int = 50) -> "LossScale":
        """Returns the state after a step whose gradients were `finite` or not."""
        grow = self.good_steps + 1 >= growth_interval
        grown = jnp.where(grow, jnp.minimum(2 * self.scale, 2.0**24), self.scale)
        return LossScale(
            jnp.where(finite, grown, jnp.maximum(self.scale / 2, 1.0)),
            jnp.where(finite & ~grow, self.good_steps + 1, 0),
        )


@dataclass(frozen=True)
class Trainer:
    """How one optimizer trains; `run` is a pure function to be compiled.

    Attributes:
      model: What is trained.
      factory: Makes the optimizer.
      scaled: Multiply the loss by a dynamic scale and skip steps that overflow (half precision).
      unscales: Whether the optimizer itself takes scaled gradients, and the scale as `loss_scale`.
      watch: Small numbers to keep of the optimizer's state after every step.
      probe: Numbers to keep of the optimizer's state after each of `segments` parts of the run.
      segments: Number of parts.
      programs: What has been compiled so far, by the shapes of the arguments.
    """

    model: Model
    factory: Factory
    scaled: bool = False
    unscales: bool = False
    watch: Callable[[Any], Any] = lambda state: {}
    probe: Callable[[Any], Any] = lambda state: {}
    segments: int = 1
    programs: dict[str, Any] = field(default_factory=dict)

    def compiled(self, arguments: tuple[Any, ...]) -> Any:
        """Returns the compiled `run` for arguments of these shapes."""
        shapes = str(jax.tree.map(lambda x: (np.shape(x), str(np.asarray(x).dtype)), arguments))
        if shapes not in self.programs:
            self.programs[shapes] = jax.jit(self.run).lower(*arguments).compile()
        return self.programs[shapes]

    def run(
        self,
        params: Params,
        batches: jax.Array,
        held_out: jax.Array,
        learning_rate: jax.Array,
        numbers: Mapping[str, jax.Array],
    ) -> dict[str, Any]:
        """Trains from `params` over `batches` and validates.

        Args:
          params: Initial parameters.
          batches: (steps, batch, context + 1) windows.
          held_out: (chunks, batch, context + 1) windows for the validation loss.
          learning_rate: The peak of the schedule.
          numbers: Further numbers for the factory; `loss_factors` (steps,), if there, multiplies each step's loss.

        Returns:
          `losses` and raw gradient `norms` (steps,), `validation` (nats per byte), final `params`, and what `watch`
          (steps, ...) and `probe` (segments, ...) kept; `skipped`, the number of steps with non-finite gradients, which
          loss scaling leaves out.
        """
        steps = batches.shape[0]
        shape = warmup_cosine(steps)
        tx = optax.with_extra_args_support(self.factory(lambda count: learning_rate * shape(count), numbers))
        factors = numbers.get("loss_factors", jnp.ones(steps))

        def step(carry: Any, inputs: Any) -> Any:
            params, state, scaling = carry
            batch, factor = inputs
            scale = scaling.scale if self.scaled else jnp.float32(1)

            def objective(params: Params) -> tuple[jax.Array, jax.Array]:
                loss = self.model.loss(params, batch)
                return loss * factor * scale, loss

            (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(params)
            norm = optax.tree.norm(grads) / scale
            if self.scaled and not self.unscales:
                grads = jax.tree.map(lambda g: g / scale, grads)
            updates, new_state = tx.update(grads, state, params, loss_scale=scale)
            new = (optax.apply_updates(params, updates), new_state)
            if self.scaled:
                finite = jnp.isfinite(norm)
                new = jax.tree.map(partial(jnp.where, finite), new, (params, state))
                scaling = scaling.next(finite)
            return (*new, scaling), {"losses": loss, "norms": norm, "watch": self.watch(new[1])}

        def segment(carry: Any, inputs: Any) -> Any:
            carry, kept = lax.scan(step, carry, inputs)
            return carry, (kept, self.probe(carry[1]))

        split = jax.tree.map(lambda x: x.reshape(self.segments, -1, *x.shape[1:]), (batches, factors))
        start = (params, tx.init(params), LossScale.start())
        (params, _, _), (kept, probes) = lax.scan(segment, start, split)
        kept = jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), kept)
        validation = jnp.mean(lax.map(lambda windows: self.model.loss(params, windows), held_out))
        skipped = jnp.sum(~jnp.isfinite(kept["norms"]))
        return {**kept, "probe": probes, "validation": validation, "params": params, "skipped": skipped}


class Job(NamedTuple):
    """One run: which trainer, and the arguments of its `run`; those of one trainer have the same shapes."""

    trainer: str
    arguments: tuple[Any, ...]


def run_jobs(
    context: Context, description: str, trainers: Mapping[str, Trainer], jobs: Sequence[Job]
) -> list[dict[str, Any]]:
    """Runs all jobs, a few at a time, and returns their results (NumPy arrays) in order.

    A step of the small model keeps one core busy, not two: independent runs side by side finish sooner than one run
    spread over the cores. Results do not depend on how many run at a time.
    """
    firsts = {job.trainer: job.arguments for job in jobs}

    with (
        ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool,
        context.progress(description, len(jobs)) as phase,
    ):
        programs = pool.map(lambda name: trainers[name].compiled(firsts[name]), firsts)
        compiled = dict(zip(firsts, programs, strict=True))

        def run_one(job: Job) -> dict[str, Any]:
            result: dict[str, Any] = jax.tree.map(np.asarray, compiled[job.trainer](*job.arguments))
            return result

        results = []
        for result in pool.map(run_one, jobs):
            results.append(result)
            phase.advance(validation=float(result["validation"]))
        return results


def diverged(result: Mapping[str, Any]) -> bool:
    """Whether a run ended in NaN or above the loss it began with."""
    return not float(result["validation"]) <= float(result["losses"][0])


def finite_or_inf(values: Any) -> np.ndarray:
    """Returns an array in which every value that is not finite is infinite, so that it is never the best."""
    array = np.asarray(values, float)
    return np.where(np.isfinite(array), array, np.inf)


def stable_decades(rates: Sequence[float], losses: Any, tolerance: float) -> float:
    """Returns the width, in decades, of the range of rates around the best whose loss is within `tolerance` of it.

    Losses are interpolated between neighbouring rates on a logarithmic scale; beyond the grid nothing is assumed.

    >>> round(stable_decades((1e-3, 1e-2, 1e-1), (3.0, 2.0, 2.5), 0.25), 3)
    0.75
    """
    x, y = np.log10(rates), finite_or_inf(losses)
    if not np.any(np.isfinite(y)):
        return 0.0
    best = int(np.argmin(y))
    bound = y[best] + tolerance

    def reach(order: range) -> float:
        edge = x[best]
        for here, there in itertools.pairwise(order):
            if y[there] > bound:
                share = (bound - y[here]) / (y[there] - y[here])
                return float(x[here] + share * (x[there] - x[here])) if np.isfinite(y[there]) else float(x[here])
            edge = x[there]
        return float(edge)

    return reach(range(best, len(x))) - reach(range(best, -1, -1))
