import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer
from jaxlib_icml.lm.growth import (
    active_parameters,
    chinchilla_boundary,
    cliff_index,
    flops_per_token,
    grow,
    grown_config,
    growth_plan,
    norm_profile,
)
from jaxlib_icml.moe.growth import grow_depth, grow_width

CONFIG = LMConfig(
    vocab_size=32, context_length=16, width=16, num_layers=2, num_heads=2, num_experts=4, num_active_experts=2
)
DENSE = LMConfig(vocab_size=32, context_length=16, width=16, num_layers=2, num_heads=2)
KEY = jax.random.key(5)


def _model(config):
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(0)))
    for path, x in nnx.to_flat_state(state):
        if path[-1] == "expert_bias":
            x.set_value(0.05 * jax.random.normal(jax.random.key(len(path)), x.shape))
    return state


def _logits(state, config):
    model = nnx.merge(nnx.split(abstract_transformer(config))[0], state)
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, 32)
    return model.logits(model(tokens).hidden)


def _equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(one), nnx.to_pure_dict(other))


@pytest.mark.parametrize("gate", ["softmax", "softmax_renorm", "sigmoid"])
def test_width_without_noise_leaves_the_model_as_it_was(gate):
    config = LMConfig(**{**CONFIG.__dict__, "moe_gate": gate, "moe_balance": "bias"})
    state = _model(config)
    wide, new = grow(state, config, key=KEY, depth=1, noise=0.0)
    assert (new.num_experts, new.num_active_experts, new.resolved_expert_width) == (8, 4, config.resolved_expert_width)
    want, got = _logits(state, config), _logits(wide, new)
    np.testing.assert_allclose(got, want, atol=1e-5)
    undoubled = LMConfig(**{**new.__dict__, "num_active_experts": 2})
    change = _logits(wide, undoubled) - want
    assert jnp.sqrt(jnp.mean(change**2) / jnp.mean(want**2)) > 0.05


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_orders_agree_bit_for_bit_and_silent_copies_change_nothing(scan):
    config = LMConfig(**{**CONFIG.__dict__, "scan_layers": scan})
    state = _model(config)
    grown, new = grow(state, config, key=KEY)
    other, same = grow(state, config, key=KEY, order="width_first")
    assert new == same
    assert new.num_layers == 4
    _equal(grown, other)
    _equal(grown, grow_width(grow_depth(state), KEY))
    quiet = grow(state, config, key=KEY, noise=0.0)[0]
    _equal(quiet, grow_depth(grow_width(state, KEY, noise=0.0)))
    assert jax.tree.structure(grown) == jax.tree.structure(nnx.state(abstract_transformer(new)))
    silent, deep = grow(state, config, key=KEY, width=1, method="interpose_zero")
    np.testing.assert_allclose(_logits(silent, deep), _logits(state, config), atol=1e-5)
    assert jnp.isfinite(_logits(grown, new)).all()


def test_stacked_layers_grow_as_separate_ones_do():
    config = LMConfig(**{**CONFIG.__dict__, "scan_layers": True})
    state = _model(config)
    flat = {p: x[...] for p, x in nnx.to_flat_state(state)}
    separate = nnx.state(Transformer(CONFIG, rngs=nnx.Rngs(0)))
    for path, x in nnx.to_flat_state(separate):
        x.set_value(flat[path] if path[0] != "layers" else flat[(path[0], *path[2:])][path[1]])
    (one, new), (other, _) = grow(state, config, key=KEY), grow(separate, CONFIG, key=KEY)
    stacked = {p: x[...] for p, x in nnx.to_flat_state(one)}
    for path, x in nnx.to_flat_state(other):
        want = stacked[path] if path[0] != "layers" else stacked[(path[0], *path[2:])][path[1]]
        np.testing.assert_allclose(x[...], want, rtol=1e-5, atol=1e-8)
    assert new.scan_layers


def test_sizes_follow_the_closed_forms():
    wide, deep = (grown_config(CONFIG, depth=d, width=w)[0] for d, w in ((1, 2), (2, 1)))
    layers, matrices, size = 2, 3, CONFIG.width * CONFIG.resolved_expert_width
    router = layers * CONFIG.width * CONFIG.num_experts
    assert active_parameters(wide) - active_parameters(CONFIG) == layers * matrices * size * 2 + router
    assert flops_per_token(wide) - flops_per_token(CONFIG) == 2 * (layers * matrices * size * 2 + router)
    head = 2 * CONFIG.width * CONFIG.vocab_size
    assert flops_per_token(deep) - head == 2 * (flops_per_token(CONFIG) - head)
    attention = layers * (2 * 4 * CONFIG.width**2 + 4 * CONFIG.width * (16 + 1) // 2)
    experts = 2 * layers * matrices * size * CONFIG.num_active_experts
    assert flops_per_token(CONFIG) == attention + experts + 2 * router + head
    assert flops_per_token(CONFIG, backward=True) == 3 * flops_per_token(CONFIG)
    norms = (2 * layers + 1) * CONFIG.width
    attention_weights = layers * 4 * CONFIG.width**2
    used = layers * matrices * size * CONFIG.num_active_experts
    assert active_parameters(CONFIG) == norms + attention_weights + used + router + head // 2 + CONFIG.width


def test_cliff_of_stacking_and_of_interposition():
    rising = {"up": np.arange(1.0, 9.0)}
    assert cliff_index({"up": np.tile(rising["up"], 2)}, rising) == {"up": 7.0}
    assert cliff_index({"up": np.repeat(rising["up"], 2)}, rising) == {"up": 1.0}
    state = _model(CONFIG)
    profile, base = norm_profile(grow_depth(state)), norm_profile(state)
    assert base.keys() == {
        *(f"attention.{n}.kernel" for n in ("query", "key", "value", "out")),
        *(f"moe.experts.{n}.kernel" for n in ("gate", "up", "down")),
        "moe.router.kernel",
    }
    kernel = nnx.to_pure_dict(state)["layers"][1]["attention"]["out"]["kernel"]
    np.testing.assert_allclose(base["attention.out.kernel"][1], np.sqrt(np.mean(np.square(kernel))), rtol=1e-6)
    for name, values in profile.items():
        np.testing.assert_array_equal(values, np.repeat(base[name], 2))


def test_plan():
    assert chinchilla_boundary(10) == 12_000
    assert growth_plan(12_001, 10) == "interpose"
    assert growth_plan(12_000, 10) == "stack"


def test_mistakes_are_named():
    state = _model(CONFIG)
    for arguments, message in (
        ({"depth": 0}, "depth"),
        ({"depth": (1, 0)}, "depth"),
        ({"depth": (1, 2, 3)}, "one for each of 2"),
        ({"width": 0}, "width"),
        ({"method": "append"}, "method"),
        ({"order": "both"}, "order"),
        ({"noise": -1.0}, "noise"),
    ):
        with pytest.raises(ValueError, match=message):
            grow(state, CONFIG, key=KEY, **arguments)
    with pytest.raises(ValueError, match="width must be 1"):
        grown_config(DENSE)
    with pytest.raises(ValueError, match="cosine"):
        grown_config(LMConfig(**{**CONFIG.__dict__, "moe_gate": "cosine"}))
    with pytest.raises(ValueError, match="not a model of this config"):
        grow(state, LMConfig(**{**CONFIG.__dict__, "num_experts": 8}), key=KEY)
    with pytest.raises(ValueError, match="flops_spent"):
        growth_plan(-1.0, 10)
    with pytest.raises(ValueError, match="active"):
        chinchilla_boundary(0)
    with pytest.raises(ValueError, match="families"):
        cliff_index({}, {"up": np.ones(2)})
    with pytest.raises(ValueError, match="fewer than two"):
        cliff_index({"up": np.ones(2)}, {"up": np.ones(1)})
