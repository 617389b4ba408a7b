"""Dense blocks to convert."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_icml.moe.prism_moe import DenseFFN


def dense(width=16, hidden=64, gated=False, biases=False, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    inputs = tuple(jax.random.normal(k, (width, hidden)) for k in keys[: 1 + gated])
    extra = tuple(jax.random.normal(k, (hidden,)) for k in keys[2 : 3 + gated]) if biases else ()
    down_bias = jax.random.normal(keys[4], (width,)) if biases else None
    return DenseFFN(inputs, jax.random.normal(keys[5], (hidden, width)) / 8, extra, down_bias)


def planted(seed, tokens=4096, width=64, hidden=128, types=8):
    """A block whose units are tuned to token types, tokens to fit and tokens to test (the sheet's check 7)."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((types, width))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    tuned = rng.integers(0, types, hidden)
    up = (rng.standard_normal((hidden, width)) / np.sqrt(width) + 0.3 * centres[tuned]).T
    down = rng.standard_normal((hidden, width)) / np.sqrt(hidden)
    ffn = DenseFFN((jnp.asarray(up, jnp.float32),), jnp.asarray(down, jnp.float32), (jnp.full(hidden, -1.0),))

    def draw():
        kind = rng.integers(0, types, tokens)
        x = 8 * centres[kind] + 0.7 * rng.standard_normal((tokens, width))
        return jnp.asarray(x, jnp.float32), jnp.asarray(kind, jnp.int32)

    return ffn, draw(), draw()
