import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import stats

from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.growth import (
    Growth,
    _hashed_normal,
    clone_divergence,
    grow_depth,
    grow_opt_state,
    grow_width,
    layer_sources,
    perturb_clones,
)

GATES = ("softmax", "softmax_renorm", "sigmoid")


def _layer(gate="softmax_renorm", width=16, expert_width=24, num_experts=4, num_active=2, seed=0):
    layer = SparseMoE(width, expert_width, num_experts, num_active, gate=gate, rngs=nnx.Rngs(seed))
    layer.expert_bias[...] = 0.1 * jax.random.normal(jax.random.key(9), (num_experts,))
    return layer


def _wider(layer, gate, *, noise, num_active=None, factor=2):
    """The layer with the grown parameters of `layer`."""
    new = SparseMoE(
        layer.width,
        layer.experts.up.kernel.shape[-1],
        factor * layer.num_experts,
        num_active or factor * layer.num_active,
        gate=gate,
        rngs=nnx.Rngs(1),
    )
    nnx.update(new, grow_width(nnx.state(layer), jax.random.key(3), factor, noise=noise, gate=gate))
    return new


def _one(stacked, layer):
    return jax.tree.map(lambda x: x[layer], stacked)


def test_order_of_layers():
    assert layer_sources(3) == (0, 0, 1, 1, 2, 2)
    assert layer_sources(3, 3, "interpose_zero") == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert layer_sources(3, 2, "stack") == (0, 1, 2, 0, 1, 2)
    assert layer_sources(3, (1, 3, 1)) == (0, 1, 1, 1, 2)


@pytest.mark.parametrize("method", ["interpose", "stack", "interpose_zero"])
def test_stacked_and_separate_layers_grow_alike(method):
    rng = np.random.default_rng(0)
    leaves = {
        "attention": {"out": {"kernel": rng.normal(size=(3, 2, 4, 8))}},
        "moe": {
            "router": {"kernel": rng.normal(size=(3, 8, 4))},
            "experts": {"down": {"kernel": rng.normal(size=(3, 4, 6, 8))}},
        },
    }
    stacked = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"layers": leaves, "embed": np.ones((5, 8))})
    separate = {
        "embed": stacked["embed"],
        "layers": {i: _one(stacked["layers"], i) for i in range(3)},
    }
    key = jax.random.key(0)
    deep = grow_depth(stacked, 2, method), grow_depth(separate, 2, method)
    wide = [grow_width(tree, key) for tree in deep]
    for one, other in (deep, wide):
        assert len(other["layers"]) == 6
        for i in range(6):
            jax.tree.map(np.testing.assert_array_equal, _one(one["layers"], i), other["layers"][i])
        np.testing.assert_array_equal(one["embed"], stacked["embed"])
    source = layer_sources(3, 2, method)
    out = np.asarray(deep[0]["layers"]["attention"]["out"]["kernel"])
    for i, layer in enumerate(source):
        silent = method == "interpose_zero" and i % 2
        np.testing.assert_array_equal(
            out[i], 0 * out[i] if silent else stacked["layers"]["attention"]["out"]["kernel"][layer]
        )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("factor", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_width_without_noise_leaves_the_layer_as_it_was(gate, factor):
    layer, x = _layer(gate), jax.random.normal(jax.random.key(1), (64, 16))
    want = layer(x)[0]
    np.testing.assert_allclose(_wider(layer, gate, noise=0.0, factor=factor)(x)[0], want, rtol=1e-5, atol=1e-5)
    other = _wider(layer, gate, noise=0.0, factor=factor, num_active=2)(x)[0]
    assert jnp.linalg.norm(other - want) > 0.05 * jnp.linalg.norm(want)


@pytest.mark.slow
def test_noise_has_the_stated_size_and_originals_stay():
    layer = _layer(width=128, expert_width=160)
    old, new = (
        nnx.to_pure_dict(nnx.state(layer)),
        nnx.to_pure_dict(nnx.state(_wider(layer, "softmax_renorm", noise=0.01))),
    )
    for name in ("gate", "up", "down"):
        before, after = old["experts"][name]["kernel"], new["experts"][name]["kernel"]
        np.testing.assert_array_equal(after[:4], before)
        for original, clone in zip(before, after[4:], strict=True):
            np.testing.assert_allclose(jnp.std(clone - original) / jnp.std(original), 0.01, rtol=0.05)
    np.testing.assert_array_equal(new["router"]["kernel"][:, :4], old["router"]["kernel"])
    column = (new["router"]["kernel"][:, 4:] - old["router"]["kernel"]) / jnp.std(old["router"]["kernel"], axis=0)
    np.testing.assert_allclose(jnp.std(column), 0.01, rtol=0.15)
    np.testing.assert_array_equal(new["expert_bias"], jnp.tile(old["expert_bias"] / 2, 2))
    flat = jnp.concatenate(
        [(new["experts"][n]["kernel"][4:] - old["experts"][n]["kernel"]).reshape(4, -1) for n in ("gate", "up")]
    )
    correlation = np.corrcoef(np.asarray(flat))
    assert np.abs(correlation - np.eye(8)).max() < 0.05  # each matrix has its own noise
    x = jax.random.normal(jax.random.key(2), (512, 128))
    small, large = (_wider(layer, "softmax_renorm", noise=noise)(x)[0] - layer(x)[0] for noise in (0.01, 0.5))
    size = jnp.linalg.norm(layer(x)[0], axis=-1)
    assert 0.004 < jnp.median(jnp.linalg.norm(small, axis=-1) / size) < 0.04
    assert jnp.median(jnp.linalg.norm(large, axis=-1) / size) > 0.3


def test_copies_of_one_layer_get_noise_of_their_own():
    tree = {"layers": {"router": {"kernel": jnp.ones((1, 8, 4)) * jnp.arange(8.0)[:, None]}}}
    wide = grow_width(grow_depth(tree), jax.random.key(0))["layers"]["router"]["kernel"]
    np.testing.assert_array_equal(wide[0, :, :4], wide[1, :, :4])
    assert jnp.max(jnp.abs(wide[0, :, 4:] - wide[1, :, 4:])) > 0
    copied = grow_depth(grow_width(tree, jax.random.key(0)))["layers"]["router"]["kernel"]
    np.testing.assert_array_equal(copied[0], copied[1])
    np.testing.assert_array_equal(
        wide,
        perturb_clones(grow_width(grow_depth(tree), jax.random.key(0), noise=0.0), jax.random.key(0), 2)["layers"][
            "router"
        ]["kernel"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["softmax_renorm", "sigmoid"])
def test_only_noise_tells_copies_apart(gate):
    x, target = jax.random.normal(jax.random.key(1), (2, 256, 16))

    def trained(noise):
        layer = _wider(_layer(gate), gate, noise=noise)
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
        tx = optax.adam(1e-3)

        @jax.jit
        def step(params, state):
            loss = lambda p: jnp.mean((nnx.merge(graphdef, p, rest)(x)[0] - target) ** 2)  # noqa: E731
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        state, distances = tx.init(params), []
        for i in range(1, 51):
            params, state = step(params, state)
            if i in (10, 25, 50):
                distances.append(float(np.mean([jnp.mean(d) for d in clone_divergence(params).values()])))
        return distances

    assert trained(0.0) == [0.0, 0.0, 0.0]
    first, second, third = trained(0.01)
    assert 0 < first < second < third


@pytest.mark.parametrize("policy", ["copy", "scale", "reset"])
@pytest.mark.parametrize("masked", [False, True])
def test_optimizer_state(policy, masked):
    params = nnx.state(_layer(), nnx.Param)
    grads = jax.tree.map(lambda x: jnp.cos(7 * x), params)
    tx = optax.adam(1e-2)
    if masked:
        label = lambda p: jax.tree_util.tree_map_with_path(lambda k, _: "a" if "router" in str(k) else "b", p)  # noqa: E731
        tx = optax.partition({"a": optax.adam(1e-2), "b": optax.adam(1e-2)}, label)
    state = tx.update(grads, tx.init(params), params)[1]
    new_params = grow_width(params, jax.random.key(0))
    growth = Growth((), 2)
    new_state = grow_opt_state(state, params, growth, policy)
    assert jax.tree.structure(new_state) == jax.tree.structure(tx.init(new_params))
    if policy == "reset":
        jax.tree.map(np.testing.assert_array_equal, new_state, tx.init(new_params))
        return
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    want = nnx.to_pure_dict(tx.update(zeros(params), state, params)[0])
    got = nnx.to_pure_dict(tx.update(zeros(new_params), new_state, new_params)[0])
    np.testing.assert_allclose(got["router"]["kernel"][:, :4], want["router"]["kernel"], rtol=2e-4)
    np.testing.assert_allclose(got["experts"]["up"]["kernel"][4:], want["experts"]["up"]["kernel"], rtol=2e-4)


@pytest.mark.parametrize("gate", GATES)
def test_scaled_moments_are_those_of_the_gradients_of_the_grown_layer(gate):
    layer, x = _layer(gate), jax.random.normal(jax.random.key(1), (64, 16))

    def gradient(layer):
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
        return params, jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p, rest)(x)[0] ** 2))(params)

    (params, before), (_, after) = gradient(layer), gradient(_wider(layer, gate, noise=0.0))
    tx = optax.scale_by_adam(b1=0.0, b2=0.0)
    state = grow_opt_state(tx.update(before, tx.init(params))[1], params, Growth((), 2), "scale")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), state.mu, after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b**2, rtol=2e-3, atol=1e-4), state.nu, after)


def test_optimizer_states_that_mirror_nothing_are_refused_with_their_path():
    params = {"router": {"kernel": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match=r"\.trace.*router\.kernel"):
        grow_opt_state(optax.TraceState({"router": {"kernel": jnp.ones((5, 5))}}), params, Growth((), 2))
    with pytest.raises(ValueError, match="mirrors no parameter"):
        grow_opt_state((jnp.ones(3),), params, Growth((), 2))
    with pytest.raises(ValueError, match="policy"):
        grow_opt_state((), params, Growth((), 2), "keep")


def test_mistakes_are_named():
    moe, dense = nnx.state(_layer()), {"layers": {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}}
    key = jax.random.key(0)
    for factor in (0, -1, True):
        with pytest.raises(ValueError, match="factor"):
            layer_sources(3, factor)
        with pytest.raises(ValueError, match="factor"):
            grow_width(moe, key, factor)
    with pytest.raises(ValueError, match="one for each of 3"):
        layer_sources(3, (1, 2))
    with pytest.raises(ValueError, match="stack"):
        layer_sources(2, (1, 2), "stack")
    with pytest.raises(ValueError, match="method"):
        layer_sources(2, 2, "append")
    with pytest.raises(ValueError, match='node "layers"'):
        grow_depth(moe)
    with pytest.raises(ValueError, match="no common first axis"):
        grow_depth(dense)
    for noise in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="noise"):
            grow_width(moe, key, noise=noise)
    with pytest.raises(ValueError, match="no experts"):
        grow_width(dense, key)
    with pytest.raises(ValueError, match="cosine"):
        grow_width(moe, key, gate="cosine")
    with pytest.raises(ValueError, match="does not divide"):
        perturb_clones(moe, key, 3)
    with pytest.raises(ValueError, match="does not divide"):
        clone_divergence(moe, 3)


def test_noise_is_normal_and_independent():
    """Moments, tails, and no correlation between neighbours, experts or keys."""
    draw = [np.asarray(_hashed_normal(jax.random.key(seed), (256, 2048)), np.float64) for seed in (0, 1)]
    flat = draw[0].ravel()
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    for power, value in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert np.mean(flat**power) == pytest.approx(value, abs=0.03)
    assert 4.2 < np.abs(flat).max() < 6
    for other in (np.roll(flat, 1), np.roll(flat, 2048), draw[1].ravel()):
        assert abs(np.mean(flat * other)) < 5 / np.sqrt(flat.size)
        assert abs(np.mean((flat**2 - 1) * (other**2 - 1))) < 5 * 2 / np.sqrt(flat.size)
