"""Sliding-window attention against float64 formulas, and what must hold around it."""

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

from kernels_pallas import UnsupportedError, causal_attention, sliding_window_attention
from tests.kernels_pallas.attention_cases import (
    assert_matches,
    formulas,
    make_inputs,
    partial,
    random_segments,
    value_and_grads,
    window_visible,
)

EVERYWHERE = ("reference", "xla")

# (batch, seq, heads, kv_heads, dim, window, sinks): one token; windows of one token, of less than a block, of several
# blocks and longer than the sequence; one to eight query heads per key head; no multiple of anything.
CASES = (
    (2, 1, 4, 2, 32, 1, 1),
    (1, 37, 8, 1, 64, 5, 0),
    (2, 130, 2, 2, 80, 1, 3),
    (1, 150, 4, 1, 128, 64, 4),
    (1, 213, 4, 4, 32, 100, 0),
    (1, 90, 2, 1, 16, 500, 2),
)


def positions_of(batch, rows, first=0):
    return np.broadcast_to(first + np.arange(rows), (batch, rows))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_matches_formulas(case, segmented, implementation):
    batch, seq, heads, kv_heads, dim, window, sinks = case
    inputs = make_inputs(seq, seq, heads, kv_heads, dim, batch=batch)
    ids = random_segments(batch, seq) if segmented else None
    attend = partial(
        sliding_window_attention, window=window, sinks=sinks, segment_ids=ids, implementation=implementation
    )
    visible = window_visible(positions_of(batch, seq), seq, window, sinks, ids)
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, visible))


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
def test_a_later_chunk_of_the_sequence(implementation, segmented):
    inputs = make_inputs(70, 200, 4, 2, 16, batch=2)
    ids = random_segments(2, 200) if segmented else None
    positions = jnp.array([[130], [3]]) + jnp.arange(70)
    attend = partial(
        sliding_window_attention,
        window=40,
        sinks=3,
        q_positions=positions,
        segment_ids=ids,
        implementation=implementation,
    )
    visible = window_visible(positions, 200, 40, 3, ids)
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, visible))


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 140), st.integers(1, 160), st.integers(0, 5), st.booleans(), st.integers(0, 2**20))
def test_any_window(seq, window, sinks, segmented, seed):
    inputs = make_inputs(seq, seq, 2, 1, 16, seed=seed)
    ids = random_segments(1, seq, seed) if segmented else None
    attend = partial(sliding_window_attention, window=window, sinks=sinks, segment_ids=ids, implementation="xla")
    visible = window_visible(positions_of(1, seq), seq, window, sinks, ids)
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, visible))


def test_equals_jax_nn():
    q, k, v, _ = make_inputs(300, 300, 4, 4, 64)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(49, 0))
    np.testing.assert_allclose(jax.jit(partial(sliding_window_attention, window=50))(q, k, v), want, atol=2e-6)


def test_a_window_of_everything_is_causal_attention():
    inputs = make_inputs(150, 150, 4, 2, 32)
    got = value_and_grads(partial(sliding_window_attention, window=150))(*inputs)
    want = value_and_grads(causal_attention)(*inputs)
    chex.assert_trees_all_close(got, want, atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(dtype):
    inputs = make_inputs(150, 150, 2, 1, 32, dtype=dtype)
    got = value_and_grads(partial(sliding_window_attention, window=20, sinks=2))(*inputs)
    assert all(x.dtype == dtype for x in got)
    assert_matches(got, formulas(*inputs, window_visible(positions_of(1, 150), 150, 20, 2)), 2e-2, 2e-2)


def test_large_scores_stay_finite():
    q, k, v, g = make_inputs(150, 150, 2, 1, 32)
    inputs = (100.0 * q, 10.0 * k, v, g)
    got = value_and_grads(partial(sliding_window_attention, window=30, sinks=2))(*inputs)
    assert_matches(got, formulas(*inputs, window_visible(positions_of(1, 150), 150, 30, 2)), 2e-3, 2e-3)


def test_changing_what_is_out_of_sight_changes_nothing():
    q, k, v, g = make_inputs(150, 150, 2, 1, 32)
    attend = value_and_grads(partial(sliding_window_attention, window=20))
    before = attend(q, k, v, g)[0]
    after = attend(q, *(x.at[:, 70].add(1.0) for x in (k, v)), g)[0]
    changed = np.flatnonzero(np.abs(before - after).max(axis=(0, 2, 3)))
    np.testing.assert_array_equal(changed, np.arange(70, 90))


def test_vmap_equals_a_loop():
    q, k, v, g = (
        jnp.stack(x) for x in zip(*(make_inputs(40, 40, 4, 2, 16, batch=2, seed=i) for i in range(3)), strict=True)
    )
    ids = random_segments(2, 40)

    def one(q, k, v, g):
        return value_and_grads(partial(sliding_window_attention, window=9, segment_ids=ids), jit=False)(q, k, v, g)

    batched = jax.jit(jax.vmap(one, in_axes=(0, None, 0, 0)))(q, k[0], v, g)
    looped = [jax.jit(one)(q[i], k[0], v[i], g[i]) for i in range(3)]
    chex.assert_trees_all_close(batched, tuple(map(jnp.stack, zip(*looped, strict=True))), atol=1e-6)


@pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse"])
def test_second_derivatives(order):
    q, k, v, g = make_inputs(12, 12, 2, 1, 16)

    def derivative(implementation):
        def loss(q, k, v):
            out = sliding_window_attention(q, k, v, window=4, sinks=1, implementation=implementation)
            return jnp.sum(g * jnp.sin(out))

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        if order == "forward over reverse":
            return jax.jit(lambda *qkv: jax.jvp(gradient, qkv, (q + 1, v, k))[1])(q, k, v)
        square = lambda *qkv: sum(jnp.sum(x**2) for x in gradient(*qkv))  # noqa: E731
        return jax.jit(jax.grad(square, argnums=(0, 1, 2)))(q, k, v)

    chex.assert_trees_all_close(derivative("xla"), derivative("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_sharded_over_two_devices(axis_type, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    inputs = make_inputs(60, 60, 4, 2, 16, batch=2)
    ids = random_segments(2, 60)

    def run(ids, *inputs):
        return value_and_grads(partial(sliding_window_attention, window=9, segment_ids=ids), jit=False)(*inputs)

    want = jax.jit(run)(ids, *inputs)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in inputs]
        ids = jax.device_put(ids, NamedSharding(mesh, P(*spec[:1])))
        compiled = jax.jit(run).lower(ids, *sharded).compile()
        got = compiled(ids, *sharded)
    assert "all-gather" not in compiled.as_text()
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, g = make_inputs(40, 40, 2, 2, 16, batch=2)
    local = value_and_grads(partial(sliding_window_attention, window=9, sinks=2), jit=False)
    want = jax.jit(local)(q, k, v, g)
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(q, k, v, g)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_is_linear_in_seq(backward):
    def temporary_bytes(seq):
        shape = jax.ShapeDtypeStruct((1, seq, 1, 32), jnp.float32)
        attend = partial(sliding_window_attention, window=100)
        function = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2)) if backward else attend
        return jax.jit(function).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    seqs = np.array([1024, 2048, 4096])
    assert np.polyfit(np.log(seqs), np.log([temporary_bytes(int(s)) for s in seqs]), 1)[0] < 1.15


def test_exported_program():
    q, k, v, _ = make_inputs(20, 20, 2, 1, 16)
    attend = jax.jit(partial(sliding_window_attention, window=5))
    chex.assert_trees_all_close(jax.export.export(attend)(q, k, v).call(q, k, v), attend(q, k, v), atol=1e-6)


def test_none_is_xla_on_cpu():
    q, k, v, _ = make_inputs(20, 20, 2, 1, 16)
    text = [
        jax.jit(partial(sliding_window_attention, window=5, implementation=i)).lower(q, k, v).compile().as_text()
        for i in (None, "xla")
    ]
    assert "custom-call" not in text[0]
    for name in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(UnsupportedError, match=f"{name}.*cpu"):
            sliding_window_attention(q, k, v, window=5, implementation=name)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", {"query": jnp.zeros((4, 2, 16))}),
        ("key", {"key": jnp.zeros((1, 4, 3, 16))}),
        ("key", {"key": jnp.zeros((1, 5, 1, 16)), "value": jnp.zeros((1, 5, 1, 16))}),
        ("value", {"value": jnp.zeros((1, 4, 1, 8))}),
        ("window", {"window": 0}),
        ("sinks", {"sinks": -1}),
        ("segment_ids", {"segment_ids": jnp.zeros((1, 4))}),
        ("segment_ids", {"segment_ids": jnp.zeros((1, 5), jnp.int32)}),
        ("q_positions", {"q_positions": jnp.zeros((1, 4), jnp.int32)}),
        ("q_positions", {"q_positions": jnp.arange(1, 5)[None]}),
        ("q_positions", {"q_positions": jnp.arange(5)[None]}),
        ("query", {"query": jnp.zeros((1, 5, 2, 16)), "q_positions": jnp.arange(5)[None]}),
        ("scale", {"scale": float("inf")}),
    ],
)
def test_bad_inputs(argument, change):
    good = {"query": jnp.zeros((1, 4, 2, 16)), "key": jnp.zeros((1, 4, 1, 16)), "window": 2}
    good["value"] = good["key"]
    with pytest.raises(ValueError, match=f"^{argument} must"):
        inspect.unwrap(sliding_window_attention)(**(good | change))


def test_packed_sequences_equal_separate_ones():
    lengths = (20, 90, 40)
    inputs = make_inputs(sum(lengths), sum(lengths), 2, 1, 32)
    ids = jnp.repeat(jnp.arange(1, 4), jnp.asarray(lengths), total_repeat_length=sum(lengths))[None]
    attend = functools.partial(sliding_window_attention, window=15, sinks=3)
    packed = value_and_grads(partial(attend, segment_ids=ids))(*inputs)
    start = 0
    for length in lengths:
        piece = [x[:, start : start + length] for x in inputs]
        separate = value_and_grads(partial(attend))(*piece)
        chex.assert_trees_all_close([x[:, start : start + length] for x in packed], list(separate), atol=3e-6)
        start += length
