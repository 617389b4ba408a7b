"""Token-conditional attention and its gathered half against float64 formulas, and what must hold around them."""

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

from kernels_pallas import UnsupportedError, gathered_attention, token_conditional_attention
from tests.kernels_pallas.attention_cases import (
    assert_matches,
    causal_visible,
    formulas,
    make_inputs,
    partial,
    random_rows,
    random_segments,
    value_and_grads,
    window_visible,
)

EVERYWHERE = ("reference", "xla")

# (batch, seq, chosen, heads, kv_heads, dim): one row; more rows than a block; more chunks of keys than one (512);
# one to eight query heads per key head; no multiple of anything.
CASES = (
    (2, 1, 1, 4, 2, 32),
    (1, 37, 9, 8, 1, 64),
    (2, 130, 100, 2, 2, 80),
    (1, 150, 40, 4, 1, 128),
    (1, 1100, 90, 2, 2, 16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_gathered_rows_match_formulas(case, segmented, implementation):
    batch, seq, rows, heads, kv_heads, dim = case
    inputs = make_inputs(rows, seq, heads, kv_heads, dim, batch=batch)
    ids = random_segments(batch, seq) if segmented else None
    positions = random_rows(batch, seq, rows)
    attend = partial(gathered_attention, positions, segment_ids=ids, implementation=implementation)
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, causal_visible(positions, seq, ids)))


def both_visible(idx, rows, seq, window, sinks=0, segment_ids=None, positions=None):
    batch = idx.shape[0]
    positions = np.broadcast_to(np.arange(rows), (batch, rows)) if positions is None else np.asarray(positions)
    visible = window_visible(positions, seq, window, sinks, segment_ids)
    everything = causal_visible(positions, seq, segment_ids)
    for b, row in enumerate(np.asarray(idx)):
        chosen = row[row < rows]
        visible[b, chosen] = everything[b, chosen]
    return visible


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_matches_formulas(case, segmented, implementation):
    batch, seq, rows, heads, kv_heads, dim = case
    inputs = make_inputs(seq, seq, heads, kv_heads, dim, batch=batch)
    ids = random_segments(batch, seq) if segmented else None
    idx = random_rows(batch, seq, rows)
    attend = partial(
        token_conditional_attention, idx, window=20, sinks=2, segment_ids=ids, implementation=implementation
    )
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, both_visible(idx, seq, seq, 20, 2, ids)))


def test_one_fifth_of_1024_rows():
    # The sheet's check 3: output within 1e-6 and gradients within 1e-5.
    inputs = make_inputs(1024, 1024, 2, 2, 64)
    rng = np.random.default_rng(0)
    idx = jnp.asarray(np.flatnonzero(rng.random(1024) < 0.2)[None], jnp.int32)
    got = value_and_grads(partial(token_conditional_attention, idx, window=128))(*inputs)
    want = formulas(*inputs, both_visible(idx, 1024, 1024, 128))
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    assert_matches(got, want, 1e-6, 1e-5)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 140), st.integers(0, 60), st.integers(1, 150), st.booleans(), st.integers(0, 2**20))
def test_any_rows(seq, rows, window, segmented, seed):
    inputs = make_inputs(seq, seq, 2, 1, 16, seed=seed)
    ids = random_segments(1, seq, seed) if segmented else None
    idx = random_rows(1, seq, rows, seed)
    attend = partial(token_conditional_attention, idx, window=window, segment_ids=ids, implementation="xla")
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, both_visible(idx, seq, seq, window, 0, ids)))


def test_a_later_chunk_of_the_sequence():
    inputs = make_inputs(70, 200, 4, 2, 16, batch=2)
    positions = jnp.array([[130], [3]]) + jnp.arange(70)
    idx = random_rows(2, 70, 30)
    attend = partial(token_conditional_attention, idx, window=40, sinks=3, q_positions=positions)
    visible = both_visible(idx, 70, 200, 40, 3, positions=positions)
    assert_matches(value_and_grads(attend)(*inputs), formulas(*inputs, visible))


def test_all_rows_chosen_is_causal_attention():
    for kv_heads in (4, 1):
        q, k, v, _ = make_inputs(150, 150, 4, kv_heads, 32)
        idx = jnp.arange(150)[None]
        got = jax.jit(partial(token_conditional_attention, idx, window=7))(q, k, v)
        np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=2e-6)


def test_no_row_chosen_is_a_window():
    q, k, v, _ = make_inputs(150, 150, 4, 4, 32)
    for window in (7, 150, 400):
        want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0))
        for chosen in (0, 3):
            idx = jnp.full((1, chosen), 150, jnp.int32)
            got = jax.jit(partial(token_conditional_attention, idx, window=window))(q, k, v)
            np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(dtype):
    inputs = make_inputs(150, 150, 2, 1, 32, dtype=dtype)
    idx = random_rows(1, 150, 60)
    got = value_and_grads(partial(token_conditional_attention, idx, window=20))(*inputs)
    assert all(x.dtype == dtype for x in got)
    assert_matches(got, formulas(*inputs, both_visible(idx, 150, 150, 20)), 2e-2, 2e-2)


def test_sixty_four_bit_types_switched_on():
    with jax.enable_x64(True):
        inputs, idx = make_inputs(40, 40, 2, 1, 16), jnp.array([[3, 9, 40]])
        ids = jnp.ones((1, 40), jnp.int64)
        attend = partial(token_conditional_attention, idx, window=5, sinks=1, segment_ids=ids)
        got = value_and_grads(attend)(*inputs)
        assert all(x.dtype == jnp.float32 for x in got)
        assert_matches(got, formulas(*inputs, both_visible(idx, 40, 40, 5, 1)))


def test_large_scores_stay_finite():
    q, k, v, g = make_inputs(60, 150, 2, 1, 32)
    inputs, positions = (100.0 * q, 10.0 * k, v, g), random_rows(1, 150, 60)
    got = value_and_grads(partial(gathered_attention, positions))(*inputs)
    assert_matches(got, formulas(*inputs, causal_visible(positions, 150)), 2e-3, 2e-3)


def test_vmap_equals_a_loop():
    inputs = [make_inputs(40, 40, 4, 2, 16, batch=2, seed=i) for i in range(3)]
    q, k, v, g = (jnp.stack(x) for x in zip(*inputs, strict=True))
    idx = jnp.stack([random_rows(2, 40, 10, seed) for seed in range(3)])

    def one(idx, q, k, v, g):
        return value_and_grads(partial(token_conditional_attention, idx, window=9), jit=False)(q, k, v, g)

    batched = jax.jit(jax.vmap(one, in_axes=(0, 0, None, 0, 0)))(idx, q, k[0], v, g)
    looped = [jax.jit(one)(idx[i], q[i], k[0], v[i], g[i]) for i in range(3)]
    chex.assert_trees_all_close(batched, tuple(map(jnp.stack, zip(*looped, strict=True))), atol=1e-6)


@pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse"])
def test_second_derivatives(order):
    q, k, v, g = make_inputs(12, 12, 2, 1, 16)
    idx = jnp.array([[3, 7, 12]])

    def derivative(implementation):
        def loss(q, k, v):
            return jnp.sum(
                g * jnp.sin(token_conditional_attention(q, k, v, idx, window=2, implementation=implementation))
            )

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        if order == "forward over reverse":
            return jax.jit(lambda *qkv: jax.jvp(gradient, qkv, (q + 1, v, k))[1])(q, k, v)
        square = lambda *qkv: sum(jnp.sum(x**2) for x in gradient(*qkv))  # noqa: E731
        return jax.jit(jax.grad(square, argnums=(0, 1, 2)))(q, k, v)

    chex.assert_trees_all_close(derivative("xla"), derivative("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_gathered_rows_sharded_over_two_devices(axis_type, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    inputs = make_inputs(20, 60, 4, 2, 16, batch=2)
    positions = random_rows(2, 60, 20)

    def run(positions, *inputs):
        return value_and_grads(partial(gathered_attention, positions), jit=False)(*inputs)

    want = jax.jit(run)(positions, *inputs)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in inputs]
        positions = jax.device_put(positions, NamedSharding(mesh, P(*spec[:1])))
        compiled = jax.jit(run).lower(positions, *sharded).compile()
        got = compiled(positions, *sharded)
    assert "all-gather" not in compiled.as_text()
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    inputs, idx = make_inputs(40, 40, 2, 2, 16, batch=2), random_rows(2, 40, 10)

    def local(idx, *inputs):
        return value_and_grads(partial(token_conditional_attention, idx, window=9), jit=False)(*inputs)

    want = jax.jit(local)(idx, *inputs)
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(idx, *inputs)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_is_linear_in_seq(backward):
    def temporary_bytes(seq):
        shape, idx = jax.ShapeDtypeStruct((1, seq, 1, 32), jnp.float32), jnp.arange(0, seq, 5)[None]
        attend = partial(token_conditional_attention, idx, window=100)
        function = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2)) if backward else attend
        return jax.jit(function).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    seqs = np.array([4096, 8192, 16384])
    assert np.polyfit(np.log(seqs), np.log([temporary_bytes(int(s)) for s in seqs]), 1)[0] < 1.15


def test_dispatch():
    q, k, v, _ = make_inputs(4, 8, 2, 1, 16)
    positions = jnp.array([[1, 2, 5, 8]])
    with pytest.raises(UnsupportedError, match=r"pallas_tpu.*cpu"):
        gathered_attention(q, k, v, positions, implementation="pallas_tpu")
    fallen_through = gathered_attention(q, k, v, positions, implementation=("pallas_gpu", "reference"))
    np.testing.assert_array_equal(fallen_through, gathered_attention(q, k, v, positions, implementation="reference"))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("positions", {"positions": jnp.zeros((1, 3), jnp.int32)}),
        ("positions", {"positions": jnp.zeros((1, 2))}),
        ("positions", {"positions": jnp.array([[3, 1]])}),
        ("positions", {"positions": jnp.array([[-1, 1]])}),
        ("query", {"query": jnp.zeros((1, 2, 2, 16), jnp.int32)}),
        ("key", {"key": jnp.zeros((1, 4, 1, 8))}),
        ("segment_ids", {"segment_ids": jnp.zeros((1, 2), jnp.int32)}),
        ("scale", {"scale": -1.0}),
    ],
)
def test_bad_inputs_of_gathered_attention(argument, change):
    good = {"query": jnp.zeros((1, 2, 2, 16)), "key": jnp.zeros((1, 4, 1, 16)), "positions": jnp.array([[1, 4]])}
    good["value"] = good["key"]
    with pytest.raises(ValueError, match=f"^{argument} must"):
        inspect.unwrap(gathered_attention)(**(good | change))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("idx", {"idx": jnp.array([[2, 1]])}),
        ("idx", {"idx": jnp.array([[1, 1]])}),
        ("idx", {"idx": jnp.array([[-1, 1]])}),
        ("idx", {"idx": jnp.array([1, 2])}),
        ("idx", {"idx": jnp.array([[1.0, 2.0]])}),
        ("idx", {"idx": jnp.array([[1], [2]])}),
    ],
)
def test_bad_inputs(argument, change):
    good = {"query": jnp.zeros((1, 4, 2, 16)), "key": jnp.zeros((1, 4, 1, 16)), "idx": jnp.array([[1, 4]]), "window": 2}
    good["value"] = good["key"]
    with pytest.raises(ValueError, match=f"^{argument} must"):
        inspect.unwrap(token_conditional_attention)(**(good | change))
