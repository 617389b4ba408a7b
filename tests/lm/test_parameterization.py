"""The rules in the language model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer
from jaxlib_icml.lm.families import config_to_hub
from jaxlib_icml.lm.parameterization import moe_shape, parameterized, transformer_probe
from jaxlib_icml.moe import UNIT_CONSTANTS, BaseSpec, init_params
from jaxlib_icml.moe.coord_check import coord_check
from jaxlib_icml.moe.parameterization import grouped_leaves
from tests.moe.markov import markov_text

CONFIG = LMConfig(
    vocab_size=40,
    context_length=32,
    width=32,
    num_layers=2,
    num_heads=2,
    num_experts=4,
    num_active_experts=1,
    expert_width=64,
    activation="gelu",
)
BASE = BaseSpec(moe_shape(CONFIG), constants=UNIT_CONSTANTS)


def tokens(rows=4, seq=16, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, seq), 0, 40)


@pytest.mark.slow
def test_factors_of_the_forward_pass():
    """Scales equal weights multiplied by hand."""
    plain = Transformer(dataclasses.replace(CONFIG, moe_gate="sigmoid"), rngs=nnx.Rngs(0))
    scaled = dataclasses.replace(plain.config, residual_scale=0.25, attention_scale=1 / 16, logit_scale=0.5)
    model = Transformer(scaled, rngs=nnx.Rngs(0))
    for block in plain.layers:
        block.attention.query.kernel[...] *= 16**0.5 / 16
        block.attention.out.kernel[...] *= 0.25
        block.moe.experts.down.kernel[...] *= 0.25
    plain.head.kernel[...] *= 0.5
    x = tokens()
    hooks = {"capture": ("attention_pattern", "attention_output", "mlp_output")}
    for options in ({}, hooks):
        ours, by_hand = model(x, **options), plain(x, **options)
        np.testing.assert_allclose(model.logits(ours.hidden), plain.logits(by_hand.hidden), atol=2e-6)
        for name, value in by_hand.activations.items():
            np.testing.assert_allclose(ours.activations[name], value, atol=2e-6)


def test_parameterized_architecture():
    deep = dataclasses.replace(CONFIG, num_layers=8, width=64, num_heads=4, expert_width=128)
    new = parameterized(deep, BASE)
    assert (new.residual_scale, new.attention_scale, new.logit_scale) == (1 / 8, 1 / 16, 1 / 2)
    assert (new.moe_gate, new.moe_balance) == ("sigmoid", "bias")
    assert parameterized(new, BASE) == new
    standard = parameterized(deep, BASE, "sp")
    assert (standard.residual_scale, standard.attention_scale, standard.logit_scale) == (1, None, 1)
    with pytest.raises(ValueError, match="l2a"):
        parameterized(dataclasses.replace(CONFIG, attention="l2a"), BASE)
    with pytest.raises(ValueError, match="residual_scale"):
        dataclasses.replace(CONFIG, residual_scale=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_experts": 0, "mlp_width": 128},
        {"scan_layers": True, "shared_expert_width": 16},
        {"tie_embeddings": True, "norm": "layernorm", "qkv_bias": True, "positions": "learned"},
        {"qk_norm": True, "num_kv_heads": 1, "activation": "swiglu"},
    ],
)
def test_every_parameter_has_a_rule(change):
    config = dataclasses.replace(CONFIG, **change)
    base = BaseSpec(moe_shape(config))
    params = nnx.state(abstract_transformer(config), nnx.Param)
    assert len(grouped_leaves(params, moe_shape(config))) == len(jax.tree.leaves(params))
    made = init_params(params, jax.random.key(0), base, moe_shape(config))
    model = Transformer(parameterized(config, base), rngs=nnx.Rngs(0))
    nnx.update(model, made)
    assert bool(jnp.all(jnp.isfinite(model(tokens()).hidden)))


def test_no_checkpoint_format_has_the_factors():
    config = dataclasses.replace(CONFIG, num_experts=0, activation="swiglu")
    config_to_hub(config)
    with pytest.raises(ValueError, match="residual_scale"):
        config_to_hub(dataclasses.replace(config, residual_scale=0.5))


def test_probe_balances_experts_and_watches_all_layers():
    probe = transformer_probe(CONFIG, BASE)
    params, rest = probe.init(jax.random.key(0))
    batch = {"tokens": tokens(), "targets": tokens(seed=1)}
    loss, moved = jax.jit(probe.loss)(params, rest, batch)
    assert float(loss) == pytest.approx(np.log(40), rel=0.02)
    assert all(float(jnp.abs(bias).max()) > 0 for bias in jax.tree.leaves(moved))
    shapes = {name: value.shape for name, value in probe.activations(params, rest, batch).items()}
    assert shapes == {
        "stream": (4, 16, 32),
        "router_logits": (2, 64, 4),
        "pre_activations": (2, 4, 64, 64),
        "expert_outputs": (2, 4, 64, 32),
        "logits": (4, 16, 40),
    }


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["width", "num_layers"])
def test_transformer_moves_alike_at_every_size(axis):
    def config(shape):
        return dataclasses.replace(
            CONFIG,
            width=shape.width,
            num_heads=shape.width // 16,
            num_layers=shape.num_layers,
            expert_width=shape.expert_width,
            scan_layers=True,
        )

    sizes = {
        "width": [{"width": n, "num_heads": n // 16, "expert_width": 2 * n} for n in (32, 64, 128)],
        "num_layers": [{"num_layers": depth} for depth in (2, 4, 8)],
    }[axis]
    shapes = [moe_shape(dataclasses.replace(CONFIG, **size)) for size in sizes]
    text = markov_text(5, 16, 33, 40)
    batches = [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in text]
    make = lambda shape: transformer_probe(config(shape), BASE)  # noqa: E731
    found = coord_check(make, BASE, shapes, batches, axis=axis)
    for slope in found.slopes.values():
        assert abs(slope) < 0.2, found.table()
