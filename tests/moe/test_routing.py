import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.moe import SparseMoE, update_expert_bias
from jaxlib_icml.moe.routing import GATES, route, router_logits
from tests.moe.oracle import EXPERTS, HIDDEN, WIDTH, Oracle, _apply, _layer, _numpy_tree, _route, _tokens

# --- ties


def test_ties_go_to_the_lowest_index_and_are_counted():
    layer = _layer(gate="sigmoid")
    layer.router.kernel[...] = jnp.zeros((WIDTH, EXPERTS))
    routing = _route(layer, _tokens(10))
    np.testing.assert_array_equal(routing.indices, np.tile([0, 1], (10, 1)))
    assert routing.stats.num_ties == 10
    assert _route(_layer(gate="sigmoid"), _tokens(10)).stats.num_ties == 0
    # With all experts active nothing is rejected, so no tie decides anything.
    assert _route(_layer(num_active=EXPERTS), jnp.zeros((3, WIDTH))).stats.num_ties == 0


@pytest.mark.parametrize("layout", ["appended", "interleaved"])
def test_clones_are_chosen_together(layout):
    # Width growth doubles experts and active experts; equal scores must not split a pair.
    small = _layer(gate="softmax_renorm")
    router = small.router.kernel[...]
    doubled = jnp.tile(router, (1, 2)) if layout == "appended" else jnp.repeat(router, 2, axis=1)
    large = SparseMoE(WIDTH, HIDDEN, 2 * EXPERTS, 4, rngs=nnx.Rngs(0))
    large.router.kernel[...] = doubled
    x = _tokens(64)
    origin = (lambda i: i % EXPERTS) if layout == "appended" else (lambda i: i // 2)
    grown, parent = _route(large, x), _route(small, x)
    np.testing.assert_array_equal(
        np.sort(origin(np.asarray(grown.indices)), axis=1),
        np.sort(np.repeat(parent.indices, 2, axis=1), axis=1),
    )
    assert grown.stats.num_ties == 0


@pytest.mark.parametrize("path", ["blocked", "ragged"])
def test_all_scores_equal_still_computes_the_chosen_experts(path):
    layer = _layer(path, gate="softmax")
    layer.router.kernel[...] = jnp.zeros((WIDTH, EXPERTS))
    x = _tokens(9)
    expected = Oracle("softmax", "sum", 2)(np.asarray(x, np.float64), _numpy_tree(layer))
    np.testing.assert_allclose(_apply(layer, x), expected, atol=1e-5)


# --- statistics and balance


@pytest.mark.parametrize("gate", GATES)
def test_statistics_equal_numpy(gate):
    layer = _layer(gate=gate)
    x = _tokens(3, 16)
    mask = np.random.default_rng(1).random((3, 16)) < 0.7
    run = nnx.jit(lambda m, x, mask: m.route(x, mask).stats)
    stats = run(layer, x.reshape(-1, WIDTH), jnp.asarray(mask.reshape(-1)))
    oracle, tree = Oracle(gate, "sum", 2), _numpy_tree(layer)
    routed = [oracle.route(token, tree) for token in np.asarray(x, np.float64)[mask]]
    load = np.array([sum(i in weights for *_, weights in routed) for i in range(EXPERTS)]) / len(routed)
    prob = np.mean([probs for _, probs, _ in routed], axis=0)
    share = load[load > 0] / 2
    expected = {
        "load": load,
        "router_prob": prob,
        "entropy": -np.sum(share * np.log(share)),
        "max_violation": np.max(np.abs(load * EXPERTS / 2 - 1)),
        "aux_loss": EXPERTS / 2 * np.sum(load * prob),
        "z_loss": np.mean([np.log(np.sum(np.exp(logits))) ** 2 for logits, *_ in routed]),
        "num_ties": 0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(stats, name), value, rtol=1e-5, err_msg=name)


def test_statistics_at_perfect_balance():
    layer = SparseMoE(4, 3, 4, 1, gate="softmax", rngs=nnx.Rngs(0))
    layer.router.kernel[...] = 50 * jnp.eye(4)
    stats = _route(layer, jnp.tile(jnp.eye(4), (5, 1))).stats
    np.testing.assert_allclose(stats.aux_loss, 1.0, rtol=1e-6)
    np.testing.assert_allclose(stats.entropy, np.log(4), rtol=1e-6)
    np.testing.assert_allclose(stats.max_violation, 0.0, atol=1e-6)


def test_selection_bias_changes_the_choice_only():
    layer = _layer(gate="softmax")
    x = _tokens(40)
    before = _route(layer, x)
    layer.expert_bias[...] = jnp.zeros(EXPERTS).at[1].set(2.0)
    after = _route(layer, x)
    assert np.all(np.any(np.asarray(after.indices) == 1, axis=1))
    np.testing.assert_array_equal(after.probs, before.probs)
    chosen = np.take_along_axis(np.asarray(before.probs), np.asarray(after.indices), axis=1)
    np.testing.assert_array_equal(after.weights, chosen)

    def total(bias):
        routing = route(before.logits, bias, num_active=2, gate="softmax", combine="sum")
        return jnp.sum(routing.weights) + routing.stats.aux_loss

    assert not np.any(jax.grad(total)(jnp.zeros(EXPERTS)))


@pytest.mark.parametrize(("experts", "num_active"), [(4, 1), (16, 2)])
def test_bias_updates_balance_a_skewed_router(experts, num_active):
    # Sheet check 8: a constant +2 on the first expert's logit, removed by the biases within 300 updates.
    kernel = jax.random.normal(jax.random.key(0), (32, experts)) / 32**0.5
    kappa = num_active / experts

    def step(bias, key):
        logits = router_logits(jax.random.normal(key, (1024, 32)), kernel, gate="sigmoid").at[:, 0].add(2.0)
        load = route(logits, bias, num_active=num_active, gate="sigmoid", combine="mean").stats.load
        return update_expert_bias(bias, load, kappa, 0.01), (load, jnp.sum(bias))

    keys = jax.random.split(jax.random.key(5), 300)
    _, (loads, sums) = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(experts), keys))()
    violation = np.max(np.abs(np.asarray(loads) - kappa), axis=1) / kappa
    assert violation[0] > 0.5
    assert np.mean(violation[-20:]) < 0.25
    np.testing.assert_allclose(sums, 0.0, atol=1e-5)
