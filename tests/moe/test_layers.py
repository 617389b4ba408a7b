import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.moe import ExpertBias, SparseMoE, update_expert_bias
from jaxlib_icml.moe.routing import COMBINES, GATES, route, router_logits
from tests.moe.oracle import EXPERTS, HIDDEN, WIDTH, Oracle, _apply, _layer, _numpy_tree, _tokens, _value_and_grads

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
        ({"path": "sparse"}, "path must be one of auto, dense, blocked, ragged, expert_parallel, got 'sparse'"),
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
