"""What other families' models need: windows, learned positions, scaled rotary frequencies, models without arrays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer
from jaxlib_icml.nn import RopeScaling, rotary_angles


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 4},
        {"scan_layers": True},
        {"positions": "learned"},
        {"attention": "l2a", "pruned_layers": (1,)},
    ],
)
def test_the_abstract_model_is_the_real_one_without_arrays(changes):
    config = LMConfig(width=32, num_layers=3, num_heads=2, **changes)
    real, abstract = nnx.split(Transformer(config, rngs=nnx.Rngs(0))), nnx.split(abstract_transformer(config))
    assert real[0] == abstract[0]
    described = [
        [(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_flatten_with_path(state)[0]]
        for _, state in (real, abstract)
    ]
    assert described[0] == described[1]


def test_learned_positions_restart_with_every_document():
    config = LMConfig(vocab_size=50, width=32, num_layers=2, num_heads=2, positions="learned", norm="layernorm")
    model = Transformer(config, rngs=nnx.Rngs(0))
    first, second = jnp.arange(5)[None], jnp.arange(7)[None] + 9
    packed = model(jnp.concatenate([first, second], axis=1), segment_ids=jnp.array([[1] * 5 + [2] * 7])).hidden
    apart = jnp.concatenate([model(first).hidden, model(second).hidden], axis=1)
    np.testing.assert_allclose(packed, apart, atol=1e-5)
    with_zero = model.position_embed.embedding[...].at[:].set(0.0)
    model.position_embed.embedding[...] = with_zero
    assert np.abs(model(first).hidden - apart[:, :5]).max() > 1e-3  # positions matter


def frequencies(scaling, half=32, theta=10000.0):
    plain = theta ** (-np.arange(half) / half)
    return plain, scaling.frequencies(plain, theta)


def test_linear_scaling_stretches_all_positions():
    scaling = RopeScaling("linear", 4.0, 128)
    slow = rotary_angles(jnp.arange(0, 400, 4), 64, scaling=scaling)
    np.testing.assert_allclose(slow[0], rotary_angles(jnp.arange(100), 64)[0], atol=1e-5)


def test_llama3_scaling_by_its_definition():
    plain, scaled = frequencies(RopeScaling("llama3", 8.0, 1024, low_frequency_factor=1.0, high_frequency_factor=4.0))
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 1024 / 4:
            assert after == before
        elif wavelength > 1024:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (1024 / wavelength - 1) / 3
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert len(set(np.round(plain / scaled, 6))) > 3  # all three regions are there


def test_yarn_scaling_by_its_definition():
    scaling = RopeScaling("yarn", 4.0, 512, beta_fast=32.0, beta_slow=1.0)
    plain, scaled = frequencies(scaling)
    turns = 512 * plain / (2 * math.pi)
    np.testing.assert_array_equal(scaled[turns > 64], plain[turns > 64])
    np.testing.assert_allclose(scaled[turns < 0.5], plain[turns < 0.5] / 4)
    ratio = scaled / plain
    assert np.all(np.diff(ratio) <= 1e-12)
    first = math.floor(32 * math.log(512 / (32 * 2 * math.pi)) / math.log(10000))
    last = math.ceil(32 * math.log(512 / (2 * math.pi)) / math.log(10000))
    index = (first + last) // 2
    kept = 1 - (index - first) / (last - first)
    assert ratio[index] == pytest.approx(kept + (1 - kept) / 4)
    assert scaling.amplitude == pytest.approx(1 + 0.1 * math.log(4))
    cos, sin = rotary_angles(jnp.arange(9), 64, scaling=scaling)
    np.testing.assert_allclose(np.hypot(cos, sin), scaling.amplitude, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": "yarn", "rope_factor": 0.5}, "rope_factor"),
        ({"rope_scaling": "llama3", "rope_factor": float("nan")}, "rope_factor"),
        ({"rope_low_frequency_factor": 4.0}, "rope_high_frequency_factor"),
        ({"rope_beta_slow": 0.0}, "rope_beta_fast"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"norm_epsilon": -1.0}, "norm_epsilon"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_original_context": 0}, "rope_original_context"),
        ({"num_experts": 4, "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_misfits_are_named(changes, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        LMConfig(**changes)
