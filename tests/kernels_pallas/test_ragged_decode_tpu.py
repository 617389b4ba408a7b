"""Decoding attention on TPUs: the kernel interpreted on a CPU, and compiled for chips that are not there."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import aot, dispatch, ragged_decode_attention, testing
from kernels_pallas.ragged_decode_attention import pallas_tpu, tpu_blocks, tpu_kernel
from kernels_pallas.ragged_decode_attention.cache import init_cache
from kernels_pallas.ragged_decode_attention.tpu_blocks import Case, Config
from tests.kernels_pallas.ragged_decode_cases import KINDS, History, call

STATICS = ("kinds", "n_sink", "n_recent", "scale", "config", "interpret")
kernel = jax.jit(inspect.unwrap(pallas_tpu.ragged_decode_attention), static_argnames=STATICS)


def interpreted(history, cache, query, *, interpret=True, config=None, **budget):
    return kernel(
        query,
        cache,
        jnp.asarray(history.lengths),
        jnp.asarray(history.table) if any(history.kinds) else None,
        kinds=history.kinds,
        scale=history.dim**-0.5,
        config=config,
        interpret=interpret,
        **budget,
    )


@pytest.mark.parametrize(
    ("kinds", "rows", "config"),
    [
        ("mixed", 1, (2, 2)),  # shares begin in the middle of a sequence
        pytest.param("full", 2, (1, 3), marks=pytest.mark.slow),
        pytest.param("one", 1, (6, 1), marks=pytest.mark.slow),  # one block holds a sequence
        ("compressed", 3, (1, 2)),
    ],
)
def test_tpu_kernel_has_no_races_and_reads_nothing_else(kinds, rows, config):
    """Nor NaN where there is no token."""
    history = History(KINDS[kinds], [48, 0, 7, 17, 8], page_size=8)
    cache = history.empty(n_sink=2, n_recent=5, rows=rows)
    cache = cache._replace(pages=cache.pages + jnp.nan, rings=cache.rings + jnp.nan)
    cache = history.append(cache, 2, 0 * history.lengths, history.lengths)
    query = history.query(rows)
    with testing.race_free() as interpret:
        config = Config(*config)
        got = interpreted(history, cache, query, interpret=interpret, config=config, n_sink=2, n_recent=5)
        jax.block_until_ready(got)  # before races are looked for
    np.testing.assert_allclose(got, history.attention(query, 2, 5), atol=3e-6)


def test_a_wait_that_is_missing_would_be_seen(monkeypatch):
    monkeypatch.setattr(tpu_kernel, "_wait", lambda copies: None)
    history = History(KINDS["full"], [48, 7], page_size=8)
    cache = history.filled(n_sink=2, n_recent=5)
    options = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode="on_wait")
    config = Config(1, 1)
    got = interpreted(history, cache, history.query(), interpret=options, config=config, n_sink=2, n_recent=5)
    assert np.isnan(got).any()


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 48), min_size=4, max_size=4),
    shares=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**20),
)
def test_tpu_kernel_on_any_pages_and_lengths(lengths, shares, seed):
    history = History(KINDS["mixed"], lengths, page_size=8, seed=seed, group=4)
    cache = history.filled(n_sink=2, n_recent=5)
    query = history.query()
    got = interpreted(history, cache, query, config=Config(2, shares), n_sink=2, n_recent=5)
    np.testing.assert_allclose(got, history.attention(query, 2, 5), atol=3e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(jnp.float32, 3e-6, marks=pytest.mark.slow), (jnp.bfloat16, 2e-2)]
)
def test_tpu_kernel_with_int8(dtype, tolerance):
    history = History(KINDS["one"], [0, 130, 256], page_size=128, max_pages=2)
    cache = history.filled(n_sink=2, n_recent=5, dtype=jnp.int8)
    query = history.query(dtype=dtype)
    got = interpreted(history, cache, query, config=Config(1, 2), n_sink=2, n_recent=5)
    want = call(history, cache, query.astype(jnp.float32), "reference", n_sink=2, n_recent=5)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=tolerance)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (None, {}),
        ("query of float16", {"dtype": jnp.float16}),
        ("a cache of float16", {"pool": jnp.float16}),
        ("pages of 4 tokens (a multiple of 8 for float32)", {"page_size": 4}),
        ("pages of 8 tokens (a multiple of 16 for bfloat16)", {"pool": jnp.bfloat16}),
        ("pages of 64 tokens (a multiple of 128 for int8)", {"page_size": 64, "pool": jnp.int8}),
        ("a page table of 120000 entries", {"max_pages": 60_000}),
        ("bytes of VMEM for two pages and two rings", {"n_recent": 20_000}),
    ],
)
def test_what_the_tpu_kernel_takes(reason, changes):
    given = {"page_size": 8, "max_pages": 6, "pool": jnp.float32, "dtype": jnp.float32, "n_recent": 5} | changes

    def ask(query, cache, table):
        found.append(pallas_tpu.unsupported(query, cache, table, kinds=(True, False)))

    found = []
    cache = jax.eval_shape(
        lambda: init_cache(
            head_kind=(True, False),
            dim=64,
            batch=2,
            num_pages=9,
            page_size=given["page_size"],
            n_sink=1,
            n_recent=given["n_recent"],
            dtype=given["pool"],
        )
    )
    query = jax.ShapeDtypeStruct((2, 1, 4, 64), given["dtype"])
    jax.eval_shape(ask, query, cache, jax.ShapeDtypeStruct((2, given["max_pages"]), jnp.int32))
    assert found == [None] if reason is None else reason in found[0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    full=st.integers(0, 64),
    compressed=st.integers(0, 64),
    group=st.sampled_from([16, 32]),
    dim=st.sampled_from([64, 80, 128, 256]),
    pool=st.sampled_from(["float32", "bfloat16", "int8"]),
    page_size=st.sampled_from([16, 32, 128, 512]),
    max_pages=st.integers(1, 5000),
    slots=st.integers(1, 500),
)
def test_chosen_blocks_fit_the_memory_of_every_tpu(full, compressed, group, dim, pool, page_size, max_pages, slots):
    case = Case(8, full, compressed, group, dim, "bfloat16", pool, page_size, max_pages, slots)
    if case.vmem_bytes(Config(1, 1)) > 14 * 2**20:
        assert not pallas_tpu.candidates(case._asdict())
        return
    chosen = tpu_blocks.heuristic(case)
    assert case.vmem_bytes(chosen) <= 14 * 2**20
    assert 1 <= chosen.pages <= max(1, max_pages)
    assert len(pallas_tpu.candidates(case._asdict())) >= 2


def test_bad_config():
    history = History(KINDS["full"], [48, 7], page_size=8)
    cache = history.filled(n_sink=2, n_recent=5)
    with pytest.raises(ValueError, match=r"^config must have positive numbers"):
        interpreted(history, cache, history.query(), config=Config(0, 1), n_sink=2, n_recent=5)


def test_programs_for_every_platform_keep_the_kernel():
    history = History(KINDS["one"], [3, 24], page_size=8)
    cache = history.filled(n_sink=2, n_recent=5)
    run = functools.partial(ragged_decode_attention, head_kind=history.kinds, n_sink=2, n_recent=5)
    with dispatch.for_every_platform():
        args = (history.query(), cache, jnp.asarray(history.lengths), jnp.asarray(history.table))
        assert "platform_index" in str(jax.make_jaxpr(run)(*args))


AOT_CASES = {
    # kinds, group, dim, rows, pool, query, page size, recent tokens
    "full": ((True,) * 3, 3, 64, 1, "float32", "float32", 16, 64),
    "mixed": (KINDS["mixed"], 2, 64, 1, "bfloat16", "bfloat16", 16, 64),
    "rows": (KINDS["mixed"], 2, 128, 3, "bfloat16", "bfloat16", 32, 64),
    "odd ring": (KINDS["mixed"], 4, 80, 1, "bfloat16", "bfloat16", 16, 55),
    "int8": (KINDS["mixed"], 8, 128, 1, "int8", "bfloat16", 128, 64),
    "int8, float32": (KINDS["one"], 1, 64, 1, "int8", "float32", 128, 7),
    "compressed": ((False,) * 4, 1, 64, 1, "bfloat16", "float32", 16, 3),
    "many heads": ((True,) * 8 + (False,) * 24, 1, 128, 1, "bfloat16", "bfloat16", 16, 112),
    "large pages": ((True,) * 16, 1, 128, 1, "float32", "bfloat16", 256, 64),
    "near the limit": ((True,) * 64, 1, 128, 1, "bfloat16", "bfloat16", 16, 64),
    "long rings": ((True,) * 2 + (False,) * 2, 1, 128, 1, "bfloat16", "bfloat16", 16, 2000),
}


@pytest.mark.aot
@pytest.mark.parametrize("chip", [*aot.TPUS, "h100"])
@pytest.mark.parametrize("name", AOT_CASES)
def test_none_compiles_to_the_kernel(chip, name):
    kinds, group, dim, rows, pool, dtype, page_size, n_recent = AOT_CASES[name]
    batch = 16
    cache = jax.eval_shape(
        lambda: init_cache(
            head_kind=kinds,
            dim=dim,
            batch=batch,
            num_pages=512,
            page_size=page_size,
            n_sink=16,
            n_recent=n_recent,
            rows=rows,
            dtype=pool,
        )
    )
    args = (
        jax.ShapeDtypeStruct((batch, rows, group * len(kinds), dim), dtype),
        cache,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, 3900), jnp.int32),
    )
    run = functools.partial(ragged_decode_attention, head_kind=kinds, n_sink=16, n_recent=n_recent)
    text = aot.compile_for(chip, run, *args).as_text()
    assert ("tpu_custom_call" in text) == (chip in aot.TPUS)
