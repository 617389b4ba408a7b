"""The arms and the measurements of the GradientStabilizer experiment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.optim import byte_lm
from experiments.optim import gradient_stabilizer as experiment
from experiments.optim.gradient_stabilizer import ARMS, NEVER, PROTECTIONS, behind, quantize_layers
from jaxlib_icml.optim import gradient_stabilizer


def run(make, gradients, params, **numbers):
    numbers = {"l2": 0.0, "decay": 0.0, "winsorize": NEVER} | numbers

    @jax.jit
    def updates(gradients, params, numbers):
        tx = optax.with_extra_args_support(make(numbers))

        def step(carry, g):
            params, state = carry
            u, state = tx.update(g, state, params, loss_scale=8.0)
            return (optax.apply_updates(params, u), state), u

        return jax.lax.scan(step, (params, tx.init(params)), gradients)[1]

    return updates(gradients, params, numbers)


def sample(steps=6, seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(4)}
    lengths = np.exp(rng.standard_normal(steps))
    gradients = {
        k: lengths.reshape(-1, *[1] * v.ndim) * rng.standard_normal((steps, *v.shape)) for k, v in params.items()
    }
    as_float32 = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)  # noqa: E731
    return as_float32(params), as_float32(gradients)


def test_without_protection_and_l2_it_is_adamw():
    params, gradients = sample()
    ours = run(lambda n: behind("none", "Adam")(lambda count: 0.1, n), gradients, params, decay=0.3)
    theirs = run(lambda n: optax.adamw(0.1, b1=0.9, b2=0.999, weight_decay=0.3), gradients, params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_l2_is_coupled_and_comes_after_clipping():
    params, gradients = sample()
    make = lambda n: behind("norm clip", "Adam")(lambda count: 0.1, n)  # noqa: E731
    ours = run(make, gradients, params, l2=0.5)

    w = {k: np.asarray(v, float) for k, v in params.items()}
    m, v = ({k: np.zeros(x.shape) for k, x in w.items()} for _ in range(2))
    for t in range(6):
        g = {k: np.asarray(x[t], float) for k, x in gradients.items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        for k in w:
            total = g[k] / max(norm, 1.0) + 0.5 * w[k]
            m[k] = 0.9 * m[k] + 0.1 * total
            v[k] = 0.999 * v[k] + 0.001 * total**2
            step = -0.1 * (m[k] / (1 - 0.9 ** (t + 1))) / (np.sqrt(v[k] / (1 - 0.999 ** (t + 1))) + 1e-8)
            np.testing.assert_allclose(ours[k][t], step, rtol=2e-3, atol=1e-5)
            w[k] = w[k] + step


@pytest.mark.parametrize(("arm", "options"), [("GS", {}), ("GS winsorized 5", {"winsorize": 5.0})])
def test_the_variants_of_one_program_are_the_transformations_they_stand_for(arm, options):
    params, gradients = sample(steps=20)
    gradients = jax.tree.map(lambda g: g.at[10].multiply(1e6), gradients)
    ours = run(
        lambda n: PROTECTIONS[arm].transformation(n, loss_scale=False),
        gradients,
        params,
        winsorize=PROTECTIONS[arm].winsorize,
    )
    theirs = run(lambda n: gradient_stabilizer(**options), gradients, params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_with_a_loss_scale_ours_takes_scaled_gradients():
    params, gradients = sample(steps=5)
    scaled = jax.tree.map(lambda g: 8 * g, gradients)
    make = lambda loss_scale: lambda n: PROTECTIONS["GS"].transformation(n, loss_scale)  # noqa: E731
    a, b = run(make(True), scaled, params), run(make(False), gradients, params)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def round_e1m2(x, axis):
    step = np.abs(x).max(axis=axis, keepdims=True) / 7
    return step * np.rint(x / step)


def test_quantized_layers_multiply_rounded_inputs():
    from jaxlib_icml.lm import Transformer

    model = Transformer(byte_lm.SMOKE_MODEL, rngs=nnx.Rngs(0))
    quantize_layers(model)
    block = model.layers[0]
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)

    kernel = np.asarray(block.attention.query.kernel[...])
    expected = np.einsum("bti,ihd->bthd", round_e1m2(x, -1), round_e1m2(kernel, 0))
    np.testing.assert_allclose(block.attention.query(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)

    heads = np.random.default_rng(1).standard_normal((2, 5, 2, 8)).astype(np.float32)
    kernel = np.asarray(block.attention.out.kernel[...])
    expected = np.einsum("bthd,hdo->bto", round_e1m2(heads, (-2, -1)), round_e1m2(kernel, (0, 1)))
    np.testing.assert_allclose(block.attention.out(jnp.asarray(heads)), expected, rtol=1e-4, atol=1e-5)

    (up,), down = block.mlp.inner.kernels()
    hidden = np.asarray(jax.nn.gelu(round_e1m2(x, -1) @ round_e1m2(np.asarray(up), 0), approximate=True))
    expected = round_e1m2(hidden, -1) @ round_e1m2(np.asarray(down), 0)
    np.testing.assert_allclose(block.mlp(jnp.asarray(x)), expected, rtol=1e-3, atol=1e-4)


def test_quantized_model_trains_all_its_matrices():
    model = byte_lm.byte_model(byte_lm.SMOKE_MODEL, quantize_layers)
    windows = byte_lm.draw_batches(np.arange(256, dtype=np.uint8), 0, 1, 4, 16)[0]
    gradients = jax.jit(jax.grad(model.loss))(model.init(0), windows)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))


def test_half_precision_computes_in_float16_and_keeps_float32_weights():
    from jaxlib_icml.lm import Transformer

    model = Transformer(experiment.HalfPrecision(**vars(byte_lm.SMOKE_MODEL)), rngs=nnx.Rngs(0))
    hidden = nnx.jit(lambda m, tokens: m(tokens).hidden)(model, jnp.zeros((1, 4), jnp.int32))
    assert hidden.dtype == jnp.float16
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}


def test_measurements_are_differences_of_the_best_and_count_failures_as_infinite():
    grid = {
        "none": [[3.0], [np.inf], [2.6]],
        "norm clip": [[2.5], [2.4], [2.9]],
        "GS": [[2.45], [2.3], [2.35]],
    }
    table = {arm: np.array(values) for arm, values in grid.items()}
    spike = {arm: np.array([[2.0], [2.1], [2.2]]) + 0.01 * i for i, arm in enumerate(ARMS)}
    decay = {"none": np.array([[2.0], [2.2]]), "norm clip": np.array([[2.0], [2.1]]), "GS": np.array([[2.0], [2.04]])}
    # Rates without a spike, then the same rates with one.
    bases = {arm: np.array([[2.5], [2.4], [1.0], [1.0]]) - 0.1 * (arm == "GS") for arm in grid}
    loss = {"fp4": table, "fp16": table, "spike": spike, "weight_decay": decay, "sgd": bases, "lion": bases}
    measured = experiment._measure(
        loss, {"none": [0, 2], "GS": [0, 1]}, {"none": [0.5], "norm clip": [1.0], "GS": [0.9]}
    )
    expected = {
        "fp4_below_best": -0.1,
        "fp4_below_clip": -0.1,
        "fp4_below_none": -0.3,
        "fp4_range_clip": -0.1,
        "fp4_range_none": 0.4,
        "fp4_diverged": -1.0,
        "decay_none": 0.2,
        "decay_clip": 0.4,
        "spike_1e3_none": 0.06,
        "spike_clip": 0.04,
        "winsorized_clip": 0.06,
        "winsorized_clean": 0.02,
        "sgd_below_clip": -0.1,
        "lion_below_none": -0.1,
    }
    assert {claim.id for claim in experiment.EXPERIMENT.claims} == set(measured)
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, atol=1e-9, err_msg=name)
