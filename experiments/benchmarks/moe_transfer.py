"""Hyper-parameter transfer: the grouped Adam against `optax.adam`, and a whole sweep against one run for each rate."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import PairedTimes, paired_times
from experiments.context import Context
from experiments.protocol import at_most
from jaxlib_icml.lm import LMConfig, abstract_transformer
from jaxlib_icml.lm.parameterization import moe_shape
from jaxlib_icml.moe import BaseSpec, MoEShape, transfer_optimizer
from jaxlib_icml.moe.coord_check import lr_sweep, residual_moe_probe

SMALL = MoEShape(width=32, num_layers=2, expert_width=64, num_experts=4, num_active=1, head_dim=8, vocab_size=64)


def _update(tx: optax.GradientTransformation, params: Any) -> Callable[[], Any]:
    """One update of all parameters, in place."""
    step = jax.jit(lambda grads, state: tx.update(grads, state))
    state = tx.init(params)
    return lambda: step(params, state)


def _sweep_times(shape: MoEShape, rates: tuple[float, ...], steps: int, repeats: int, tick: Any) -> PairedTimes:
    """Compilation included: nothing may be kept from one round to the next."""
    base = BaseSpec(shape)
    batches = jax.random.randint(jax.random.key(0), (steps, 64, 9), 0, shape.vocab_size)

    def sweep(rates: tuple[float, ...]) -> Any:
        jax.clear_caches()
        probe = residual_moe_probe(base, shape)
        return lr_sweep(probe, lambda rate: transfer_optimizer(base, shape, schedule=rate), rates, batches)

    return paired_times(
        {"one program": lambda: sweep(rates), "a run each": lambda: [sweep((rate,)) for rate in rates]},
        repeats=repeats,
        on_round=tick,
    )


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=11, full=21)
    config = LMConfig(width=context.pick(smoke=64, laptop=256, full=512), num_experts=8, expert_width=512)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), nnx.state(abstract_transformer(config), nnx.Param))
    base = BaseSpec(moe_shape(config), learning_rate=1e-3)
    with context.progress("updates", total=repeats) as bar:
        updates = paired_times(
            {
                "grouped": _update(transfer_optimizer(base, base.shape), params),
                "optax": _update(optax.adam(1e-3, 0.9, 0.95, 1e-12), params),
            },
            repeats=repeats,
            on_round=lambda _: bar.advance(),
        )
    rounds = context.pick(smoke=1, laptop=3, full=5)
    rates = tuple(2.0**-k for k in range(2, context.pick(smoke=4, laptop=11, full=11)))
    started = time.perf_counter()
    with context.progress("sweeps", total=rounds) as bar:
        steps = context.pick(smoke=2, laptop=40, full=40)
        sweeps = _sweep_times(SMALL, rates, steps, rounds, lambda _: bar.advance())
    return BenchmarkOutcome(
        {
            "adam": updates.speedup("optax", over="grouped"),
            "sweep": sweeps.speedup("a run each", over="one program"),
        },
        {"updates": updates, "sweeps": sweeps},
        data={"rates": rates, "seconds of sweeps": time.perf_counter() - started},
    )


BENCHMARK = Benchmark(
    name="moe_transfer",
    title="Hyper-parameter transfer: grouped Adam against optax, a sweep against single runs",
    targets=(
        Target("adam", "one update: time of the grouped Adam over optax.adam", at_most(1.05)),
        Target("sweep", "nine rates, compilation included: time of one program over a run each", at_most(0.6)),
    ),
    run=run,
)
