"""The layer: its router, decoding with it, conversion of pretrained attentions, pruning."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.attention import (
    L2AAttention,
    L2AConfig,
    L2ARouter,
    from_attention_params,
    prune_layers,
    sparsity_loss,
)
from jaxlib_icml.lm.attention import Attention
from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.nn import RopeScaling, rotary_angles
from tests.attention import oracle

WIDTH, HEADS = 32, 4
CONFIG = L2AConfig(window=8, init_rate=0.5)
CONFIG_OPEN = L2AConfig(window=8)


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def make(config=CONFIG, seed=0, spread=1.0, **options):
    """A layer whose router tells tokens apart."""
    layer = L2AAttention(WIDTH, HEADS, config, rngs=nnx.Rngs(seed), **options)
    kernel = layer.router.out.kernel
    kernel[...] = spread * jax.random.normal(jax.random.key(seed + 50), kernel.shape)
    return layer


def tokens(batch=2, seq=40, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, seq, WIDTH))


class Stack(nnx.Module):
    """Residual blocks of nothing but attention."""

    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        aux = []
        for layer in self.layers:
            y, statistics = layer(rms(x))
            x = x + y
            aux.append(statistics)
        return x, aux

    def prefill(self, x, caches, lengths):
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            y, _, cache = layer.prefill(rms(x), cache, lengths)
            x = x + y
            new.append(cache)
        return x, new

    def decode(self, x, caches):
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            y, _, cache = layer.decode(rms(x), cache)
            x = x + y
            new.append(cache)
        return x, new


run = nnx.jit(lambda stack, x: stack(x))


PROMPT = 36


@nnx.jit
def generate(stack, x, lengths):
    """Outputs of prompts, and of the 64 tokens of x behind each of them, one step at a time."""
    caches = [layer.init_cache(*x.shape[:2]) for layer in stack.layers]
    y, caches = stack.prefill(x[:, :PROMPT], caches, lengths)
    graph, state = nnx.split(stack)

    def step(caches, i):
        cut = lambda row, n: jax.lax.dynamic_slice_in_dim(row, n + i, 1)  # noqa: E731
        new, caches = nnx.merge(graph, state).decode(jax.vmap(cut)(x, lengths), caches)
        return caches, new[:, 0]

    _, rest = jax.lax.scan(step, caches, jnp.arange(64))
    return y, jnp.moveaxis(rest, 0, 1)


# --- decoding


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"sinks": 2, "combine": "add", "estimator": "soft"}, marks=pytest.mark.slow)]
)
def test_prefill_and_steps_equal_one_long_pass(options):
    # Check 6, with prompts of different lengths in one batch, and pruned layers among others.
    config = L2AConfig(window=8, init_rate=0.5, **options)
    stack = Stack(*(make(config, seed, num_kv_heads=2, pruned=seed == 1) for seed in range(3)))
    x, lengths = tokens(2, 100), jnp.array([PROMPT, 19])
    whole, aux = run(stack, x)
    assert 0.2 < aux[0].rate < 0.8
    assert aux[1].rate == 0
    prompt, rest = generate(stack, x, lengths)
    for b, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(prompt[b, :n], whole[b, :n], atol=1e-5)
        np.testing.assert_allclose(rest[b], whole[b, n : n + 64], atol=1e-5)


def test_caches_of_pruned_layers_are_one_window():
    shapes = [make(pruned=pruned, num_kv_heads=2).init_cache(3, 100).keys.shape for pruned in (False, True)]
    assert shapes == [(3, 100, 2, 8), (3, 8, 2, 8)]
    assert make(pruned=True).init_cache(1, 5).keys.shape[1] == 5
    assert make(pruned=True, dtype=jnp.bfloat16).init_cache(1, 9, extra=1).values.dtype == jnp.bfloat16


# --- the router


def test_router_is_the_formula():
    router, x = make().router, tokens()
    xs, u = np.asarray(x, np.float64), np.asarray(router.out.kernel[...], np.float64)[:, 0]
    expected = xs / np.sqrt((xs**2).mean(-1, keepdims=True) + 1e-6) @ u  # b = logit(1/2) = 0
    np.testing.assert_allclose(router(x), expected, atol=1e-5)
    assert router(x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_hidden_router_is_the_formula():
    config = L2AConfig(window=8, router="mlp", init_rate=0.7)
    router, x = L2ARouter(WIDTH, config, rngs=nnx.Rngs(0)), tokens()
    np.testing.assert_allclose(jax.nn.sigmoid(router(x)), 0.7, atol=1e-6)
    assert router.hidden.kernel.shape == (WIDTH, 64)
    router.out.kernel[...] = jax.random.normal(jax.random.key(0), (64, 1))
    router.hidden.bias[...] = jax.random.normal(jax.random.key(1), (64,))
    as64 = lambda v: np.asarray(v[...], np.float64)  # noqa: E731
    xs = np.asarray(x, np.float64)
    hidden = xs / np.sqrt((xs**2).mean(-1, keepdims=True) + 1e-6) @ as64(router.hidden.kernel) + as64(
        router.hidden.bias
    )
    expected = (hidden / (1 + np.exp(-hidden))) @ as64(router.out.kernel) + math.log(0.7 / 0.3)
    np.testing.assert_allclose(router(x), expected[..., 0], atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_untrained_layers_route_every_token(kind):
    layer = L2AAttention(WIDTH, HEADS, L2AConfig(window=8, router=kind), rngs=nnx.Rngs(0))
    _, aux = layer(tokens())
    assert aux.rate == 1
    assert float(aux.prob_mean) == pytest.approx(0.9)


def test_exploration_comes_from_a_key_or_a_stream():
    layer, x = make(), tokens()
    route = lambda **options: np.asarray(layer.route(x, **options).mask)  # noqa: E731
    stream = nnx.Rngs(routing=5)
    key = nnx.Rngs(routing=5).routing()
    np.testing.assert_array_equal(route(temperature=1.0, rngs=stream), route(temperature=1.0, rngs=key))
    assert (route(temperature=1.0, rngs=stream) != route(temperature=1.0, rngs=key)).any()  # the stream went on
    np.testing.assert_array_equal(route(rngs=stream), route())
    with pytest.raises(ValueError, match="key"):
        layer(x, train=True)
    np.testing.assert_array_equal(layer(x, train=True, temperature=0.0)[0], layer(x)[0])


def test_capacity_rate_limits_the_routed_tokens():
    config = L2AConfig(window=8, capacity_rate=0.25, capacity_factor=1.0)
    x = tokens(1, 600)
    _, aux = jax.jit(L2AAttention(WIDTH, HEADS, config, rngs=nnx.Rngs(0)))(x)
    assert (aux.n_routed.tolist(), aux.n_overflow.tolist(), float(aux.rate)) == ([256], [344], 1.0)


def test_topk_is_for_training_only():
    layer = make(L2AConfig(window=8, overflow="topk", init_rate=0.5))
    x = tokens()
    with pytest.raises(ValueError, match="causality"):
        layer(x)
    assert layer(x, train=True, rngs=jax.random.key(0), capacity=5)[1].n_routed.tolist() == [5, 5]


# --- values


def test_layer_is_projections_around_the_attention():
    layer = make(rope_theta=None, qkv_bias=True, out_bias=True)
    x = tokens()
    segment_ids = jnp.array([[1] * 25 + [2] * 10 + [0] * 5, [1] * 40])
    for part in (layer.query, layer.key, layer.value, layer.out):
        part.bias[...] = 0.3 * jax.random.normal(jax.random.key(1), part.bias.shape)
    y, aux = nnx.jit(lambda layer, x, s: layer(x, segment_ids=s))(layer, x, segment_ids)

    def project(part):
        kernel, bias = (np.asarray(v[...], np.float64) for v in (part.kernel, part.bias))
        return jnp.asarray(np.einsum("btw,whd->bthd", np.asarray(x, np.float64), kernel) + bias)

    logits = layer.router(x)
    heads, _ = oracle.l2a(
        project(layer.query),
        project(layer.key),
        project(layer.value),
        np.asarray(logits) >= 0,
        logits,
        window=8,
        segment_ids=segment_ids,
    )
    expected = np.einsum("bthd,hdw->btw", heads, np.asarray(layer.out.kernel[...], np.float64))
    np.testing.assert_allclose(y, expected + np.asarray(layer.out.bias[...]), atol=1e-5)
    assert aux.n_routed.sum() == np.sum((np.asarray(logits) >= 0) & (np.asarray(segment_ids) > 0))


def test_only_differences_of_positions_matter():
    layer, x = make(), tokens()
    shifted = layer(x, jnp.arange(40)[None] + jnp.array([[11], [500]]))[0]
    np.testing.assert_allclose(shifted, layer(x)[0], atol=1e-4)
    scaled = layer(x, 2 * jnp.arange(40)[None] + jnp.zeros((2, 1), int))[0]
    assert np.abs(scaled - layer(x)[0]).max() > 1e-2


def test_training_moves_router_and_projections():
    layer, x = make(), tokens()
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def gradients(params, key):
        def loss(params):
            y, aux = nnx.merge(graph, params, rest)(x, train=True, rngs=key)
            return jnp.mean(y**2) + sparsity_loss(aux.prob_mean, 0.1, 0.2)

        return jax.grad(loss)(params)

    for leaf in jax.tree.leaves(gradients(params, jax.random.key(0))):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


# --- pruning


def test_pruning_an_unused_layer_changes_no_bit():
    # Check 8.
    stack, x = Stack(make(seed=0), make(seed=1), make(seed=2)), tokens()
    stack.layers[1].router.out.bias[...] = jnp.full(1, -100.0)
    before, aux = run(stack, x)
    usage = [float(a.rate) for a in aux]
    assert usage[1] == 0
    pruned = prune_layers(usage)
    assert pruned == (False, True, False)
    for layer, drop in zip(stack.layers, pruned, strict=True):
        layer.pruned = drop
    after, aux = run(stack, x)
    np.testing.assert_array_equal(before, after)
    assert aux[1].n_routed.tolist() == [0, 0]


# --- conversion


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "out_bias": True},
        {"qk_norm": True},
        pytest.param({"qk_norm": True, "qk_norm_scope": "all", "num_kv_heads": 1}, marks=pytest.mark.slow),
        {"rope_scaling": "linear", "rope_factor": 4.0, "rope_theta": 500.0},
    ],
)
def test_a_lifted_attention_of_the_language_model_is_itself_while_everything_is_routed(options):
    config = LMConfig(width=WIDTH, num_heads=HEADS, **options)
    plain = Attention(config, rngs=nnx.Rngs(0))
    state = nnx.state(plain)
    leaves, tree = jax.tree.flatten(state)
    nnx.update(
        plain, tree.unflatten([x + 0.1 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)])
    )
    scaling = RopeScaling("linear", 4.0, 64) if "rope_factor" in options else None
    rope = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    x = tokens()
    expected, *_ = plain(x, rotary_angles(jnp.arange(40), 8, config.rope_theta, scaling))
    for params in (plain, nnx.state(plain)):
        lifted = from_attention_params(params, CONFIG_OPEN, **rope)
        np.testing.assert_allclose(lifted(x)[0], expected, atol=1e-5)


def test_a_lifted_flax_attention_is_itself_while_everything_is_routed():
    plain = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    x = tokens()
    lifted = from_attention_params(plain, CONFIG_OPEN, rope_theta=None)
    np.testing.assert_allclose(lifted(x)[0], plain(x, mask=nnx.make_causal_mask(x[..., 0])), atol=1e-5)


def test_dictionaries_are_lifted_and_keep_their_dtype():
    kernels = {name: {"kernel": jnp.ones((8, 2, 4), jnp.bfloat16)} for name in "qkv"}
    params = kernels | {"o": {"kernel": jnp.ones((2, 4, 8), jnp.bfloat16)}}
    layer = from_attention_params(params, CONFIG)
    assert {layer.query.kernel.dtype, layer.out.kernel.dtype} == {jnp.bfloat16.dtype}
    assert layer.router.out.kernel.dtype == jnp.float32
    assert jax.eval_shape(layer, jnp.ones((1, 6, 8), jnp.bfloat16))[0].dtype == jnp.bfloat16


def _params(**changes):
    shapes = {"query": (8, 2, 4), "key": (8, 2, 4), "value": (8, 2, 4), "out": (2, 4, 8)} | changes
    return {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items() if shape}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: from_attention_params(_params(out=None), CONFIG), r"out\.kernel"),
        (lambda: from_attention_params(_params(query=(8, 8)), CONFIG), r"query\.kernel"),
        (lambda: from_attention_params(_params(value=(8, 1, 4)), CONFIG), r"value\.kernel"),
        (lambda: from_attention_params(_params() | {"query_ln": {"scale": jnp.ones(4)}}, CONFIG), r"query_ln\.scale"),
        (lambda: from_attention_params(_params() | {"extra": jnp.ones(4)}, CONFIG), "extra"),
        (lambda: L2AAttention(10, 4, CONFIG, rngs=nnx.Rngs(0)), "num_heads"),
        (lambda: L2AAttention(8, 4, CONFIG, num_kv_heads=3, rngs=nnx.Rngs(0)), "num_kv_heads"),
        (lambda: L2AAttention(12, 4, CONFIG, rngs=nnx.Rngs(0)), "head_dim"),
        (lambda: L2AAttention(8, 4, CONFIG, qk_norm="none", rngs=nnx.Rngs(0)), "qk_norm"),
        (lambda: L2ARouter(0, CONFIG, rngs=nnx.Rngs(0)), "width"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
