"""Dense language models made mixtures of experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer
from jaxlib_icml.lm.conversion import convert_to_moe, converted_config, trajectory_of
from jaxlib_icml.moe.prism_moe import PrismConfig

CONFIG = LMConfig(vocab_size=32, context_length=32, width=16, num_layers=2, num_heads=2, mlp_width=64)
PRISM = PrismConfig(num_experts=6, num_active=2, min_tokens=16)


def model(config):
    return nnx.split(Transformer(config, rngs=nnx.Rngs(0)))


def logits(config, state, tokens):
    new = nnx.merge(nnx.split(abstract_transformer(config))[0], state)
    return new.logits(new(tokens).hidden)


TOKENS = jax.random.randint(jax.random.key(1), (8, 32), 0, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"scan_layers": True, "activation": "gelu", "tie_embeddings": True},
        {"positions": "learned", "norm": "layernorm", "qkv_bias": True, "residual_scale": 0.5},
    ],
)
def test_with_all_experts_it_is_the_dense_model(change):
    config = dataclasses.replace(CONFIG, **change)
    _, state = model(config)
    before = jax.tree.map(jnp.copy, state)
    done = convert_to_moe(state, config, TOKENS, PRISM, compensate=False, router_delta=4)
    everything = dataclasses.replace(done.config, num_active_experts=6)
    np.testing.assert_allclose(logits(everything, done.state, TOKENS), logits(config, state, TOKENS), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, state)
    assert jax.tree.structure(done.state) == jax.tree.structure(nnx.split(abstract_transformer(done.config))[1])
    # The reports are about what the model then computes.
    few = logits(done.config, done.state, TOKENS)
    assert float(jnp.abs(few - logits(config, state, TOKENS)).max()) > 1e-3


@pytest.mark.slow
def test_repair_brings_the_layers_closer():
    _, state = model(CONFIG)
    seen = []
    done = convert_to_moe(state, CONFIG, TOKENS, PRISM, on_layer=lambda i, report: seen.append(i))
    assert seen == [0, 1]
    for report in done.reports:
        assert report.error < report.cut_error < report.shared_error
        assert report.load.sum() == pytest.approx(1)
        assert 0 < report.shared_step <= 0.05 + 1e-6


@pytest.mark.slow
def test_own_text():
    graphdef, state = model(CONFIG)
    own = trajectory_of(graphdef, state, TOKENS[:, :10], jax.random.key(0), 32)
    assert own.shape == (8, 32)
    np.testing.assert_array_equal(own[:, :10], TOKENS[:, :10])
    np.testing.assert_array_equal(own, trajectory_of(graphdef, state, TOKENS[:, :10], jax.random.key(0), 32))
    assert trajectory_of(graphdef, state, TOKENS, jax.random.key(0), 32).shape == (8, 32)
    convert_to_moe(state, CONFIG, TOKENS, PRISM, trajectory=own)


def test_what_cannot_be_converted_is_named():
    _, state = model(CONFIG)
    with pytest.raises(ValueError, match="experts already"):
        converted_config(dataclasses.replace(CONFIG, num_experts=4), PRISM)
    with pytest.raises(ValueError, match="mlp_bias"):
        converted_config(dataclasses.replace(CONFIG, mlp_bias=True), PRISM)
    with pytest.raises(ValueError, match="do not divide among 7"):
        convert_to_moe(state, CONFIG, TOKENS, PrismConfig(num_experts=7))
    with pytest.raises(ValueError, match="attention = l2a"):
        convert_to_moe(state, dataclasses.replace(CONFIG, attention="l2a"), TOKENS, PRISM)
    with pytest.raises(ValueError, match="none to calibrate on"):
        convert_to_moe(state, CONFIG, TOKENS[:0], PRISM)
    with pytest.raises(ValueError, match="num_steps"):
        convert_to_moe(state, CONFIG, TOKENS, PRISM, num_steps=0)
    broken = nnx.from_flat_state(
        [
            (path, x.replace(x[...] * jnp.nan) if path == ("layers", 1, "mlp", "down", "kernel") else x)
            for path, x in nnx.to_flat_state(state)
        ]
    )
    with pytest.raises(ValueError, match=r"layer \d: .*not finite"):
        convert_to_moe(broken, CONFIG, TOKENS, PRISM)
