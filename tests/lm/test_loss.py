import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, cross_entropy_sum, loss_fn


def draw(tokens, width=8, vocab=13, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (tokens, width), dtype)
    kernel = jax.random.normal(keys[1], (width, vocab), dtype)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)
    weights = jax.random.uniform(keys[3], (tokens,)).at[::3].set(0.0)
    return hidden, kernel, targets, weights


def whole(hidden, kernel, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, targets)
    return jnp.sum(weights * losses)


@pytest.mark.parametrize("chunk", [1, 5, 7, 32, 1000])
def test_equals_the_unchunked_loss_and_gradients(chunk):
    hidden, kernel, targets, weights = draw(32)
    value, grads = jax.jit(jax.value_and_grad(lambda h, k: cross_entropy_sum(h, k, targets, weights, chunk), (0, 1)))(
        hidden, kernel
    )
    expected, expected_grads = jax.value_and_grad(lambda h, k: whole(h, k, targets, weights), (0, 1))(hidden, kernel)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, atol=1e-5)
    np.testing.assert_allclose(cross_entropy_sum(hidden, kernel, targets, weights, chunk), expected, rtol=1e-6)


def test_gradients_scale_with_the_cotangent():
    hidden, kernel, targets, weights = draw(9)
    one = jax.grad(lambda h: cross_entropy_sum(h, kernel, targets, weights, 4))(hidden)
    three = jax.grad(lambda h: 3 * cross_entropy_sum(h, kernel, targets, weights, 4))(hidden)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_bfloat16_inputs_accumulate_in_float32():
    hidden, kernel, targets, weights = draw(64, dtype=jnp.bfloat16)
    value = cross_entropy_sum(hidden, kernel, targets, weights, 16)
    exact = whole(*(x.astype(jnp.float32) for x in (hidden, kernel)), targets, weights)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, rtol=1e-5)


def test_extreme_logits_stay_finite():
    hidden = jnp.full((4, 8), 1e4)
    kernel = jnp.tile(jnp.linspace(-1.0, 1.0, 13), (8, 1))
    value, grads = jax.value_and_grad(lambda h: cross_entropy_sum(h, kernel, jnp.zeros(4, jnp.int32), jnp.ones(4), 2))(
        hidden
    )
    # The right class has logit -8e4, the largest 8e4.
    np.testing.assert_allclose(value, 4 * 1.6e5, rtol=1e-5)
    assert bool(jnp.all(jnp.isfinite(grads)))


def test_only_a_chunk_of_float32_logits_is_ever_in_memory():
    tokens, width, vocab, chunk = 4096, 16, 2048, 128
    hidden, kernel, targets, weights = draw(tokens, width, vocab)

    def temporary_bytes(loss):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, kernel).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = temporary_bytes(lambda h, k: cross_entropy_sum(h, k, targets, weights, chunk))
    plain = temporary_bytes(lambda h, k: whole(h, k, targets, weights))
    all_logits, chunk_logits = 4 * tokens * vocab, 4 * chunk * vocab
    inputs_and_gradients = 4 * 2 * (hidden.size + kernel.size)
    assert plain >= all_logits
    assert ours <= 3 * chunk_logits + 2 * inputs_and_gradients < all_logits / 4


def test_bad_arguments_are_named():
    hidden, kernel, targets, weights = draw(4)
    with pytest.raises(ValueError, match="chunk"):
        cross_entropy_sum(hidden, kernel, targets, weights, 0)
    with pytest.raises(ValueError, match="kernel"):
        cross_entropy_sum(hidden, kernel.astype(jnp.bfloat16), targets, weights)


@pytest.mark.slow
def test_model_loss_is_the_mean_over_weighted_targets_plus_balancing_terms():
    config = LMConfig(
        vocab_size=17, width=16, num_layers=2, num_heads=2, num_experts=4, context_length=8,
        aux_loss_weight=0.5, router_z_loss_weight=0.25,
    )  # fmt: skip
    model = Transformer(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 17)
    weights = jnp.ones((2, 8)).at[0, :3].set(0.0)
    batch = {"tokens": tokens, "targets": tokens, "weights": weights}
    loss, aux = jax.jit(lambda s: loss_fn(graphdef, s, batch))(state)
    out = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(out.hidden), tokens)
    nll = float(jnp.sum(losses * weights)) / 13
    balance = 0.5 * float(jnp.mean(aux.routing.aux_loss)) + 0.25 * float(jnp.mean(aux.routing.z_loss))
    np.testing.assert_allclose(float(loss), nll + balance, rtol=1e-5)
    assert aux.routing.load.shape == (2, 4)
    assert float(aux.weight_sum) == 13
    with pytest.raises(ValueError, match="targets"):
        loss_fn(graphdef, state, {"tokens": tokens})
