"""Causal attention, forward + backward: ours, `jax.nn.dot_product_attention` and PyTorch's fused attention.

Two shapes, float32: `small`, 8 × 256 tokens, 8 heads of 32; `large`, 4 × 1024 tokens, 8 heads of 64. Each
also with packed sequences (`packed`: three documents a row; segment ids for ours, the equivalent Boolean mask
for the others). Temporary memory is what the compiler reports, for ours and jax.nn.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.peers import import_torch
from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import PairedTimes, Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_most
from kernels_pallas import causal_attention

SHAPES = {"small": (8, 256, 8, 32), "large": (4, 1024, 8, 64)}  # batch, seq, heads, dim
BOUNDS = {"small": 0.55, "large": 0.35}
DOCUMENTS = 3


def _inputs(shape: tuple[int, ...]) -> tuple[list[jax.Array], jax.Array]:
    """Returns query, key, value and the output's cotangent, and the segment ids."""
    arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
    batch, seq = shape[:2]
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(1, seq, (batch, DOCUMENTS - 1)), axis=1)
    return arrays, jnp.asarray(1 + (np.arange(seq) >= ends[:, :, None]).sum(axis=1), jnp.int32)


def _jax(
    attend: Callable[..., jax.Array], arrays: list[jax.Array], segment_ids: jax.Array | None
) -> tuple[Callable[[], Any], int]:
    """Returns forward + backward as a compiled program, and its temporary bytes."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, ids: jax.Array | None) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)
        return out, pull_back(g)

    compiled = jax.jit(both).lower(*arrays, segment_ids).compile()
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    return functools.partial(compiled, *arrays, segment_ids), temporary


def _ours(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
    return causal_attention(q, k, v, segment_ids=ids)


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
    mask = None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


def _torch(arrays: list[jax.Array], segment_ids: jax.Array | None) -> Callable[[], Any]:
    torch = import_torch()
    torch.set_num_threads(2)
    q, k, v, g = (torch.tensor(np.asarray(x)).transpose(1, 2) for x in arrays)
    for x in (q, k, v):
        x.requires_grad_()
    mask = None
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        mask = torch.tensor((ids[:, :, None] == ids[:, None, :])[:, None]).tril()

    def both() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return [x.numpy() for x in torch.autograd.grad(out, (q, k, v), g)]

    return both


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=15, full=41)
    times: dict[str, PairedTimes] = {}
    ratios: dict[str, Ratio] = {}
    temporary: dict[str, dict[str, int]] = {}
    for name, shape in SHAPES.items():
        shape = context.pick(smoke=(2, 40, 2, 8), laptop=shape, full=shape)
        for kind in ("causal", "packed"):
            arrays, ids = _inputs(shape)
            segment_ids = ids if kind == "packed" else None
            case = f"{name}_{kind}"
            ours, our_bytes = _jax(_ours, arrays, segment_ids)
            theirs, their_bytes = _jax(_jax_nn, arrays, segment_ids)
            torch = _torch(arrays, segment_ids)
            for a, b, c in zip(ours()[1], theirs()[1], torch(), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
                np.testing.assert_allclose(a, c.swapaxes(1, 2), atol=1e-4)
            temporary[case] = {"ours": our_bytes, "jax.nn": their_bytes}
            with context.progress(case, total=repeats) as bar:
                times[case] = paired_times(
                    {"ours": ours, "jax.nn": theirs, "torch": torch},
                    repeats=repeats,
                    on_round=lambda _, bar=bar: bar.advance(),  # type: ignore[misc]
                )
            # speedup(a, over=b) is time(b) / time(a).
            ratios[case] = times[case].speedup("jax.nn", over="ours")
            ratios[f"{case}_torch"] = times[case].speedup("torch", over="ours")
    return BenchmarkOutcome(ratios, times, data={"shapes": SHAPES, "temporary bytes": temporary})


def _targets() -> tuple[Target, ...]:
    targets = []
    for name, bound in BOUNDS.items():
        for kind in ("causal", "packed"):
            text = f"{name}, {kind}: time over"
            targets += [
                Target(f"{name}_{kind}", f"{text} jax.nn.dot_product_attention", at_most(bound)),
                Target(f"{name}_{kind}_torch", f"{text} PyTorch's fused attention", at_most(1.0)),
            ]
    return tuple(targets)


BENCHMARK = Benchmark(
    name="causal_attention",
    title="Causal attention, forward + backward, against jax.nn and PyTorch",
    targets=_targets(),
    run=run,
)
