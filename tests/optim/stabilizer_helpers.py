"""What the tests of GradientStabilizer share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_icml.optim import gradient_stabilizer


def rho_float64(norms, gamma1=0.6, gamma2=0.999, eps=0.0, bias_correction=True, winsorize=None):
    """ρ_t by the paper's recursion on v itself, in float64; norms (time, ...)."""
    norms = np.asarray(norms, np.float64)
    m = v = np.zeros(norms.shape[1:])
    out = np.empty_like(norms)
    previous = None
    for t, r in enumerate(norms, start=1):
        fed = r if winsorize is None or previous is None else np.minimum(r, winsorize * previous)
        m = gamma1 * m + (1 - gamma1) * fed
        v = gamma2 * v + (1 - gamma2) * fed**2
        c1, c2 = (1 - gamma1**t, 1 - gamma2**t) if bias_correction else (1, 1)
        previous = m / c1
        out[t - 1] = m / c1 / (np.sqrt(v / c2) + eps)
    return out


@functools.cache
def emitted_norms(**options):
    """A jitted function from norms (time,) to the lengths of the transform's outputs, one per step."""
    tx = gradient_stabilizer(**options)
    direction = jnp.array([0.6, -0.8])

    @jax.jit
    def run(norms):
        def step(state, norm):
            out, state = tx.update(direction * norm, state)
            return state, jnp.linalg.norm(out)

        return jax.lax.scan(step, tx.init(direction), norms)[1]

    return lambda norms: np.asarray(run(jnp.asarray(norms, jnp.float32)), np.float64)


def random_tree(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"a": normal(17, 5), "b": {"c": normal(9), "d": normal()}}


def norm64(x):
    return np.linalg.norm(np.asarray(x).astype(np.complex128).ravel())
