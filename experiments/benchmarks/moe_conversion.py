"""Prism-MoE: grouping units against a loop over them, the converted block against the dense one, and a whole model."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import paired_times
from experiments.context import Context
from experiments.protocol import at_least, at_most
from jaxlib_icml.lm import LMConfig, Transformer
from jaxlib_icml.lm.conversion import convert_to_moe
from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.prism_moe import PrismConfig, balanced_kmeans
from jaxlib_icml.nn import FeedForward


def _python_kmeans(features: np.ndarray, k: int, weights: np.ndarray, iterations: int) -> np.ndarray:
    """The same grouping with NumPy, unit by unit."""
    units = len(features)
    order = np.argsort(-weights, kind="stable")
    reach = np.sqrt(weights / weights.mean())
    centres = [features[order[0]]]
    nearest = features @ centres[0]
    for _ in range(1, k):
        centres.append(features[np.argmax(reach * (1 - nearest))])
        nearest = np.maximum(nearest, features @ centres[-1])
    centre = np.stack(centres)
    groups = np.zeros(units, int)
    for _ in range(iterations):
        similarity, room = features @ centre.T, np.full(k, units // k)
        for unit in order:
            groups[unit] = np.argmax(np.where(room > 0, similarity[unit], -np.inf))
            room[groups[unit]] -= 1
        for group in range(k):
            mine = groups == group
            total = weights[mine] @ features[mine]
            centre[group] = total / max(np.linalg.norm(total), 1e-30)
    return np.argsort(groups, kind="stable").reshape(k, -1)


def _blocks(width: int, hidden: int, tokens: int) -> dict[str, Any]:
    """The dense block, and the one it becomes at 37.5 % active units."""
    prism = PrismConfig()
    shared, size = prism.sizes(hidden)
    dense = FeedForward(width, hidden, activation="gelu", rngs=nnx.Rngs(0))
    sparse = SparseMoE(
        width,
        size,
        prism.num_experts,
        prism.num_active,
        gate="cosine",
        activation="gelu",
        shared_expert_width=shared,
        path="blocked",
        rngs=nnx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(0), (tokens, width))
    apply = {"dense": nnx.jit(lambda m, x: m(x)), "sparse": nnx.jit(lambda m, x: m(x)[0])}
    return {"dense": lambda: apply["dense"](dense, x), "sparse": lambda: apply["sparse"](sparse, x)}


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=7, full=15)
    units = context.pick(smoke=96, laptop=4096, full=4096) // 8 * 6  # what is left beside the shared part
    rng = np.random.default_rng(0)
    features = rng.standard_normal((units, 256)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    weights = rng.uniform(0.1, 1, units).astype(np.float32)
    ours = jnp.asarray(features), jnp.asarray(weights)
    with context.progress("grouping", total=repeats) as bar:
        grouping = paired_times(
            {
                "ours": lambda: balanced_kmeans(ours[0], 12, ours[1]),
                "loop": lambda: _python_kmeans(features, 12, weights, 8),
            },
            repeats=repeats,
            on_round=lambda _: bar.advance(),
        )
    width = context.pick(smoke=32, laptop=768, full=768)
    with context.progress("blocks", total=repeats) as bar:
        blocks = paired_times(
            _blocks(width, 4 * width, context.pick(smoke=64, laptop=4096, full=4096)),
            repeats=repeats,
            on_round=lambda _: bar.advance(),
        )
    layers, rows = context.pick(smoke=(1, 1), laptop=(12, 16), full=(12, 16))
    config = LMConfig(width=width, num_layers=layers, num_heads=4, mlp_width=4 * width, context_length=512)
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (rows, 512), 0, 257)
    with context.progress("conversion", total=layers) as bar:
        started = time.perf_counter()
        convert_to_moe(state, config, tokens, on_layer=lambda *_: bar.advance())
        seconds = time.perf_counter() - started
    return BenchmarkOutcome(
        {
            "kmeans": grouping.speedup("ours", over="loop"),
            "block": blocks.speedup("dense", over="sparse"),
        },
        {"grouping": grouping, "blocks": blocks},
        data={"units": units, "width": width, "seconds of conversion": seconds, "layers": layers, "tokens": rows * 512},
    )


BENCHMARK = Benchmark(
    name="moe_conversion",
    title="Prism-MoE: grouping units, and the converted block against the dense one",
    targets=(
        Target("kmeans", "grouping 3072 of 4096 units: speed over a loop over units", at_least(5.0)),
        Target("block", "4096 tokens, width 768, 37.5 % active: time over the dense block", at_most(0.6)),
    ),
    run=run,
)
