"""The language model with L2A: what its layers see, decoding, pruned layers, hooks and the training loss."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.attention import L2AConfig
from jaxlib_icml.lm import (
    Edit,
    Exploration,
    LMConfig,
    Sampling,
    Transformer,
    cache_bytes,
    generate,
    init_cache,
    loss_fn,
)

CONFIG = LMConfig(
    vocab_size=50,
    width=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    context_length=64,
    attention="l2a",
    l2a=L2AConfig(window=8, sinks=2),
)
TOKENS = jax.random.randint(jax.random.key(1), (2, 40), 0, 50)


@functools.cache
def model_of(config=CONFIG):
    """A model whose routers route about half of the tokens."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    layers = [model.layers] if config.scan_layers else model.layers
    for layer in layers:
        router = layer.attention.router.out
        noise = np.random.default_rng(0).normal(size=router.kernel[...].shape)
        router.kernel[...] = jnp.asarray(0.5 * noise, jnp.float32)
        router.bias[...] = jnp.zeros_like(router.bias[...])
    return model


@functools.partial(jax.jit, static_argnames=("graphdef", "capture"))
def _call(graphdef, state, tokens, segment_ids=None, edits=None, capture=()):
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, edits=edits, capture=capture)


def call(config, tokens, **kwargs):
    return _call(*nnx.split(model_of(config)), tokens, **kwargs)


def test_routing_of_every_layer_is_reported():
    out = call(CONFIG, TOKENS, capture=("routing_probability",))
    prob = out.activations["routing_probability"]
    assert prob.shape == (3, 2, 40)
    np.testing.assert_allclose(out.l2a.rate, (prob >= 0.5).mean(axis=(1, 2)), atol=1e-6)
    np.testing.assert_allclose(out.l2a.prob_mean, prob.mean(axis=(1, 2)), atol=1e-6)
    assert 0.1 < float(out.l2a.rate.mean()) < 0.9


def test_the_pattern_that_is_captured_is_the_one_that_is_used():
    plain = call(CONFIG, TOKENS)
    seen = call(CONFIG, TOKENS, capture=("attention_pattern", "routing_probability"))
    np.testing.assert_allclose(seen.hidden, plain.hidden, atol=1e-5)
    pattern = np.asarray(seen.activations["attention_pattern"])
    routed = np.asarray(seen.activations["routing_probability"]) >= 0.5
    t, s = np.arange(40)[:, None], np.arange(40)
    far = (s <= t - 8) & (s >= 2)
    reads_far = (np.where(far, pattern, 0) > 0).any(axis=(2, 4))
    np.testing.assert_array_equal(reads_far, routed & (np.arange(40) > 9))


def test_routing_edits_make_it_full_attention_or_a_window():
    plain = Transformer(dataclasses.replace(CONFIG, attention="full"), rngs=nnx.Rngs(0))
    shared = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model_of())) if "router" not in path]
    state = nnx.from_flat_state(shared)
    everything = call(CONFIG, TOKENS, edits={"routing_probability": Edit(keep=0.0, add=1.0)})
    np.testing.assert_allclose(everything.hidden, _call(nnx.graphdef(plain), state, TOKENS).hidden, atol=2e-5)
    nothing = call(CONFIG, TOKENS, edits={"routing_probability": Edit(keep=0.0)})
    pruned = dataclasses.replace(CONFIG, pruned_layers=(0, 1, 2))
    np.testing.assert_array_equal(nothing.hidden, call(pruned, TOKENS).hidden)


@pytest.mark.parametrize("pruned", [(), (1,), (0, 1, 2)])
def test_decoding_equals_one_long_forward(pruned):
    config = dataclasses.replace(CONFIG, pruned_layers=pruned)
    want = call(config, TOKENS).hidden
    graphdef, state = nnx.split(model_of(config))

    @jax.jit
    def step(state, cache, token):
        out = nnx.merge(graphdef, state)(token, cache=cache)
        return out.cache, out.hidden

    lengths = jnp.array([20, 13])  # of right-padded prompts
    prefill = jax.jit(
        lambda s, x, n: nnx.merge(graphdef, s)(x, cache=init_cache(config, 2, 48), prefill=True, prompt_lengths=n)
    )
    cache = prefill(state, TOKENS[:, :20], lengths).cache
    for i in range(20):
        places = lengths + i
        token = jnp.take_along_axis(TOKENS, places[:, None], axis=1)
        cache, hidden = step(state, cache, token)
        expected = jnp.take_along_axis(want, places[:, None, None], axis=1)
        np.testing.assert_allclose(hidden, expected, atol=2e-5)
    assert [layer.keys.shape[1] for layer in cache.layers] == [10 if i in pruned else 48 for i in range(3)]


def test_greedy_generation_of_padded_prompts():
    config = dataclasses.replace(CONFIG, pruned_layers=(2,))
    graphdef, state = nnx.split(model_of(config))
    prompts, lengths = np.asarray(TOKENS[:, :20]), np.array([20, 11])
    options = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    together = generate(graphdef, state, prompts, lengths, jax.random.key(0), **options)
    for row, length in enumerate(lengths):
        alone = generate(
            graphdef, state, prompts[row : row + 1, :length], np.array([length]), jax.random.key(0), **options
        )
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])


def test_scanned_layers_are_the_same_model():
    scanned = dataclasses.replace(CONFIG, scan_layers=True)
    apart = model_of()
    state = nnx.state(model_of(scanned))
    layers = [nnx.state(layer) for layer in apart.layers]
    state["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    for name in ("embed", "final_norm", "head"):
        state[name] = nnx.state(getattr(apart, name))
    got = _call(nnx.graphdef(model_of(scanned)), state, TOKENS)
    np.testing.assert_allclose(got.hidden, call(CONFIG, TOKENS).hidden, atol=1e-5)
    assert got.l2a.rate.shape == (3,)


def test_packed_documents_do_not_see_one_another():
    ids = jnp.where(jnp.arange(40) < 25, 1, 2)[None]
    packed = call(CONFIG, TOKENS[:1], segment_ids=ids).hidden
    apart = [call(CONFIG, TOKENS[:1, part]).hidden for part in (slice(0, 25), slice(25, 40))]
    np.testing.assert_allclose(packed, jnp.concatenate(apart, axis=1), atol=2e-5)


def test_exploration_differs_between_layers_and_keys_and_fades():
    graphdef, state = nnx.split(model_of())

    @jax.jit
    def rates(key, temperature):
        out = nnx.merge(graphdef, state)(TOKENS, exploration=Exploration(key, temperature))
        return out.l2a

    one, other = (rates(jax.random.key(i), jnp.float32(1.0)) for i in (0, 1))
    assert not np.array_equal(one.rate, other.rate)
    chex.assert_trees_all_equal(rates(jax.random.key(0), jnp.float32(1.0)), one)
    np.testing.assert_array_equal(rates(jax.random.key(3), jnp.float32(0.0)).rate, call(CONFIG, TOKENS).l2a.rate)
    # Routers that know nothing: every layer's noise decides by itself.
    fresh = Transformer(dataclasses.replace(CONFIG, l2a=L2AConfig(window=8, init_rate=0.5)), rngs=nnx.Rngs(0))
    noisy = fresh(TOKENS, exploration=Exploration(jax.random.key(0), jnp.float32(1.0))).l2a
    assert len(set(np.asarray(noisy.n_routed)[:, 0].tolist())) > 1


def test_training_has_a_capacity_and_inference_none():
    config = dataclasses.replace(CONFIG, context_length=300, l2a=L2AConfig(window=8, capacity_rate=0.25, init_rate=0.9))
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 300), jnp.int32)
    assert int(model(tokens).l2a.n_routed[0, 0]) == 300
    training = model(tokens, exploration=Exploration(jax.random.key(0), jnp.float32(0.0))).l2a
    # 1.25 x 0.25 x 300 tokens, in blocks of 128.
    assert int(training.n_routed[0, 0]) == 128
    assert int(training.n_overflow[0, 0]) == 172


def test_the_loss_prices_routing():
    graphdef, state = nnx.split(model_of())
    batch = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, axis=1)}

    @jax.jit
    def loss(state, price):
        return loss_fn(graphdef, state, batch, routing_price=price)

    (free, aux), (priced, _) = loss(state, 0.0), loss(state, 3.0)
    assert float(priced - free) == pytest.approx(3.0 * (float(aux.l2a.prob_mean.mean()) - 0.2), abs=1e-5)
    grads = jax.jit(jax.grad(lambda s: loss_fn(graphdef, s, batch, routing_price=3.0)[0]))(state)
    assert all(
        float(jnp.abs(layer.attention.router.out.bias[...])[0]) > 0 for layer in nnx.merge(graphdef, grads).layers
    )


def test_bytes_of_the_cache():
    config = dataclasses.replace(CONFIG, pruned_layers=(0, 2))
    # 2 of keys and values, 2 heads of 8 float32 numbers, and 10 slots instead of 48 in two of three layers.
    assert cache_bytes(config, 48) == (2 * 2 * 8 * 4 * (48 + 2 * 10), 2 * 2 * 8 * 4 * 3 * 48)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in init_cache(config, 1, 48).layers)
    assert held == cache_bytes(config, 48)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window"),
        ({"pruned_layers": (3,)}, "pruned_layers"),
        ({"pruned_layers": (0,), "scan_layers": True}, "pruned_layers"),
        ({"attention": "full", "pruned_layers": (0,)}, "pruned_layers"),
    ],
)
def test_configurations_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=f"^{message}:"):
        dataclasses.replace(CONFIG, **changes)


def test_calls_that_do_not_fit():
    full = Transformer(dataclasses.replace(CONFIG, attention="full"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="routing_probability needs"):
        full(TOKENS, capture=("routing_probability",))
    with pytest.raises(ValueError, match=r"^prompt_lengths"):
        full(TOKENS, prompt_lengths=jnp.array([3, 4]))
    soft = Transformer(dataclasses.replace(CONFIG, l2a=L2AConfig(window=8, combine="add")), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="attention_pattern needs"):
        soft(TOKENS, capture=("attention_pattern",))
