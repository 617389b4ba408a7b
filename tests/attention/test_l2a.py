"""The functions of `l2a` against dense masked softmax in float64 and JAX's own attention. Check numbers: the paper's
properties as the issue of this method lists them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.attention import Routing, l2a_attention
from tests.attention.oracle import dense, random_inputs, visible


@functools.partial(
    jax.jit,
    static_argnames=(*("window", "capacity", "combine", "estimator", "overflow", "train", "sinks", "implementation"),),
)
def attend(q, k, v, mask, prob, **options):
    return l2a_attention(q, k, v, Routing(mask, prob), **options)


def full(mask):
    return jnp.full(mask.shape, 0.5)


# --- values


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_everything_routed_is_causal_attention(kv_heads):
    q, k, v = random_inputs(2, 96, 4, kv_heads, 16)
    mask = jnp.ones((2, 96), bool)
    out, aux = attend(q, k, v, mask, full(mask), window=8, capacity=96)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=2e-6)
    assert aux.n_routed.tolist() == [96, 96]
    assert aux.rate == 1


@pytest.mark.parametrize(("seq", "window"), [(96, 16), (77, 16), (40, 40), (40, 64), (33, 1)])
def test_nothing_routed_is_sliding_window_attention(seq, window):
    q, k, v = random_inputs(1, seq, 2, 2, 16)
    mask = jnp.zeros((1, seq), bool)
    out, aux = attend(q, k, v, mask, full(mask), window=window, capacity=8)
    local = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0))
    np.testing.assert_allclose(out, local, atol=2e-6)
    assert aux.n_routed.tolist() == aux.n_overflow.tolist() == [0]
    assert aux.rate == 0


def test_a_random_mask_gives_values_and_gradients_of_a_dense_softmax():
    q, k, v = random_inputs(1, 1024, 2, 1, 16)
    mask = jax.random.bernoulli(jax.random.key(1), 0.2, (1, 1024))
    cotangent = jax.random.normal(jax.random.key(2), q.shape)

    def loss(q, k, v):
        return jnp.vdot(attend(q, k, v, mask, full(mask), window=128)[0], cotangent)

    out = attend(q, k, v, mask, full(mask), window=128)[0]
    expected, pull = dense(q, k, v, visible(mask, 128))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    for grad, wanted in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), pull(cotangent), strict=True):
        np.testing.assert_allclose(grad, wanted, atol=1e-5 * np.abs(wanted).max())
