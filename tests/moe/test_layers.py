"""SparseMoE against a float64 per-token loop, its paths against one another, and its statistics."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.moe import ExpertBias, SparseMoE, update_expert_bias
from jaxlib_icml.moe.dispatch import ExpertKernels, blocked_experts, ragged_experts
from jaxlib_icml.moe.routing import COMBINES, GATES, route, router_logits

WIDTH, HIDDEN, EXPERTS = 12, 20, 6


# --- an independent implementation: one token at a time, float64


def _gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def _softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def _feed_forward(x, kernels):
    up = x @ kernels["up"]
    hidden = x @ kernels["gate"] / (1 + np.exp(-(x @ kernels["gate"]))) * up if "gate" in kernels else _gelu(up)
    return hidden @ kernels["down"]


@dataclasses.dataclass
class Oracle:
    """Outputs and per-token routing of the loop; `tree` holds float64 copies of the layer's arrays."""

    gate: str
    combine: str
    num_active: int

    def route(self, x, tree):
        router, bias = tree["router"]["kernel"], tree["expert_bias"]
        if self.gate == "cosine":
            logits = 10.0 * (x @ router) / (np.linalg.norm(x) * np.linalg.norm(router, axis=0))
        else:
            logits = x @ router
        squashed = 1 / (1 + np.exp(-logits)) if self.gate == "sigmoid" else _softmax(logits)
        score = (logits if self.gate == "cosine" else squashed) + bias
        chosen = sorted(range(len(score)), key=lambda i: (-score[i], i))[: self.num_active]
        total = sum(squashed[i] for i in chosen)
        weights = {}
        for i in chosen:
            if self.combine == "soft":
                weights[i] = self.num_active * squashed[i] / total
                continue
            value = {"sigmoid": squashed[i], "softmax": squashed[i], "softmax_renorm": squashed[i] / total}
            weights[i] = value.get(self.gate, 1.0) / (self.num_active if self.combine == "mean" else 1)
        return logits, squashed / squashed.sum(), weights

    def __call__(self, xs, tree):
        out = np.zeros_like(xs)
        for t, x in enumerate(xs):
            for i, weight in self.route(x, tree)[2].items():
                kernels = {name: matrix["kernel"][i] for name, matrix in tree["experts"].items()}
                out[t] += weight * _feed_forward(x, kernels)
            if "shared" in tree:
                out[t] += _feed_forward(x, {name: matrix["kernel"] for name, matrix in tree["shared"].items()})
        return out


def _numpy_tree(layer):
    pure = nnx.to_pure_dict(nnx.state(layer))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), pure)


def _layer(path="blocked", num_active=2, **options):
    options = {"block_size": 8, "activation": "swiglu"} | options
    return SparseMoE(WIDTH, HIDDEN, EXPERTS, num_active, path=path, rngs=nnx.Rngs(3), **options)


def _tokens(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), (*shape, WIDTH))


_apply = nnx.jit(lambda layer, x: layer(x)[0])
_route = nnx.jit(lambda layer, x: layer.route(x))


def _value_and_grads(layer):
    """A function of (layer, x, token_mask): output, statistics, gradients of a generic loss."""
    graph = nnx.graphdef(layer)

    @jax.jit
    def run(params, rest, x, token_mask):
        def loss(params, x):
            y, stats = nnx.merge(graph, params, rest)(x, token_mask=token_mask)
            return jnp.sum(jnp.sin(y)) + 0.3 * stats.aux_loss + 0.1 * stats.z_loss, (y, stats)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def call(layer, x, token_mask=None):
        (_, (y, stats)), grads = run(nnx.state(layer, nnx.Param), nnx.state(layer, ExpertBias), x, token_mask)
        return y, stats, jax.tree.map(jnp.asarray, nnx.to_pure_dict(grads[0])), grads[1]

    return call


# --- values


@pytest.mark.parametrize("gate", GATES)
def test_output_equals_per_token_loop(gate):
    layer = _layer(gate=gate, combine="soft" if gate == "cosine" else None, shared_expert_width=7)
    layer.expert_bias[...] = 0.2 * jax.random.normal(jax.random.key(9), (EXPERTS,))
    x = _tokens(29)
    expected = Oracle(gate, layer.combine, 2)(np.asarray(x, np.float64), _numpy_tree(layer))
    np.testing.assert_allclose(_apply(layer, x), expected, atol=1e-5, rtol=1e-5)


def test_choices_and_weights_of_every_gate_and_combination_equal_the_loop():
    x, bias = _tokens(29), 0.2 * jax.random.normal(jax.random.key(9), (EXPERTS,))
    kernel = jax.random.normal(jax.random.key(8), (WIDTH, EXPERTS))
    cases = list(itertools.product(GATES, COMBINES))

    @jax.jit
    def run(x, kernel, bias):
        return [
            route(router_logits(x, kernel, gate=gate), bias, num_active=2, gate=gate, combine=combine)
            for gate, combine in cases
        ]

    tree = jax.tree.map(lambda a: np.asarray(a, np.float64), {"router": {"kernel": kernel}, "expert_bias": bias})
    for (gate, combine), routing in zip(cases, run(x, kernel, bias), strict=True):
        for t, token in enumerate(np.asarray(x, np.float64)):
            logits, probs, weights = Oracle(gate, combine, 2).route(token, tree)
            assert list(weights) == routing.indices[t].tolist()
            np.testing.assert_allclose(routing.weights[t], list(weights.values()), rtol=1e-5)
            np.testing.assert_allclose(routing.logits[t], logits, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(routing.probs[t], probs, rtol=1e-4)


def test_default_combine_is_mean_for_sigmoid_and_sum_otherwise():
    assert {gate: _layer(gate=gate).combine for gate in GATES} == {
        "sigmoid": "mean",
        "softmax": "sum",
        "softmax_renorm": "sum",
        "cosine": "sum",
    }


@pytest.mark.parametrize(
    ("activation", "num_active", "biases"),
    [pytest.param("swiglu", 2, (0.0, -9.0), marks=pytest.mark.slow), ("gelu", 1, (0.0, -9.0, 9.0))],
)
def test_paths_agree_in_values_and_gradients(activation, num_active, biases):
    # Sheet check 7: all experts busy, an expert without tokens, an expert with all of them.
    results = {}
    for path in ("dense", "blocked", "ragged"):
        # The plain softmax gate, so that the router has a gradient with one active expert too.
        layer = _layer(path, num_active, activation=activation, gate="softmax", shared_expert_width=4)
        run = _value_and_grads(layer)
        for bias in biases:
            layer.expert_bias[...] = jnp.zeros(EXPERTS).at[2].set(bias)
            results[path, bias] = run(layer, _tokens(5, 9))
    for bias in biases:
        _, stats, gradients, _ = results["dense", bias]
        experts = [matrix["kernel"] for matrix in gradients["experts"].values()]
        busy = [bool(jnp.any(matrix[2])) for matrix in experts]
        if bias:
            assert stats.load[2] == (bias > 0)
            assert busy == [bias > 0] * len(experts)
        else:
            assert 0 < stats.load[2] < 1
            assert all(jnp.any(leaf) for leaf in jax.tree.leaves(gradients))
        for path in ("blocked", "ragged"):
            chex.assert_trees_all_close(results[path, bias], results["dense", bias], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_automatic_path_is_the_blocked_one_on_cpu():
    x, lowered = _tokens(30), {}
    for path in ("auto", "blocked", "dense"):
        graph, params, rest = nnx.split(_layer(path), nnx.Param, ...)
        loss = lambda params, x, graph=graph, rest=rest: jnp.sum(nnx.merge(graph, params, rest)(x)[0])  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
        lowered[path] = compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]
    assert lowered["auto"] == lowered["blocked"] != lowered["dense"]


@pytest.mark.parametrize(
    ("gate", "activation"), [("sigmoid", "gelu"), ("softmax_renorm", "swiglu"), ("cosine", "gelu")]
)
def test_gradients_equal_differences_of_the_float64_loop(gate, activation):
    combine = "soft" if gate == "cosine" else "mean"
    layer = _layer(gate=gate, combine=combine, activation=activation, shared_expert_width=5)
    x = _tokens(11, seed=4)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def gradients(params, x):
        loss = lambda params, x: jnp.sum(jnp.sin(nnx.merge(graph, params, rest)(x)[0]))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(params, x)

    grads = gradients(params, x)
    tree, xs = _numpy_tree(layer), np.asarray(x, np.float64)
    oracle, rng = Oracle(gate, combine, 2), np.random.default_rng(0)

    def derivative(move):
        """Central difference along a direction given as a function of the step."""
        eps = 1e-5
        up, down = (np.sum(np.sin(oracle(*move(step)))) for step in (eps, -eps))
        return (up - down) / (2 * eps)

    direction = rng.normal(size=xs.shape)
    expected = derivative(lambda step: (xs + step * direction, tree))
    np.testing.assert_allclose(np.vdot(grads[1], direction), expected, rtol=1e-4)
    leaves, structure = jax.tree.flatten(tree)
    for (keys, leaf), gradient in zip(
        jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params)),
        jax.tree.leaves(nnx.to_pure_dict(grads[0])),
        strict=True,
    ):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        at, direction = paths.index(keys), rng.normal(size=leaf.shape)

        def move(step, at=at, direction=direction):
            changed = [leaf + step * direction if i == at else leaf for i, leaf in enumerate(leaves)]
            return xs, jax.tree.unflatten(structure, changed)

        expected = derivative(move)
        np.testing.assert_allclose(np.vdot(gradient, direction), expected, rtol=1e-4, atol=1e-5, err_msg=str(keys))


@pytest.mark.parametrize("path", ["dense", "blocked"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_one_expert_with_gate_one_is_the_dense_block_exactly(path, activation):
    layer = SparseMoE(
        WIDTH, HIDDEN, 1, 1, gate="softmax", activation=activation, path=path, block_size=32, rngs=nnx.Rngs(0)
    )
    x = _tokens(32)

    @jax.jit
    def feed_forward(kernels, x):
        up = x @ kernels["up"]["kernel"][0]
        hidden = jax.nn.silu(x @ kernels["gate"]["kernel"][0]) * up if "gate" in kernels else jax.nn.gelu(up)
        return hidden @ kernels["down"]["kernel"][0]

    expected = feed_forward(nnx.to_pure_dict(nnx.state(layer.experts)), x)
    np.testing.assert_array_equal(_apply(layer, x), expected)


T, A, B = 23, 3, 4


@functools.cache
def _dispatchers():
    keys = jax.random.split(jax.random.key(1), 5)
    shapes = [(T, WIDTH), (EXPERTS, WIDTH, 7), (EXPERTS, 7, WIDTH), (T, A), (T, WIDTH)]
    x, up, down, weights, dy = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))

    def run(function, indices):
        y, vjp = jax.vjp(lambda x, k, w: function(x, k, w, indices), x, ExpertKernels((up,), down), weights)
        return y, vjp(dy)

    compiled = [
        jax.jit(functools.partial(run, f)) for f in (functools.partial(blocked_experts, block_size=B), ragged_experts)
    ]
    return compiled, [np.asarray(a, np.float64) for a in (x, up, down, weights, dy)]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.permutations(range(EXPERTS)), min_size=T, max_size=T), st.sets(st.integers(0, T - 1)))
def test_dispatch_of_any_assignment(rows, padding):
    compiled, (x, up, down, weights, dy) = _dispatchers()
    indices = np.array([row[:A] for row in rows], np.int32)
    indices[sorted(padding)] = EXPERTS
    y, dx, dup, ddown, dw = (np.zeros_like(a) for a in (x, x, up, down, weights))
    for t, k in itertools.product(range(T), range(A)):
        if (e := indices[t, k]) == EXPERTS:
            continue
        z, eps = x[t] @ up[e], 1e-6
        h, slope = _gelu(z), (_gelu(z + eps) - _gelu(z - eps)) / (2 * eps)
        y[t] += weights[t, k] * h @ down[e]
        dw[t, k] = dy[t] @ (h @ down[e])
        ddown[e] += weights[t, k] * np.outer(h, dy[t])
        dz = weights[t, k] * (down[e] @ dy[t]) * slope
        dup[e] += np.outer(x[t], dz)
        dx[t] += up[e] @ dz
    for run in compiled:
        out, (dx_, dkernels, dw_) = run(indices)
        got = (out, dx_, dkernels.inputs[0], dkernels.down, dw_)
        for mine, expected in zip(got, (y, dx, dup, ddown, dw), strict=True):
            np.testing.assert_allclose(mine, expected, atol=3e-4, rtol=1e-4)


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


# --- padding, precision, transformations


@pytest.mark.slow
def test_padding_is_ignored_whatever_it_holds():
    mask = jnp.asarray(np.random.default_rng(2).random((2, 17)) < 0.6)
    x = _tokens(2, 17)
    options = {"shared_expert_width": 4, "gate": "cosine", "combine": "soft"}
    layer = _layer("dense", **options)
    alone = _value_and_grads(layer)(layer, x[mask])
    for path in ("dense", "blocked", "ragged"):
        layer = _layer(path, **options)
        run = _value_and_grads(layer)
        y, stats, grads, dx = run(layer, jnp.where(mask[..., None], x, jnp.nan), mask)
        np.testing.assert_allclose(y[mask], alone[0], atol=1e-5)
        assert not np.any(y[~mask])
        assert not np.any(dx[~mask])
        chex.assert_trees_all_close((stats, grads, dx[mask]), alone[1:], atol=1e-5, rtol=1e-5)

        y, stats, grads, _ = run(layer, x, jnp.zeros_like(mask))  # nothing but padding
        assert not np.any(y)
        assert not np.any(stats.load)
        chex.assert_tree_all_finite((stats, grads))


@pytest.mark.slow
def test_bfloat16_compute_with_float32_router():
    x = _tokens(64).astype(jnp.bfloat16)
    layer = _layer("dense", gate="sigmoid", shared_expert_width=4)
    y32, stats32, grads32, dx32 = _value_and_grads(layer)(layer, x.astype(jnp.float32))
    close = lambda a, b: np.linalg.norm(np.float32(a) - b) < 0.02 * np.linalg.norm(b)  # noqa: E731
    for path in ("blocked", "ragged"):
        layer = _layer(path, dtype=jnp.bfloat16, gate="sigmoid", shared_expert_width=4)
        y, stats, grads, dx = _value_and_grads(layer)(layer, x)
        assert y.dtype == dx.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        chex.assert_trees_all_close(stats, stats32, rtol=1e-6)  # routing does not see the compute dtype
        assert close(y, y32)
        assert close(dx, dx32)
        assert all(jax.tree.leaves(jax.tree.map(close, grads, grads32)))


@pytest.mark.slow
def test_parameters_in_bfloat16():
    layer = _layer(param_dtype=jnp.bfloat16)
    y, _, grads, _ = _value_and_grads(layer)(layer, _tokens(8).astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert layer.expert_bias[...].dtype == jnp.float32
    assert jax.eval_shape(layer, _tokens(8))[0].dtype == jnp.float32


@pytest.mark.slow
def test_scan_over_layers_with_checkpointing():
    layers = nnx.vmap(lambda rngs: SparseMoE(WIDTH, HIDDEN, EXPERTS, 2, block_size=8, rngs=rngs), in_axes=0)(
        nnx.Rngs(0).split(2)
    )
    graph, params, rest = nnx.split(layers, nnx.Param, ...)
    x = _tokens(20)

    def apply(x, state):
        y, stats = nnx.merge(graph, *state)(x)
        return x + y, stats

    def scanned(params):
        y, stats = jax.lax.scan(jax.checkpoint(apply), x, (params, rest))
        return jnp.sum(jnp.sin(y)) + jnp.sum(stats.aux_loss)

    def looped(params):
        y, total = x, 0.0
        for i in range(2):
            y, stats = apply(y, jax.tree.map(lambda leaf, i=i: leaf[i], (params, rest)))
            total += stats.aux_loss
        return jnp.sum(jnp.sin(y)) + total

    chex.assert_trees_all_close(
        jax.jit(jax.value_and_grad(scanned))(params),
        jax.jit(jax.value_and_grad(looped))(params),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("tokens", [1, 5])
def test_decoding_a_few_tokens_is_not_padded_to_full_blocks(tokens):
    layer, x = _layer(block_size=128), _tokens(tokens)
    graph, state = nnx.split(layer)
    compiled = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x).compile()
    expected = Oracle("softmax_renorm", "sum", 2)(np.asarray(x, np.float64), _numpy_tree(layer))
    np.testing.assert_allclose(compiled(state, x), expected, atol=1e-5)
    assert f"f32[{tokens},{HIDDEN}]" in compiled.as_text()
    assert "[128," not in compiled.as_text()


@pytest.mark.slow
def test_blocked_path_holds_no_buffer_per_block_or_per_token_and_expert():
    tokens, width, experts, block = 256, 128, 64, 8
    x = jnp.ones((tokens, width))
    temporary = {}
    for path in ("dense", "blocked"):
        layer = SparseMoE(width, width, experts, 2, path=path, block_size=block, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, x, graph=graph, rest=rest):
            return jnp.sum(nnx.merge(graph, params, rest)(x)[0] ** 2)

        for name, function in (("forward", loss), ("gradient", jax.grad(loss, argnums=(0, 1)))):
            compiled = jax.jit(function).lower(params, x).compile()
            temporary[path, name] = compiled.memory_analysis().temp_size_in_bytes
    per_block = (tokens * 2 // block + experts) * width * width * 4  # a gathered weight per block
    per_token_and_expert = tokens * experts * width * 4
    kept = 2 * (tokens * 2 + block) * width * 4  # pre-activations of gate and up
    few = 12 * tokens * width * 4 + 3 * 3 * width * width * 4  # arrays of the input's or one expert's size
    assert temporary["blocked", "forward"] < few < per_block / 3
    assert temporary["blocked", "gradient"] < kept + few < per_token_and_expert / 2
    assert temporary["dense", "gradient"] > per_token_and_expert


# --- parameters and errors


def test_parameter_tree_and_axis_names():
    layer = _layer(shared_expert_width=5)
    names = {
        "/".join(map(str, path)): (variable.shape, variable.get_metadata()["out_sharding"])
        for path, variable in nnx.to_flat_state(nnx.state(layer))
    }
    assert names == {
        "router/kernel": ((WIDTH, EXPERTS), ("embed", None)),
        "experts/gate/kernel": ((EXPERTS, WIDTH, HIDDEN), ("expert", "embed", "mlp")),
        "experts/up/kernel": ((EXPERTS, WIDTH, HIDDEN), ("expert", "embed", "mlp")),
        "experts/down/kernel": ((EXPERTS, HIDDEN, WIDTH), ("expert", "mlp", "embed")),
        "shared/gate/kernel": ((WIDTH, 5), ("embed", "mlp")),
        "shared/up/kernel": ((WIDTH, 5), ("embed", "mlp")),
        "shared/down/kernel": ((5, WIDTH), ("mlp", "embed")),
        "expert_bias": ((EXPERTS,), (None,)),
    }
    assert list(nnx.to_pure_dict(nnx.state(layer, ExpertBias))) == ["expert_bias"]
    assert "expert_bias" not in nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    plain = nnx.to_pure_dict(nnx.state(_layer(activation="gelu"), nnx.Param))
    assert "shared" not in plain
    assert set(plain["experts"]) == {"up", "down"}


def test_initial_scales_are_fan_in_per_expert():
    layer = SparseMoE(256, 64, 8, 2, rngs=nnx.Rngs(0))
    for kernel, fan_in in ((layer.router, 256), (layer.experts.up, 256), (layer.experts.down, 64)):
        values = np.asarray(kernel.kernel[...])
        np.testing.assert_allclose(values.std() * fan_in**0.5, 1.0, rtol=0.06)
    first, second = layer.experts.up.kernel[...][:2]
    assert abs(np.corrcoef(np.ravel(first), np.ravel(second))[0, 1]) < 0.05


def test_kernel_init_sees_one_matrix_at_a_time():
    seen = []

    def init(key, shape, dtype):
        seen.append(shape)
        return jnp.full(shape, 0.5, dtype)

    layer = _layer(kernel_init=init, activation="gelu")
    assert seen == [(WIDTH, EXPERTS), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    assert np.all(layer.experts.down.kernel[...] == 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_active": 5}, "num_active must be at most num_experts = 4, got 5"),
        ({"num_active": 0}, "num_active must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"expert_width": -1}, "expert_width must be at least 1, got -1"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"shared_expert_width": -1}, "shared_expert_width must be 0 or more, got -1"),
        ({"cosine_scale": 0.0}, "cosine_scale must be positive, got 0.0"),
        ({"gate": "relu"}, "gate must be one of sigmoid, softmax, softmax_renorm, cosine, got 'relu'"),
        ({"combine": "max"}, "combine must be one of mean, sum, soft, got 'max'"),
        ({"activation": "relu"}, "activation must be one of swiglu, gelu, got 'relu'"),
        ({"path": "sparse"}, "path must be one of auto, dense, blocked, ragged, got 'sparse'"),
    ],
)
def test_bad_constructor_arguments(arguments, message):
    good = {"width": 8, "expert_width": 8, "num_experts": 4, "num_active": 2}
    with pytest.raises(ValueError, match=message):
        SparseMoE(**(good | arguments), rngs=nnx.Rngs(0))


def test_bad_inputs():
    layer = _layer()
    with pytest.raises(ValueError, match=r"x must have width = 12 features in its last axis, got shape \(3, 5\)"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match=r"token_mask must have shape \(3,\), got \(3, 12\)"):
        layer(_tokens(3), token_mask=jnp.ones((3, 12), bool))
    for arguments, message in (
        ({"kappa": 0.0}, "kappa must be in"),
        ({"rate": -0.1}, "rate must be finite and not negative, got -0.1"),
        ({"rate": float("nan")}, "rate must be finite"),
        ({"load": jnp.ones(3)}, r"load must have the shape of bias, \(4,\), got \(3,\)"),
    ):
        good = {"bias": jnp.zeros(4), "load": jnp.full(4, 0.5), "kappa": 0.5}
        with pytest.raises(ValueError, match=message):
            update_expert_bias(**(good | arguments))
