import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.dispatch import ExpertKernels, blocked_experts, ragged_experts
from tests.moe.oracle import EXPERTS, WIDTH, _gelu

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
