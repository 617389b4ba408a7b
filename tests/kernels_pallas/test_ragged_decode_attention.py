"""Decoding attention over pages and rings, against attention in float64 over each sequence's true history."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import UnsupportedError, ragged_decode_attention, supported
from kernels_pallas.ragged_decode_attention import cache as caches
from kernels_pallas.ragged_decode_attention import xla
from kernels_pallas.ragged_decode_attention.cache import PagedCache, init_cache, ring_positions
from tests.kernels_pallas.ragged_decode_cases import DIM, KINDS, History, append, attend, call, normal


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 24), min_size=3, max_size=3), seed=st.integers(0, 2**20))
def test_any_pages_and_lengths(kinds, implementation, lengths, seed):
    history = History(kinds, lengths, seed=seed)
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    got = call(history, cache, query, implementation, n_sink=2, n_recent=5)
    np.testing.assert_allclose(got, history.attention(query, 2, 5), atol=2e-6)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 3, 16, 50]),
    group=st.sampled_from([1, 4, 8]),
    n_sink=st.integers(0, 3),
    n_recent=st.integers(1, 30),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_any_sizes(kinds, page_size, group, n_sink, n_recent, rows, seed):
    max_pages = 100 // page_size + 1
    most = page_size * max_pages
    lengths = np.random.default_rng(seed).integers(0, most + 1, 4)
    history = History(kinds, lengths, page_size=page_size, max_pages=max_pages, group=group, seed=seed)
    cache = history.filled(n_sink=n_sink, n_recent=n_recent, rows=rows)
    query = history.query(rows)
    want = history.attention(query, n_sink, n_recent)
    for implementation in ("reference", "xla"):
        got = call(history, cache, query, implementation, n_sink=n_sink, n_recent=n_recent)
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_lengths_at_the_borders_of_pages_and_blocks(implementation):
    """Pages of 16 make blocks of 128 in the loop of "xla"."""
    assert xla.BLOCK == 128
    lengths = [0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 288]
    history = History((True, False), lengths, page_size=16, max_pages=18)
    cache = history.filled(n_sink=3, n_recent=16)
    query = history.query()
    got = call(history, cache, query, implementation, n_sink=3, n_recent=16)
    assert not np.asarray(got[0]).any()
    np.testing.assert_allclose(got, history.attention(query, 3, 16), atol=2e-6)


def test_300_steps_of_decoding_with_the_ring_going_round():
    """Token by token, unequal lengths, as sheets of the serving method ask."""
    kinds, n_sink, n_recent, steps = KINDS["mixed"], 2, 7, 300
    start = np.asarray([0, 3, 50, 117])
    history = History(kinds, start + steps, page_size=8, max_pages=54)
    cache = history.empty(n_sink=n_sink, n_recent=n_recent)
    cache = history.append(cache, n_sink, 0 * start, start)
    queries = jnp.asarray(normal(history.rng, steps, 4, 1, 8, DIM))
    at = (start[:, None] + np.arange(steps))[..., None, None]
    tokens = [jnp.asarray(np.moveaxis(np.take_along_axis(x, at, axis=1), 1, 0)) for x in (history.key, history.value)]
    table = jnp.asarray(history.table)

    @jax.jit
    def decode(cache):
        def step(carry, xs):
            cache, lengths = carry
            query, key, value = xs
            cache = caches.append(
                cache,
                key[:, None],
                value[:, None],
                head_kind=kinds,
                lengths=lengths,
                page_table=table,
                n_sink=n_sink,
            )
            lengths += 1
            out = ragged_decode_attention(
                query, cache, lengths, table, head_kind=kinds, n_sink=n_sink, n_recent=n_recent
            )
            return (cache, lengths), out

        return jax.lax.scan(step, (cache, jnp.asarray(start)), (queries, *tokens))[1]

    got = decode(cache)
    for i in (0, 1, 8, 9, 100, 298, 299):
        history.lengths = start + i + 1
        np.testing.assert_allclose(got[i], history.attention(queries[i], n_sink, n_recent), atol=3e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(0, 20), min_size=1, max_size=6), budget=st.sampled_from([(0, 1), (2, 7), (4, 3)]))
def test_rings_hold_exactly_sinks_and_recent_tokens(chunks, budget):
    n_sink, n_recent = budget
    slots = n_sink + n_recent
    cache = init_cache(head_kind=(False,), dim=1, batch=1, num_pages=1, page_size=1, n_sink=n_sink, n_recent=n_recent)
    length = 0
    for chunk in chunks:
        # Token t has key t and value -t; rows beyond the chunk's are not tokens.
        tokens = jnp.arange(length, length + 20.0)[None, :, None, None]
        cache = append(
            cache,
            tokens,
            -tokens,
            head_kind=(False,),
            lengths=jnp.asarray([length]),
            page_table=None,
            n_sink=n_sink,
            counts=jnp.asarray([chunk]),
        )
        length += chunk
    places = np.asarray(ring_positions(jnp.int32(length), jnp.arange(slots), n_sink, slots))
    wanted = set(range(min(length, n_sink))) | set(range(max(n_sink, length - n_recent), length))
    assert sorted(places[places >= 0]) == sorted(wanted)
    held = np.asarray(cache.rings[0, 0])
    np.testing.assert_array_equal(held[places >= 0], np.stack([places, -places], axis=1)[places >= 0])


def test_tokens_taken_back_leave_no_trace():
    """Three drafted tokens of which one is kept: what the others overwrote in the ring was out of sight."""
    history = History(KINDS["one"], [9, 22], max_pages=7)
    cache = history.filled(n_sink=1, n_recent=4, rows=3)
    lengths = history.lengths
    drafted = history.append(cache, 1, lengths, np.asarray([3, 3], np.int32))
    history.lengths = lengths + 3
    query = history.query(3)
    got = call(history, drafted, query, n_sink=1, n_recent=4)
    np.testing.assert_allclose(got, history.attention(query, 1, 4), atol=2e-6)
    history.lengths = lengths + 1
    history.key[np.arange(2), lengths + 1] = 7.0  # another token than was drafted
    again = history.append(drafted, 1, history.lengths, np.asarray([1, 1], np.int32))
    history.lengths = lengths + 2
    query = history.query()
    got = call(history, again, query, n_sink=1, n_recent=4)
    np.testing.assert_allclose(got, history.attention(query, 1, 4), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_int8(implementation):
    """Attention to the codes times their factors, in float64; the codes are within half a step of the tokens."""
    history = History(KINDS["mixed"], [0, 5, 24, 17], group=4)
    cache = history.filled(n_sink=2, n_recent=5, dtype=jnp.int8)
    rounded = []
    for x in (history.key, history.value):
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        codes = np.round(x / scale)
        rounded.append(codes.astype(np.float64) * scale)
        assert (np.abs(rounded[-1] - x) <= 0.5001 * scale).all()
    query = history.query()
    got = call(history, cache, query, implementation, n_sink=2, n_recent=5)
    want = history.attention(query, 2, 5, key=rounded[0], value=rounded[1])
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_int8_factors_of_odd_rows():
    x = jnp.asarray([[0.0, 0.0], [1e-3, -2e-3], [np.inf, 1.0], [np.nan, 1.0]])
    codes, scale = caches.quantized(x)
    back = np.asarray(codes * scale[:, None])
    np.testing.assert_allclose(back[:2], x[:2], atol=1e-5)
    assert np.isnan(back[2:]).any(axis=1).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
def test_sixteen_bits(dtype, pool):
    history = History(KINDS["one"], [3, 24, 16])
    history.key, history.value = (
        np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (history.key, history.value)
    )
    cache = history.filled(n_sink=2, n_recent=5, dtype=pool)
    query = history.query(dtype=dtype)
    got = call(history, cache, query, n_sink=2, n_recent=5)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), history.attention(query, 2, 5), atol=2e-2)


def test_scale():
    history = History(KINDS["one"], [3, 24, 16])
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    for implementation in ("reference", "xla"):
        got = ragged_decode_attention(
            query,
            cache,
            jnp.asarray(history.lengths),
            jnp.asarray(history.table),
            head_kind=history.kinds,
            n_sink=2,
            n_recent=5,
            scale=2.5,
            implementation=implementation,
        )
        np.testing.assert_allclose(got, history.attention(query, 2, 5, scale=2.5), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_what_is_not_a_token_may_be_nan(implementation):
    history = History(KINDS["mixed"], [0, 1, 6, 24])
    clean = history.filled(n_sink=2, n_recent=5)
    untouched = history.filled(n_sink=2, n_recent=5)._replace(
        pages=jnp.full_like(clean.pages, jnp.nan), rings=jnp.full_like(clean.rings, jnp.nan)
    )
    cache = history.append(untouched, 2, 0 * history.lengths, history.lengths)
    query = history.query()
    got = call(history, cache, query, implementation, n_sink=2, n_recent=5)
    np.testing.assert_array_equal(got, call(history, clean, query, implementation, n_sink=2, n_recent=5))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nan_in_a_query_is_not_hidden(implementation):
    history = History(KINDS["mixed"], [0, 1, 6, 24])
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query().at[2:].set(jnp.nan)
    got = np.asarray(call(history, cache, query, implementation, n_sink=2, n_recent=5))
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2:]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_the_loop_of_other_platforms(dtype):
    """All sequences at a time, as GPUs take it, is the loop over one sequence after the other that CPUs take."""
    history = History((True, True), [0, 1, 100, 319, 256, 257], page_size=16, max_pages=20)
    cache = history.filled(n_sink=0, n_recent=1, rows=2, dtype=dtype)
    garbage = jnp.full_like(cache.pages, jnp.nan if dtype == jnp.float32 else 7)
    cache = history.append(cache._replace(pages=garbage), 0, 0 * history.lengths, history.lengths)
    grouped = jnp.asarray(normal(history.rng, 6, 2, 4, DIM))
    q = jnp.concatenate([grouped, 0 * grouped], axis=-1)
    args = (q, cache, jnp.asarray(history.lengths), jnp.asarray(history.table))
    got, want = (jax.jit(functools.partial(f, rows=2))(*args) for f in (xla._all_together, xla._one_by_one))
    assert np.isfinite(want[1]).all()
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


def test_pages_beyond_a_sequence_are_not_asked_for():
    history = History(KINDS["mixed"], [0, 1, 8, 24])
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    want = call(history, cache, query, n_sink=2, n_recent=5)
    beyond = np.arange(6) >= -(-history.lengths[:, None] // 4)
    for garbage in (-1, 10**9):
        history.table = np.where(beyond, garbage, history.table).astype(np.int32)
        np.testing.assert_array_equal(call(history, cache, query, n_sink=2, n_recent=5), want)


def test_sequences_may_share_full_pages():
    history = History((True, False), [12, 10])
    history.key[1, :8], history.value[1, :8] = history.key[0, :8], history.value[0, :8]
    history.table[1, :2] = history.table[0, :2]
    cache = history.filled(n_sink=1, n_recent=3)
    query = history.query()
    got = call(history, cache, query, n_sink=1, n_recent=3)
    np.testing.assert_allclose(got, history.attention(query, 1, 3), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_what_does_not_fit_is_dropped_under_jit_and_an_error_outside(dtype):
    history = History((True, False), [24, 23], max_pages=6)
    cache = history.filled(n_sink=1, n_recent=3, dtype=dtype)
    two = history.append(cache, 1, history.lengths, np.asarray([2, 2], np.int32))
    one = history.append(cache, 1, history.lengths, np.asarray([0, 1], np.int32))
    chex.assert_trees_all_equal(two, one)
    history.table[1, 5] = -1
    chex.assert_trees_all_equal(history.append(cache, 1, history.lengths, np.asarray([0, 1], np.int32)), cache)
    token = jnp.ones((2, 1, 2, DIM))
    arguments = {"head_kind": (True, False), "n_sink": 1}
    with pytest.raises(ValueError, match=r"^lengths must be at most the 24 tokens"):
        caches.append(
            cache, token, token, lengths=jnp.asarray([24, 2]), page_table=jnp.asarray(history.table), **arguments
        )
    with pytest.raises(ValueError, match=r"^page_table must be between 0 and 13 where lengths reach, got -1"):
        caches.append(
            cache, token, token, lengths=jnp.asarray([3, 23]), page_table=jnp.asarray(history.table), **arguments
        )


@pytest.mark.parametrize(
    "pool", [pytest.param("own", marks=pytest.mark.slow), pytest.param("whole cache", marks=pytest.mark.slow), "shared"]
)
def test_vmap_is_more_sequences_and_more_pages(pool):
    """A pool of pages for each, one for all, or only other queries."""
    cases = [History(KINDS["one"], lengths, seed=i) for i, lengths in enumerate([(3, 24), (0, 17), (9, 10)])]
    args = [
        (h.query(), h.filled(n_sink=2, n_recent=5, dtype=jnp.int8), jnp.asarray(h.lengths), jnp.asarray(h.table))
        for h in cases
    ]
    run = functools.partial(attend, head_kind=KINDS["one"], n_sink=2, n_recent=5)
    first = args[0][1]
    axes = (0, 0, 0, 0)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *args)
    if pool == "shared":
        shared = {"pages": first.pages, "page_scales": first.page_scales}
        args = [(q, c._replace(**shared), n, t) for q, c, n, t in args]
        stacked, axes = (
            (stacked[0], stacked[1]._replace(**shared), *stacked[2:]),
            (0, PagedCache(None, 0, None, 0), 0, 0),
        )
    if pool == "whole cache":
        args = [(q, *args[0][1:]) for q, *_ in args]
        stacked, axes = (stacked[0], *args[0][1:]), (0, None, None, None)
    got = jax.jit(jax.vmap(run, in_axes=axes))(*stacked)
    np.testing.assert_allclose(got, jnp.stack([run(*a) for a in args]), atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sequences_over_two_devices(kind):
    history = History(KINDS["mixed"], [3, 24, 0, 17])
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    want = call(history, cache, query, n_sink=2, n_recent=5)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    args = (
        jax.device_put(query, split),
        PagedCache(jax.device_put(cache.pages, whole), jax.device_put(cache.rings, split)),
        jax.device_put(jnp.asarray(history.lengths), split),
        jax.device_put(jnp.asarray(history.table), split),
    )
    with jax.set_mesh(mesh):
        got = attend(*args, head_kind=history.kinds, n_sink=2, n_recent=5)
    assert got.sharding.spec[0] == "x"
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_inside_shard_map():
    """Every device has its own pool of pages, and its own page numbers."""
    history = History(KINDS["one"], [3, 24])
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    pages = jnp.concatenate([cache.pages, cache.pages])
    spec = P("x")
    local = jax.shard_map(
        lambda q, pages, rings, *rest: ragged_decode_attention(
            q, PagedCache(pages, rings), *rest, head_kind=KINDS["one"], n_sink=2, n_recent=5
        ),
        mesh=mesh,
        in_specs=(spec,) * 5,
        out_specs=spec,
    )
    got = jax.jit(local)(query, pages, cache.rings, jnp.asarray(history.lengths), jnp.asarray(history.table))
    np.testing.assert_allclose(got, history.attention(query, 2, 5), atol=2e-6)


def test_no_derivative():
    history = History(KINDS["one"], [3, 24])
    cache = history.filled(n_sink=2, n_recent=5)
    with pytest.raises(NotImplementedError, match="for inference"):
        jax.grad(lambda q: call(history, cache, q, n_sink=2, n_recent=5).sum())(history.query())


@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.int8])
def test_memory_does_not_follow_the_pool(dtype):
    """Neither as gathered pages nor as a pool converted to float32."""

    def temporary(num_pages, max_pages):
        cache = jax.eval_shape(
            lambda: init_cache(
                head_kind=(True, True),
                dim=64,
                batch=4,
                num_pages=num_pages,
                page_size=16,
                n_sink=1,
                n_recent=1,
                dtype=dtype,
            )
        )
        args = (
            jax.ShapeDtypeStruct((4, 1, 4, 64), jnp.float32),
            cache,
            jax.ShapeDtypeStruct((4,), jnp.int32),
            jax.ShapeDtypeStruct((4, max_pages), jnp.int32),
        )
        compiled = attend.lower(*args, head_kind=(True, True), n_sink=1, n_recent=1).compile()
        return compiled.memory_analysis().temp_size_in_bytes, cache.num_bytes

    small, _ = temporary(256, 64)
    large, pool = temporary(4096, 1024)
    assert large - small < 0.01 * pool


def test_compressed_heads_take_a_constant():
    one, many = (
        init_cache(head_kind=(False, True), dim=8, batch=2, num_pages=n, page_size=4, n_sink=2, n_recent=6)
        for n in (1, 100)
    )
    assert many.num_bytes - one.num_bytes == 99 * 4 * 2 * 8 * 4  # of the full head alone
    assert one.rings.shape == (2, 1, 8, 16)


def test_dispatch():
    history = History(KINDS["one"], [3, 24])
    cache = history.filled(n_sink=2, n_recent=5)
    args = (history.query(), cache, jnp.asarray(history.lengths), jnp.asarray(history.table))
    reasons = supported(ragged_decode_attention, *args, head_kind=history.kinds, n_sink=2, n_recent=5)
    assert reasons["reference"] is reasons["xla"] is None
    assert "needs a TPU, running on cpu" in reasons["pallas_tpu"]
    with pytest.raises(UnsupportedError, match="pallas_gpu"):
        ragged_decode_attention(
            *args, head_kind=history.kinds, n_sink=2, n_recent=5, implementation=("pallas_gpu", "pallas_tpu")
        )


def bad(**changes):
    history = History((True, False), [3, 24])
    cache = changes.pop("cache", lambda cache: cache)(history.filled(n_sink=2, n_recent=5))
    given = {
        "query": history.query(),
        "lengths": jnp.asarray(history.lengths),
        "page_table": jnp.asarray(history.table),
        "head_kind": (True, False),
        "n_sink": 2,
        "n_recent": 5,
    } | changes
    return inspect.unwrap(ragged_decode_attention)(cache=cache, **given)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("query must be a non-empty", {"query": jnp.zeros((2, 4, 8))}),
        ("query must be float32", {"query": jnp.zeros((2, 1, 4, 8), jnp.int32)}),
        ("head_kind must have a length that divides", {"query": jnp.zeros((2, 1, 3, 8))}),
        ("head_kind must have a bool", {"head_kind": (1, 0)}),
        ("head_kind must have a bool", {"head_kind": ()}),
        (r"cache\.pages must have shape \(pages, 2, page_size, 16\)", {"head_kind": (True, True)}),
        (r"cache\.pages must have shape", {"query": jnp.zeros((2, 1, 4, 16))}),
        (r"cache\.rings must have shape \(3, 1", {"query": jnp.zeros((3, 1, 4, 8))}),
        (r"cache\.rings must have n_sink \+ n_recent \+ rows - 1 = 8 slots", {"n_sink": 3}),
        (r"cache\.rings must have n_sink .* 8 slots", {"query": jnp.zeros((2, 2, 4, 8))}),
        (r"cache\.rings must have the dtype", {"cache": lambda c: c._replace(rings=c.rings.astype(jnp.bfloat16))}),
        (
            r"cache\.page_scales must be given for int8",
            {"cache": lambda c: jax.tree.map(lambda x: x.astype("int8"), c)},
        ),
        (
            r"cache\.ring_scales must be given for int8",
            {"cache": lambda c: c._replace(ring_scales=jnp.ones((2, 1, 2, 7)))},
        ),
        ("n_sink must be at least 0", {"n_sink": -1}),
        ("n_recent must be at least 1", {"n_recent": 0}),
        ("scale must be positive", {"scale": 0.0}),
        ("lengths must have shape", {"lengths": jnp.zeros(3, jnp.int32)}),
        ("lengths must be integers", {"lengths": jnp.zeros(2)}),
        ("lengths must be at least 0, got -1", {"lengths": jnp.asarray([-1, 3])}),
        ("lengths must be at most the 24 tokens .* got 25", {"lengths": jnp.asarray([25, 3])}),
        ("page_table must be given", {"page_table": None}),
        ("page_table must have shape", {"page_table": jnp.zeros((3, 6), jnp.int32)}),
        ("page_table must be integers", {"page_table": jnp.zeros((2, 6))}),
        (
            "page_table must be between 0 and 13 .* got 0 to 14",
            {"page_table": jnp.zeros((2, 6), jnp.int32).at[1, 5].set(14)},
        ),
    ],
)
def test_bad_inputs(message, changes):
    with pytest.raises(ValueError, match=f"^{message}"):
        bad(**changes)


def test_head_kind_is_static():
    with pytest.raises(ValueError, match=r"^head_kind must be static"):
        jax.jit(lambda kinds: bad(head_kind=kinds))(jnp.asarray([True, False]))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("key must have shape", {"key": jnp.zeros((2, 1, 3, 8))}),
        (
            "key must be floating point",
            {"key": jnp.zeros((2, 1, 2, 8), jnp.int32), "value": jnp.zeros((2, 1, 2, 8), jnp.int32)},
        ),
        ("value must have key's shape", {"value": jnp.zeros((2, 2, 2, 8))}),
        ("n_sink must be between 0 and 6", {"n_sink": 7}),
        ("counts must be between 0 and the 1 rows, got 0 to 2", {"counts": jnp.asarray([0, 2])}),
        ("lengths must be at least 0", {"lengths": jnp.asarray([0, -2])}),
    ],
)
def test_bad_tokens(message, changes):
    history = History((True, False), [3, 23])
    given = {
        "key": jnp.zeros((2, 1, 2, 8)),
        "value": jnp.zeros((2, 1, 2, 8)),
        "lengths": jnp.asarray(history.lengths),
        "page_table": jnp.asarray(history.table),
        "head_kind": (True, False),
        "n_sink": 2,
    } | changes
    with pytest.raises(ValueError, match=f"^{message}"):
        inspect.unwrap(caches.append)(history.filled(n_sink=2, n_recent=5), **given)


@pytest.mark.parametrize(
    ("name", "value"), [("dim", 0), ("batch", 0), ("num_pages", 0), ("page_size", 0), ("rows", 0), ("dtype", jnp.int32)]
)
def test_bad_sizes(name, value):
    sizes = {"dim": 8, "batch": 2, "num_pages": 3, "page_size": 4} | {name: value}
    with pytest.raises(ValueError, match=f"^{name} must be"):
        init_cache(head_kind=(True,), n_sink=1, n_recent=1, **sizes)
