"""Decoding from the two-pool cache: full heads against dense attention over gathered pages, compressed against full.

One step of decoding, float32, heads of 64. `full_dense`: 16 sequences of 64 to 2048 tokens, 9 query and 3 key heads,
all full; the other side gathers every page of every sequence and calls `jax.nn.dot_product_attention`.
`compressed_flat`: the same heads all compressed (16 sinks, 64 recent tokens), new tokens appended and attended to 16
times in a row, at length 8192 over length 512. `half` and `three_quarters`: 8 sequences of 2048 tokens, 16 query and 8
key heads, half and three quarters of them compressed over none. `fused_separate`: half of them compressed in one call
over two calls, of the full and of the compressed heads. `full_linear`: all full, time at 4096 tokens over time at 1024.
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
from kernels_pallas import ragged_decode_attention
from kernels_pallas.ragged_decode_attention import cache as caches

DIM, PAGE_SIZE, SINKS, RECENT = 64, 16, 16, 64
STEPS = 16


class _Case:
    """A filled cache, its page table and queries."""

    def __init__(self, kinds: tuple[bool, ...], group: int, lengths: np.ndarray, room: int = 0):
        rng = np.random.default_rng(0)
        batch = len(lengths)
        most = -(-(int(lengths.max()) + room) // PAGE_SIZE)
        self.kinds = kinds
        self.cache = caches.init_cache(
            head_kind=kinds,
            dim=DIM,
            batch=batch,
            num_pages=batch * most,
            page_size=PAGE_SIZE,
            n_sink=SINKS,
            n_recent=RECENT,
        )
        self.cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), self.cache)
        self.table = jnp.asarray(rng.permutation(batch * most).reshape(batch, most), jnp.int32)
        self.lengths = jnp.asarray(lengths, jnp.int32)
        self.query = jnp.asarray(rng.normal(size=(batch, 1, group * len(kinds), DIM)), jnp.float32)

    def attend(self) -> Callable[[], jax.Array]:
        return functools.partial(jax.jit(self._attend), self.query, self.cache, self.lengths, self.table)

    def _attend(self, query: jax.Array, cache: caches.PagedCache, lengths: jax.Array, table: jax.Array) -> jax.Array:
        return ragged_decode_attention(
            query, cache, lengths, table, head_kind=self.kinds, n_sink=SINKS, n_recent=RECENT
        )

    def decode(self) -> Callable[[], jax.Array]:
        """A chain of steps: every output is the next token's query, key and value."""

        def step(i: Any, carry: Any) -> Any:
            query, cache, lengths, table = carry
            new = query[:, :, : len(self.kinds)]
            cache = caches.append(
                cache, new, new, head_kind=self.kinds, lengths=lengths, page_table=table, n_sink=SINKS
            )
            return self._attend(query, cache, lengths + 1, table), cache, lengths + 1, table

        def chain(*carry: Any) -> jax.Array:
            return jax.lax.fori_loop(0, STEPS, step, carry)[0]

        return functools.partial(jax.jit(chain), self.query, self.cache, self.lengths, self.table)

    def dense(self) -> Callable[[], jax.Array]:
        """Every page gathered; keys and values apart, in the layout in which this was fastest."""
        key, value = jnp.split(self.cache.pages, 2, axis=-1)
        heads = len(self.kinds)

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, table: jax.Array) -> Any:
            key, value = (pages[table].swapaxes(2, 3).reshape(len(table), -1, heads, DIM) for pages in (key, value))
            return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)

        return functools.partial(jax.jit(attend), self.query, key, value, self.lengths, self.table)

    def of_kind(self, full: bool) -> "_Case":
        """The heads of one kind alone."""
        part = object.__new__(_Case)
        keep = np.flatnonzero(np.asarray(self.kinds) == full)
        part.kinds = (full,) * len(keep)
        part.cache = self.cache._replace(
            pages=self.cache.pages if full else self.cache.pages[:, :0],
            rings=self.cache.rings[:, :0] if full else self.cache.rings,
        )
        part.table, part.lengths = self.table, self.lengths
        heads = self.query.reshape(*self.query.shape[:2], len(self.kinds), -1, DIM)[:, :, keep]
        part.query = heads.reshape(*self.query.shape[:2], -1, DIM)
        return part


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=25, full=51)
    shrink = context.pick(smoke=16, laptop=1, full=1)
    times: dict[str, PairedTimes] = {}
    ratios: dict[str, Ratio] = {}

    def measure(name: str, functions: dict[str, Callable[[], Any]], calls: int = 1) -> PairedTimes:
        with context.progress(name, total=repeats) as bar:
            times[name] = paired_times(functions, repeats=repeats, calls=calls, on_round=lambda _: bar.advance())
        return times[name]

    lengths = np.random.default_rng(1).permutation(np.linspace(64, 2048, 16).astype(int)) // shrink
    case = _Case((True,) * 3, 3, lengths)
    ours, dense = case.attend(), case.dense()
    np.testing.assert_allclose(ours(), dense(), atol=1e-5)
    ratios["full_dense"] = measure("full", {"ours": ours, "dense": dense}).speedup("dense", over="ours")

    flat = {
        str(length): _Case((False,) * 3, 3, np.full(16, length // shrink), STEPS).decode() for length in (512, 8192)
    }
    ratios["compressed_flat"] = measure("compressed", flat).speedup("512", over="8192")

    def heads(full: int) -> _Case:
        return _Case((True,) * full + (False,) * (8 - full), 2, np.full(8, 2048 // shrink))

    half = heads(4)
    budgets = measure(
        "budgets",
        {
            "all full": heads(8).attend(),
            "half": half.attend(),
            "a quarter": heads(2).attend(),
            "half, full heads": half.of_kind(True).attend(),
            "half, compressed heads": half.of_kind(False).attend(),
        },
        calls=2,
    )
    ratios["half"] = budgets.speedup("all full", over="half")
    ratios["three_quarters"] = budgets.speedup("all full", over="a quarter")
    apart = np.add(budgets.seconds["half, full heads"], budgets.seconds["half, compressed heads"])
    both = PairedTimes({"fused": budgets.seconds["half"], "separate": tuple(apart.tolist())})
    ratios["fused_separate"] = both.speedup("separate", over="fused")

    linear = {str(n): _Case((True,) * 8, 2, np.full(8, n // shrink)).attend() for n in (1024, 4096)}
    ratios["full_linear"] = measure("linear", linear).speedup("1024", over="4096")
    settings = {"dim": DIM, "page size": PAGE_SIZE, "sinks": SINKS, "recent": RECENT, "lengths divided by": shrink}
    return BenchmarkOutcome(ratios, times, settings)


BENCHMARK = Benchmark(
    name="ragged_decode",
    title="Decoding from pages and rings against dense attention over gathered pages",
    targets=(
        Target(
            "full_dense", "all heads full, ragged lengths: time over dense attention to gathered pages", at_most(0.8)
        ),
        Target("compressed_flat", "all heads compressed, steps of decoding: length 8192 over length 512", at_most(1.3)),
        Target("half", "2048 tokens: time with half of the heads compressed over none", at_most(0.65)),
        Target("three_quarters", "2048 tokens: time with 3/4 of the heads compressed over none", at_most(0.45)),
        Target(
            "fused_separate", "2048 tokens, half compressed: one call over a call for each kind", at_most(1.0), "0.9"
        ),
        Target("full_linear", "all heads full: time at 4096 tokens over 1024", at_most(4.8)),
    ),
    run=run,
)
