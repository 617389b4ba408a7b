"""Sliding-window and token-conditional attention against attention to everything.

On this machine, float32, one sequence of 8192 tokens, 4 heads of 64, a window of 256: against full causal attention in
blocks of 256 rows as one would write it in plain JAX, against our own `causal_attention` (blocks, and a backward pass
of its own), and against `jax.nn.dot_product_attention` with a local window. Chosen rows are spread at random.

For TPUs: the compiler's own cycle estimates (`kernels_pallas.static_report`, no measurements) of the Pallas kernels,
forward, one sequence of 4096 tokens, 4 heads of 128, bfloat16, against JAX's splash attention. They charge blocks of
keys that our kernels skip at run time, but leave out splash's arithmetic, which stands behind a flag in scalar memory
that the estimator reads as 0: splash is really slower than they say. On splash with a local mask the estimator ends its
process. They need the extra [aot] where this runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import PairedTimes, Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_most
from kernels_pallas import aot, causal_attention, sliding_window_attention, static_report, token_conditional_attention

HEADS, DIM, WINDOW = 4, 64, 256
TPU_SEQ, TPU_DIM = 4096, 128
_NO_COMPILER = aot.missing("v5e")


def blockwise_causal(q: jax.Array, k: jax.Array, v: jax.Array, block: int = 256) -> jax.Array:
    """Full causal attention in blocks of rows, in plain JAX; the backward pass recomputes the scores."""
    keys, values = (x.swapaxes(1, 2) for x in (k, v))
    block = min(block, q.shape[1])

    @jax.checkpoint
    def attend(i: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(q, i * block, block, 1).swapaxes(1, 2)
        scores = jnp.einsum("bhqd,bhkd->bhqk", rows, keys) * q.shape[-1] ** -0.5
        visible = i * block + jnp.arange(block)[:, None] >= jnp.arange(k.shape[1])
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), values)

    out = jax.lax.map(attend, jnp.arange(q.shape[1] // block))
    return out.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def _rows(seq: int, share: float) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(np.sort(rng.choice(seq, int(share * seq), replace=False))[None], jnp.int32)


def _compiled(attend: Callable[..., jax.Array], seq: int, backward: bool) -> Callable[[], Any]:
    arrays = [jax.random.normal(key, (1, seq, HEADS, DIM)) for key in jax.random.split(jax.random.key(0), 4)]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(g)

    given = arrays if backward else arrays[:3]
    return functools.partial(jax.jit(both if backward else attend).lower(*given).compile(), *given)


def _functions(seq: int) -> dict[str, Callable[..., jax.Array]]:
    window = functools.partial(sliding_window_attention, window=WINDOW)

    def routed(share: float) -> Callable[..., jax.Array]:
        idx = _rows(seq, share)
        return lambda q, k, v: token_conditional_attention(q, k, v, idx, window=WINDOW)

    return {
        "plain": blockwise_causal,
        "causal": causal_attention,
        "window": window,
        "rows 20 %": routed(0.2),
        "rows 10 %": routed(0.1),
        "jax.nn window": functools.partial(
            jax.nn.dot_product_attention, is_causal=True, local_window_size=(WINDOW - 1, 0)
        ),
    }


# Ratios: (id, what is timed, over what, passes).
_RATIOS = (
    ("window_forward", "window", "plain", "forward"),
    ("window_jax_nn", "window", "jax.nn window", "forward"),
    ("rows_forward", "rows 20 %", "plain", "forward"),
    ("rows_both", "rows 20 %", "plain", "both"),
    ("rows_forward_causal", "rows 20 %", "causal", "forward"),
    ("rows_both_causal", "rows 20 %", "causal", "both"),
    ("half_the_rows", "rows 10 %", "rows 20 %", "forward"),
)


def _cpu(context: Context) -> tuple[dict[str, Ratio], dict[str, PairedTimes]]:
    repeats = context.pick(smoke=1, laptop=11, full=31)
    seq = context.pick(smoke=512, laptop=8192, full=8192)
    times: dict[str, PairedTimes] = {}
    for passes in ("forward", "both"):
        functions = _functions(seq)
        if passes == "both":  # jax.nn would need gigabytes
            functions = {name: functions[name] for name in ("plain", "causal", "window", "rows 20 %", "rows 10 %")}
        compiled = {name: _compiled(f, seq, passes == "both") for name, f in functions.items()}
        with context.progress(passes, total=repeats) as bar:
            times[passes] = paired_times(compiled, repeats=repeats, on_round=lambda _, bar=bar: bar.advance())  # type: ignore[misc]
    lengths = {}
    for name, share in (("rows 20 %", 0.2), ("no rows", 0.0)):
        for length in (seq, 2 * seq):
            attend = functools.partial(_token_conditional, idx=_rows(length, share))
            lengths[f"{name}, {length}"] = _compiled(attend, length, False)
    with context.progress("lengths", total=repeats) as bar:
        times["lengths"] = paired_times(lengths, repeats=repeats, on_round=lambda _: bar.advance())
    # speedup(a, over=b) is time(b) / time(a).
    ratios = {id_: times[passes].speedup(over, over=name) for id_, name, over, passes in _RATIOS}
    for id_, name in (("twice_the_tokens", "rows 20 %"), ("twice_the_tokens_window", "no rows")):
        ratios[id_] = times["lengths"].speedup(f"{name}, {seq}", over=f"{name}, {2 * seq}")
    return ratios, times


def _token_conditional(q: jax.Array, k: jax.Array, v: jax.Array, idx: jax.Array) -> jax.Array:
    return token_conditional_attention(q, k, v, idx, window=WINDOW)


def tpu_program(which: str, seq: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A forward pass on a TPU and the shapes of its arguments: ours or JAX's splash attention."""
    shape = jax.ShapeDtypeStruct((1, seq, HEADS, TPU_DIM), jnp.bfloat16)
    if which == "splash causal":
        return _splash_causal(seq), (jax.ShapeDtypeStruct((HEADS, seq, TPU_DIM), jnp.bfloat16),) * 3
    if which == "window":
        return functools.partial(sliding_window_attention, window=WINDOW), (shape,) * 3
    from kernels_pallas import gathered_attention

    rows = seq if which == "all rows" else seq // 5
    query = jax.ShapeDtypeStruct((1, rows, HEADS, TPU_DIM), jnp.bfloat16)
    return gathered_attention, (query, shape, shape, jax.ShapeDtypeStruct((1, rows), jnp.int32))


def _splash_causal(seq: int) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.CausalMask((seq, seq))
    block = min(512, seq)
    sizes = splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * HEADS), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )


def _tpu(context: Context) -> tuple[dict[str, Ratio], dict[str, int]]:
    seq = context.pick(smoke=1024, laptop=TPU_SEQ, full=TPU_SEQ)
    names = ("window", "splash causal", "some rows", "all rows")
    programs = [static_report.Program("v5e", f"{__name__}:tpu_program", {"which": n, "seq": seq}) for n in names]
    found = static_report.estimated_cycles(programs)
    # The kernels only: what XLA adds around them is gathers and transposes, whose estimates leave out memory.
    cycles = {
        name: sum(count for operation, count in operations.items() if "attention" in operation or "splash" in operation)
        for name, operations in zip(names, found, strict=True)
    }
    ratio = lambda a, b: Ratio(a / b, a / b, a / b)  # noqa: E731
    both = cycles["some rows"] + cycles["window"]
    return {
        "tpu_window_splash_causal": ratio(cycles["window"], cycles["splash causal"]),
        "tpu_rows": ratio(both, cycles["splash causal"] + cycles["window"]),
        "tpu_fewer_rows": ratio(cycles["some rows"], cycles["all rows"]),
    }, cycles


def run(context: Context) -> BenchmarkOutcome:
    ratios, times = _cpu(context)
    data: dict[str, Any] = {"heads": HEADS, "dim": DIM, "window": WINDOW}
    notes: tuple[str, ...] = (
        "Ratios of TPU kernels are the compiler's static estimates; splash's leave out its arithmetic.",
    )
    if _NO_COMPILER:
        notes = (f"No estimates for TPUs: {_NO_COMPILER}",)
    else:
        tpu, data["estimated cycles, v5e"] = _tpu(context)
        ratios |= tpu
    return BenchmarkOutcome(ratios, times, data, notes)


def _targets() -> tuple[Target, ...]:
    targets = [
        Target("window_forward", "window, forward: time over plain causal attention", at_most(0.15)),
        Target("window_jax_nn", "window, forward: time over jax.nn with a local window", at_most(0.5)),
        Target("rows_forward", "20 % of the rows, forward: time over plain causal attention", at_most(0.40)),
        Target("rows_both", "20 % of the rows, forward + backward: time over plain causal attention", at_most(0.45)),
        Target("rows_forward_causal", "20 % of the rows, forward: time over our causal_attention", at_most(1.0)),
        Target("rows_both_causal", "20 % of the rows, forward + backward: over our causal_attention", at_most(1.0)),
        Target("half_the_rows", "forward: time of 10 % of the rows over that of 20 %", at_most(0.65)),
        Target("twice_the_tokens", "20 % of the rows, forward: time of twice the tokens over once", at_most(4.2)),
        Target("twice_the_tokens_window", "no rows, forward: time of twice the tokens over once", at_most(2.2)),
    ]
    if not _NO_COMPILER:
        targets += [
            Target("tpu_window_splash_causal", "v5e, window: static cycles over splash's causal mask", at_most(0.6)),
            Target("tpu_rows", "v5e, 20 % of the rows + window: over splash causal + window", at_most(0.45)),
            Target("tpu_fewer_rows", "v5e, gathered rows: static cycles of a fifth of them over all", at_most(0.30)),
        ]
    return tuple(targets)


BENCHMARK = Benchmark(
    name="sparse_attention",
    title="Sliding-window and token-conditional attention against attention to everything",
    targets=_targets(),
    run=run,
)
