"""Causal attention: every implementation against float64 formulas, and what must hold around it."""

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

from kernels_pallas import UnsupportedError, causal_attention, dispatch

IMPLEMENTATIONS = ("reference", "xla")

# (batch, seq, heads, kv_heads, dim): one token, odd lengths, around a block of 128, one to eight query heads
# per key head, and lengths (581, 1157) whose strips hold several blocks.
SHAPES = (
    (2, 1, 4, 2, 32),
    (1, 37, 8, 1, 64),
    (2, 128, 2, 2, 80),
    (1, 129, 4, 1, 128),
    (2, 300, 4, 4, 32),
    (1, 581, 4, 1, 32),
    (1, 1157, 1, 1, 16),
)


def make_inputs(shape, seed=0, dtype=np.float32):
    """Query, key, value and the output's cotangent."""
    batch, seq, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(size=(batch, seq, n, dim)) for n in (heads, kv_heads, kv_heads, heads))
    return tuple(jnp.asarray(x.astype(np.float32), dtype) for x in arrays)


def formulas(q, k, v, g, segment_ids=None, scale=None):
    """Output and gradients in float64: dv = Pᵀ g, dS = P (g vᵀ - rowsum(g out)), dq = dS k, dk = dSᵀ q."""
    q, k, v, g = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, g))
    batch, seq, heads, dim = q.shape
    group = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        visible = np.tril(np.ones((seq, seq), bool))
        if segment_ids is not None:
            ids = np.asarray(segment_ids[b])
            visible &= ids[:, None] == ids[None, :]
        for h in range(heads):
            q_h, k_h, v_h, g_h = q[b, :, h], k[b, :, h // group], v[b, :, h // group], g[b, :, h]
            scores = np.where(visible, scale * q_h @ k_h.T, -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[b, :, h] = p @ v_h
            ds = p * (g_h @ v_h.T - (g_h * out[b, :, h]).sum(axis=1, keepdims=True))
            dq[b, :, h] = scale * ds @ k_h
            dk[b, :, h // group] += scale * ds.T @ q_h
            dv[b, :, h // group] += p.T @ g_h
    return out, dq, dk, dv


@functools.partial(jax.jit, static_argnames=("implementation", "scale"))
def value_and_grads(q, k, v, g, segment_ids=None, *, implementation, scale=None):
    def attend(q, k, v):
        return causal_attention(q, k, v, segment_ids=segment_ids, scale=scale, implementation=implementation)

    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


def assert_matches(got, want, value_tolerance=1e-5, grad_tolerance=2e-5):
    """Errors relative to the largest entry of each array."""
    for name, a, b, tolerance in zip(
        ("out", "dq", "dk", "dv"), got, want, (value_tolerance, *[grad_tolerance] * 3), strict=True
    ):
        error = np.abs(np.asarray(a.astype(jnp.float32), np.float64) - b).max() / max(np.abs(b).max(), 1e-3)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def random_segments(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 3, shape[:2]), jnp.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("segmented", [False, True], ids=["one", "segments"])
def test_xla_matches_formulas(shape, segmented):
    inputs = make_inputs(shape)
    segment_ids = random_segments(shape) if segmented else None
    got = value_and_grads(*inputs, segment_ids, implementation="xla")
    assert_matches(got, formulas(*inputs, segment_ids))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_reference_matches_formulas(shape):
    inputs = make_inputs(shape)
    segment_ids = random_segments(shape)
    got = value_and_grads(*inputs, segment_ids, implementation="reference")
    assert_matches(got, formulas(*inputs, segment_ids))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), min_size=150, max_size=150), st.integers(0, 2**20))
def test_any_segments(ids, seed):
    shape = (1, 150, 2, 1, 32)
    segment_ids = jnp.asarray([ids], jnp.int32)
    inputs = make_inputs(shape, seed)
    assert_matches(value_and_grads(*inputs, segment_ids, implementation="xla"), formulas(*inputs, segment_ids))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sixteen_bits(dtype, implementation):
    inputs = make_inputs((1, 150, 2, 1, 32), dtype=dtype)
    got = value_and_grads(*inputs, implementation=implementation)
    assert all(x.dtype == dtype for x in got)
    assert_matches(got, formulas(*inputs), 2e-2, 2e-2)


def test_scale():
    inputs = make_inputs((1, 20, 2, 2, 32))
    got = value_and_grads(*inputs, implementation="xla", scale=0.7)
    assert_matches(got, formulas(*inputs, scale=0.7))


def test_large_scores_stay_finite():
    q, k, v, g = make_inputs((1, 150, 2, 1, 32))
    inputs = (100.0 * q, 10.0 * k, v, g)  # scores in the thousands: exp overflows without the maximum
    got = value_and_grads(*inputs, implementation="xla")
    chex.assert_tree_all_finite(got)
    # A score of 6000 carries a float32 rounding error of about 2e-4 into its exponential.
    assert_matches(got, formulas(*inputs), 2e-3, 2e-3)


def test_changing_later_tokens_changes_nothing_earlier():
    q, k, v, g = make_inputs((1, 150, 2, 1, 32))
    out = value_and_grads(q, k, v, g, implementation="xla")[0]
    changed = value_and_grads(*(x.at[:, 70:].add(1.0) for x in (q, k, v)), g, implementation="xla")[0]
    np.testing.assert_array_equal(out[:, :70], changed[:, :70])
    assert float(jnp.abs(out[:, 70:] - changed[:, 70:]).max()) > 0.1


def test_packed_sequences_equal_separate_ones():
    lengths = (20, 90, 40)
    inputs = make_inputs((1, sum(lengths), 2, 1, 32))
    segment_ids = jnp.repeat(jnp.arange(1, 4), jnp.asarray(lengths), total_repeat_length=sum(lengths))[None]
    packed = value_and_grads(*inputs, segment_ids, implementation="xla")
    start = 0
    for length in lengths:
        piece = [x[:, start : start + length] for x in inputs]
        separate = value_and_grads(*piece, implementation="xla")
        chex.assert_trees_all_close([x[:, start : start + length] for x in packed], list(separate), atol=3e-6)
        start += length


def test_ignored_padding_gets_no_gradient():
    q, k, v, g = make_inputs((1, 150, 2, 1, 32))
    segment_ids = jnp.where(jnp.arange(150) < 100, 1, 0)[None]
    g = g * segment_ids[..., None, None]
    got = value_and_grads(q, k, v, g, segment_ids, implementation="xla")
    chex.assert_tree_all_finite(got)
    for grad in got[1:]:
        assert not np.any(grad[:, 100:])
        assert np.any(grad[:, :100])


def test_vmap_equals_a_loop():
    stacked = [jnp.stack(xs) for xs in zip(*(make_inputs((2, 30, 4, 2, 16), i) for i in range(3)), strict=True)]
    q, k, v, g = stacked
    segment_ids = random_segments((2, 30))
    one = functools.partial(value_and_grads, implementation="xla")
    batched = jax.vmap(one, in_axes=(0, None, 0, 0, None))(q, k[0], v, g, segment_ids)
    looped = [one(q[i], k[0], v[i], g[i], segment_ids) for i in range(3)]
    chex.assert_trees_all_close(batched, tuple(map(jnp.stack, zip(*looped, strict=True))), atol=1e-6)


def test_layers_under_scan_and_checkpoint():
    x = make_inputs((2, 140, 2, 2, 16))[0]

    def loss(implementation, x, weights):
        @jax.checkpoint
        def layer(h, w):
            return h + causal_attention(w * h, w * h, h, implementation=implementation), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))

    grads = [
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(x, jnp.array([0.3, 0.6, 0.9]))
        for name in IMPLEMENTATIONS
    ]
    chex.assert_trees_all_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse"])
def test_second_derivatives(order):
    q, k, v, g = make_inputs((1, 12, 2, 1, 16))

    def derivative(implementation):
        def loss(q, k, v):
            return jnp.sum(g * jnp.sin(causal_attention(q, k, v, implementation=implementation)))

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        if order == "forward over reverse":
            return jax.jit(lambda *qkv: jax.jvp(gradient, qkv, (k[:, :, :1].repeat(2, 2), v, k))[1])(q, k, v)

        def square(*qkv):
            return sum(jnp.sum(x**2) for x in gradient(*qkv))

        return jax.jit(jax.grad(square, argnums=(0, 1, 2)))(q, k, v)

    chex.assert_trees_all_close(derivative("xla"), derivative("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_sharded_over_two_devices(axis_type, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    inputs = make_inputs((2, 140, 4, 2, 16))
    segment_ids = random_segments((2, 140))
    want = value_and_grads(*inputs, segment_ids, implementation="xla")
    local = functools.partial(value_and_grads, implementation="xla")
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in inputs]
        ids = jax.device_put(segment_ids, NamedSharding(mesh, P(*spec[:1])))
        compiled = jax.jit(local).lower(*sharded, ids).compile()
        got = compiled(*sharded, ids)
    assert "all-gather" not in compiled.as_text()
    assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4) for x in got)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


def test_uneven_sharding_and_shared_key_head_are_gathered():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, g = make_inputs((1, 40, 4, 1, 16))
    want = value_and_grads(q, k, v, g, implementation="xla")
    q, g = (jax.device_put(x, NamedSharding(mesh, P(None, None, "x"))) for x in (q, g))
    got = value_and_grads(q, k, v, g, implementation="xla")
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, g = make_inputs((2, 40, 2, 2, 16))
    k = k[:1]  # the same keys on both devices: their gradients add up
    out, dq, dk, dv = value_and_grads(q, jnp.concatenate([k, k]), v, g, implementation="xla")
    local = functools.partial(value_and_grads, implementation="xla")
    in_specs, out_specs = (P("x"), P(), P("x"), P("x")), (P("x"), P("x"), P(), P("x"))
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(q, k, v, g)
    want = (out, dq, dk.sum(axis=0, keepdims=True), dv)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_is_linear_in_seq(backward):
    def temporary_bytes(seq, implementation):
        shape = jax.ShapeDtypeStruct((1, seq, 1, 32), jnp.float32)
        attend = functools.partial(causal_attention, implementation=implementation)
        function = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2)) if backward else attend
        memory = jax.jit(function).lower(shape, shape, shape).compile().memory_analysis()
        return memory.temp_size_in_bytes

    seqs = np.array([1024, 2048, 4096])
    slope = np.polyfit(np.log(seqs), np.log([temporary_bytes(int(s), "xla") for s in seqs]), 1)[0]
    assert slope < 1.15
    assert temporary_bytes(2048, "xla") < 0.5 * temporary_bytes(2048, "reference")


def test_exported_program():
    q, k, v, _ = make_inputs((1, 20, 2, 1, 16))
    exported = jax.export.export(jax.jit(causal_attention))(q, k, v)
    chex.assert_trees_all_close(exported.call(q, k, v), causal_attention(q, k, v), atol=1e-6)


def test_none_is_xla_on_cpu():
    q, k, v, _ = make_inputs((1, 20, 2, 1, 16))
    text = [
        jax.jit(functools.partial(causal_attention, implementation=i)).lower(q, k, v).compile().as_text()
        for i in (None, "xla", "reference")
    ]
    assert "custom-call" not in text[0]
    assert ("while" in text[0]) == ("while" in text[1]) != ("while" in text[2])


def test_dispatch():
    q, k, v, _ = make_inputs((1, 4, 2, 1, 16))
    with pytest.raises(UnsupportedError, match=r"pallas_tpu.*cpu"):
        causal_attention(q, k, v, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="pallas_gpu"):
        causal_attention(q, k, v, implementation="pallas_gpu")
    fallen_through = causal_attention(q, k, v, implementation=("pallas_tpu", "reference"))
    np.testing.assert_array_equal(fallen_through, causal_attention(q, k, v, implementation="reference"))


@pytest.mark.parametrize("name", ["cudnn", (), ("xla", "fast")])
def test_unknown_implementation(name):
    select = inspect.unwrap(dispatch.select)  # without the annotation checker of the tests, as users call it
    with pytest.raises(ValueError, match="implementation must be"):
        select("causal_attention", name, lambda kernels: None)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", {"query": jnp.zeros((4, 2, 16))}),
        ("query", {"query": jnp.zeros((1, 4, 2, 16), jnp.int32)}),
        ("query", {"query": jnp.zeros((1, 0, 2, 16))}),
        ("key", {"key": jnp.zeros((1, 5, 1, 16))}),
        ("key", {"key": jnp.zeros((1, 4, 3, 16))}),
        ("key", {"key": jnp.zeros((1, 4, 1, 16), jnp.bfloat16)}),
        ("value", {"value": jnp.zeros((1, 4, 1, 8))}),
        ("value", {"value": jnp.zeros((1, 4, 1, 16), jnp.float16)}),
        ("segment_ids", {"segment_ids": jnp.zeros((4,), jnp.int32)}),
        ("segment_ids", {"segment_ids": jnp.zeros((1, 4))}),
        ("scale", {"scale": 0.0}),
        ("scale", {"scale": float("nan")}),
    ],
)
def test_bad_inputs(argument, change):
    good = {"query": jnp.zeros((1, 4, 2, 16)), "key": jnp.zeros((1, 4, 1, 16))}
    good["value"] = good["key"]
    with pytest.raises(ValueError, match=f"^{argument} must"):
        inspect.unwrap(causal_attention)(**(good | change))
