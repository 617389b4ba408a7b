"""What the tests of OLion share."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlib_icml.optim import (
    olion,
    scale_by_olion,
)

QKV = ("query", "key", "value")
COEFFS = (3.4445, -4.7750, 2.0315)


def gaussian(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def newton_schulz(g, steps=5):
    z = g.T if g.shape[0] > g.shape[1] else g
    z = z / max(np.linalg.norm(z), 1e-300)
    a, b, c = COEFFS
    for _ in range(steps):
        A = z @ z.T
        z = a * z + (b * A + c * A @ A) @ z
    return z.T if g.shape[0] > g.shape[1] else z


def polar(g):
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    return u @ vt


def first_direction(g, *, matrix_specs=None, **kwargs):
    if matrix_specs is None:
        return jitted_first_direction(tuple(kwargs.items()))(g)
    tx = scale_by_olion(matrix_specs=matrix_specs, **kwargs)
    return jax.jit(lambda g: tx.update(g, tx.init(g))[0])(g)


@lru_cache
def jitted_first_direction(settings):
    tx = scale_by_olion(**dict(settings))
    return jax.jit(lambda g: tx.update(g, tx.init(g))[0])


def transformer(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)

    def tensor(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "embed": {"embedding": tensor(20, 8)},
        "layers": {
            "attention": {
                **{name: {"kernel": tensor(8, 2, 4), "bias": tensor(2, 4)} for name in ("query", "key", "value")},
                "out": {"kernel": tensor(2, 4, 8)},
            },
            "norm": {"scale": tensor(8)},
            "mlp": {"up": {"kernel": tensor(8, 24)}},
        },
        "head": {"kernel": tensor(8, 20)},
    }


def is_matrix_path(path):
    return path.endswith("kernel") and not path.startswith("head")


def by_path(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def run(tx, params, grads, steps=1):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def first_updates(tx, grads, params):
    """Updates and state of the first step, in one program."""
    return jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params))(grads, params)


# Where the orthogonalizer is not what is tested, its absence keeps the programs small.
quick_olion = partial(olion, orthogonalizer="identity")
