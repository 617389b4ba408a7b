import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import PRESETS, LMConfig, Transformer, init_cache, loss_fn, preset, split_model
from tests.lm import oracle

SMALL = LMConfig(vocab_size=61, context_length=32, width=32, num_layers=2, num_heads=4, num_kv_heads=2)
VARIANTS = {
    "swiglu": SMALL,
    "gelu-tied": dataclasses.replace(SMALL, activation="gelu", tie_embeddings=True),
    "qwen-like": dataclasses.replace(SMALL, qk_norm=True, qkv_bias=True, rope_theta=1e6, head_dim=16),
    "one-kv-head": dataclasses.replace(SMALL, num_kv_heads=1),
}


@functools.cache
def build(config, seed=0):
    graphdef = split_model(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]
    init = jax.jit(lambda key: split_model(Transformer(config, rngs=nnx.Rngs(params=key)))[1:])
    return graphdef, *init(jax.random.key(seed))


def make(config, seed=0, noise=0.3):
    """A model whose every parameter, norm scales and biases included, is away from its initial value."""
    graphdef, params, rest = build(config, seed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [x + noise * jax.random.normal(k, x.shape) / max(1, x.shape[0]) for x, k in zip(leaves, keys, strict=True)]
    return graphdef, jax.tree.unflatten(tree, noisy), rest


def tokens_for(config, batch=2, seq=20, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, seq), 0, config.vocab_size)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_numpy_oracle(name):
    config = VARIANTS[name]
    graphdef, params, rest = make(config)
    tokens = tokens_for(config)

    @jax.jit
    def ours(params):
        model = nnx.merge(graphdef, params, rest)
        return model.logits(model(tokens).hidden)

    plain = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    for row, got in zip(np.asarray(tokens), ours(params), strict=True):
        np.testing.assert_allclose(got, oracle.logits(row, plain, config), atol=2e-4)


@pytest.mark.parametrize("experts", [0, 4])
def test_cached_decoding_equals_the_full_forward_pass(experts):
    config = dataclasses.replace(SMALL, num_experts=experts, qk_norm=True)
    graphdef, params, rest = make(config)
    tokens = tokens_for(config, seq=12)

    @jax.jit
    def full(params):
        model = nnx.merge(graphdef, params, rest)
        return model.logits(model(tokens).hidden)

    @jax.jit
    def in_three_parts(params):
        model = nnx.merge(graphdef, params, rest)
        first = model(tokens[:, :5], cache=init_cache(config, 2, 12), prefill=True)
        second = model(tokens[:, 5:9], cache=first.cache)
        hidden = [first.hidden, second.hidden]
        cache = second.cache
        for t in range(9, 12):
            out = model(tokens[:, t : t + 1], cache=cache)
            hidden.append(out.hidden)
            cache = out.cache
        return model.logits(jnp.concatenate(hidden, axis=1))

    np.testing.assert_allclose(in_three_parts(params), full(params), atol=2e-5)


@pytest.mark.parametrize("experts", [0, 4])
def test_scanned_layers_equal_a_list_of_layers(experts):
    config = dataclasses.replace(SMALL, num_experts=experts)
    graphdef, params, rest = make(config)
    scanned = dataclasses.replace(config, scan_layers=True)
    scanned_graph, scanned_params, scanned_rest = build(scanned)

    def stacked(like, source):
        pure = nnx.to_pure_dict(source)
        if "layers" in pure:
            pure["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *(pure["layers"][i] for i in range(2)))
        nnx.replace_by_pure_dict(like, pure)
        return like

    scanned_params = stacked(scanned_params, params)
    scanned_rest = stacked(scanned_rest, rest)
    tokens = tokens_for(config)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}

    def loss(graphdef, params, rest):
        return loss_fn(graphdef, nnx.merge_state(params, rest), batch)[0]

    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(graphdef, p, rest)))(params)
    scanned_value, scanned_grads = jax.jit(jax.value_and_grad(lambda p: loss(scanned_graph, p, scanned_rest)))(
        scanned_params
    )
    np.testing.assert_allclose(value, scanned_value, rtol=1e-6)
    expected = stacked(scanned_params, grads)
    chex.assert_trees_all_close(nnx.to_pure_dict(scanned_grads), nnx.to_pure_dict(expected), atol=1e-5)


def test_scanned_decoding_equals_its_full_forward_pass():
    config = dataclasses.replace(SMALL, scan_layers=True)
    graphdef, params, rest = make(config)
    tokens = tokens_for(config, seq=6)

    @jax.jit
    def both(params):
        model = nnx.merge(graphdef, params, rest)
        first = model(tokens[:, :5], cache=init_cache(config, 2, 6), prefill=True)
        last = model(tokens[:, 5:], cache=first.cache)
        return last.hidden[:, 0], model(tokens).hidden[:, -1], last.cache.lengths

    decoded, full, lengths = both(params)
    np.testing.assert_allclose(decoded, full, atol=2e-5)
    assert lengths.tolist() == [6, 6]


@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("scan", [False, True])
def test_rematerialisation_changes_no_gradient(remat, scan):
    config = dataclasses.replace(SMALL, scan_layers=scan)
    graphdef, params, rest = make(config)
    again = dataclasses.replace(config, remat=remat)
    remat_graph = build(again)[0]
    tokens = tokens_for(config)
    batch = {"tokens": tokens, "targets": tokens}

    def gradient(graphdef):
        return jax.jit(jax.grad(lambda p: loss_fn(graphdef, nnx.merge_state(p, rest), batch)[0]))(params)

    chex.assert_trees_all_close(gradient(graphdef), gradient(remat_graph), atol=1e-6)


def test_documents_of_a_packed_row_do_not_see_one_another():
    graphdef, params, rest = make(SMALL)
    tokens = tokens_for(SMALL, batch=1, seq=20)
    segments = jnp.array([[1] * 7 + [2] * 9 + [0] * 4])

    @jax.jit
    def hidden(tokens, segments):
        return nnx.merge(graphdef, params, rest)(tokens, segment_ids=segments).hidden

    packed = hidden(tokens, segments)[0]
    changed = hidden(tokens.at[0, 3].set((tokens[0, 3] + 1) % 61), segments)[0]
    np.testing.assert_array_equal(packed[7:16], changed[7:16])
    assert np.abs(packed[3:7] - changed[3:7]).max() > 1e-3
    # A document in the middle of a row scores as it does alone: rotary attention only sees distances.
    alone = jax.jit(lambda t: nnx.merge(graphdef, params, rest)(t).hidden)(tokens[:, 7:16])[0]
    np.testing.assert_allclose(packed[7:16], alone, atol=2e-5)


@pytest.mark.slow
def test_one_expert_of_one_is_the_dense_feed_forward():
    dense = dataclasses.replace(SMALL, mlp_width=48)
    moe = dataclasses.replace(dense, num_experts=1, num_active_experts=1, expert_width=48)
    graphdef, params, rest = make(dense)
    moe_graph, moe_params, moe_rest = make(moe)
    pure, moe_pure = nnx.to_pure_dict(params), nnx.to_pure_dict(moe_params)
    for i in range(dense.num_layers):
        kernels = pure["layers"][i].pop("mlp")
        experts = {name: {"kernel": leaf["kernel"][None]} for name, leaf in kernels.items()}
        pure["layers"][i]["moe"] = moe_pure["layers"][i]["moe"] | {"experts": experts}
    nnx.replace_by_pure_dict(moe_params, pure)
    tokens = tokens_for(dense)

    def hidden(graphdef, params, rest):
        return jax.jit(lambda p: nnx.merge(graphdef, p, rest)(tokens).hidden)(params)

    np.testing.assert_allclose(hidden(moe_graph, moe_params, moe_rest), hidden(graphdef, params, rest), atol=2e-5)


@pytest.mark.slow
def test_bfloat16_compute_stays_close_to_float32():
    graphdef, params, rest = make(dataclasses.replace(SMALL, num_experts=4))
    half = dataclasses.replace(SMALL, num_experts=4, dtype="bfloat16")
    half_graph = build(half)[0]
    tokens = tokens_for(SMALL)
    batch = {"tokens": tokens, "targets": tokens}

    def value_and_grad(graphdef):
        return jax.jit(jax.value_and_grad(lambda p: loss_fn(graphdef, nnx.merge_state(p, rest), batch)[0]))(params)

    (full, full_grads), (low, low_grads) = value_and_grad(graphdef), value_and_grad(half_graph)
    assert abs(float(full) - float(low)) < 0.02 * float(full)
    assert {x.dtype for x in jax.tree.leaves(low_grads)} == {jnp.dtype("float32")}
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (full_grads, low_grads))
    assert float(jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)) > 0.99


def test_every_parameter_names_its_axes():
    for name in ("tiny-moe", "qwen3-0.6b"):
        abstract = nnx.eval_shape(lambda name=name: Transformer(preset(name), rngs=nnx.Rngs(0)))
        variables = jax.tree.leaves(nnx.state(abstract), is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable in variables:
            assert len(variable.get_metadata()["out_sharding"]) == len(variable.get_value().shape)


@pytest.mark.slow
def test_selection_biases_move_against_the_load():
    config = dataclasses.replace(SMALL, num_experts=4, num_active_experts=1, moe_balance="bias", expert_bias_rate=0.1)
    for scan in (False, True):
        model = Transformer(dataclasses.replace(config, scan_layers=scan), rngs=nnx.Rngs(0))
        model.update_expert_biases(jnp.array([[0.7, 0.1, 0.1, 0.1], [0.25] * 4]))
        layers = model.layers.moe.expert_bias[...] if scan else [b.moe.expert_bias[...] for b in model.layers]
        np.testing.assert_allclose(layers[0], [-0.045, 0.015, 0.015, 0.015], atol=1e-6)
        np.testing.assert_allclose(layers[1], 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_experts": 2, "num_active_experts": 3}, "num_active_experts"),
        ({"head_dim": 7}, "head_dim"),
        ({"width": 0}, "width"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_experts": -1}, "num_experts"),
        ({"loss_chunk": 0}, "loss_chunk"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(SMALL, **change)


def test_too_many_tokens_and_a_cache_with_segments_are_refused():
    graphdef, params, rest = make(SMALL)
    model = nnx.merge(graphdef, params, rest)
    with pytest.raises(ValueError, match="context_length"):
        model(jnp.zeros((1, 33), jnp.int32))
    with pytest.raises(ValueError, match="segment_ids"):
        model(
            jnp.zeros((1, 2), jnp.int32),
            segment_ids=jnp.ones((1, 2), jnp.int32),
            cache=init_cache(SMALL, 1, 4),
        )
    with pytest.raises(ValueError, match="slots"):
        init_cache(SMALL, 1, 64)
    with pytest.raises(ValueError, match="unknown 'nope'"):
        preset("nope")


def test_presets_have_their_published_sizes():
    def millions(name):
        abstract = nnx.eval_shape(lambda: Transformer(PRESETS[name], rngs=nnx.Rngs(0)))
        return sum(x.size for x in jax.tree.leaves(nnx.state(abstract, nnx.Param))) / 1e6

    # GPT-2 small without its position table (0.8 M) and biases; LLaMA-60M of GaLore; Qwen3-0.6B.
    assert millions("gpt2-small") == pytest.approx(123.6, abs=0.3)
    assert millions("llama-60m") == pytest.approx(58.1, abs=0.2)
    assert millions("qwen3-0.6b") == pytest.approx(596.0, abs=0.5)
