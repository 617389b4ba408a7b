"""The four optimizers of the OLion experiment are what they say they are."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.optim import byte_lm
from experiments.optim.olion import WEIGHT_DECAY, optimizers, second_text
from jaxlib_icml.optim import muon_direction

STEPS = 3


@cache
def params():
    return byte_lm.byte_model(byte_lm.SMOKE_MODEL).init(0)


@cache
def gradients():
    leaves, treedef = jax.tree.flatten(params())
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(0.01 * rng.standard_normal((STEPS, *x.shape)), jnp.float32)  # noqa: E731
    return treedef.unflatten([draw(x) for x in leaves])


def at_each_step(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return [treedef.unflatten(parts) for parts in zip(*leaves, strict=True)]


def updates_of(tx):
    @jax.jit
    def run(p, grads):
        def step(state, g):
            updates, state = tx.update(g, state, p)
            return state, updates

        return jax.lax.scan(step, tx.init(p), grads)[1]

    return at_each_step(jax.tree.map(np.asarray, run(params(), gradients())))


@cache
def arm(name):
    return updates_of(optimizers(params())[name](lambda count: 1.0, {}))


def matrices(updates):
    layer = updates["layers"][0]
    return {
        **{name: layer["attention"][name]["kernel"] for name in ("query", "key", "value", "out")},
        **{name: layer["mlp"][name]["kernel"] for name in ("up", "down")},
    }


def test_muon_is_ours():
    """Optax's Muon and ours, decay aside, agree on attention kernels of rank 3 too."""
    ours = updates_of(optax.chain(optax.clip_by_global_norm(1.0), muon_direction()))
    for theirs, mine in zip(arm("Muon"), ours, strict=True):
        for name, update in matrices(theirs).items():
            expected = -(matrices(mine)[name] + WEIGHT_DECAY * matrices(params())[name])
            np.testing.assert_allclose(update, expected, atol=2e-4)


@pytest.mark.parametrize("name", ["OLion", "Lion"])
def test_sign_methods_have_rms_of_a_fifth(name):
    for updates in arm(name):
        for key, update in matrices(updates).items():
            direction = -(update + WEIGHT_DECAY * matrices(params())[key])
            np.testing.assert_allclose(np.abs(direction), 0.2, rtol=1e-4)


def test_lion_is_lion():
    """Against Lion's own order: the sign of a mix with the old momentum."""
    momentum = {name: np.zeros(x.shape) for name, x in matrices(params()).items()}
    for gradient, updates in zip(at_each_step(gradients()), arm("Lion"), strict=True):
        scale = min(1.0, 1.0 / float(optax.tree.norm(gradient)))
        for name, g in matrices(gradient).items():
            g = scale * np.asarray(g, float)
            expected = -(0.2 * np.sign(0.95 * momentum[name] + 0.05 * g) + 0.1 * np.asarray(matrices(params())[name]))
            momentum[name] = 0.98 * momentum[name] + 0.02 * g
            assert np.mean(np.abs(matrices(updates)[name] - expected) < 1e-5) > 0.999


@cache
def adamw(nesterov):
    """The AdamW of the leaves that are no hidden matrices, norm scales aside."""
    tx = optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY, nesterov=nesterov)
    return updates_of(optax.chain(optax.clip_by_global_norm(1.0), tx))


@pytest.mark.parametrize("name", ["OLion", "Muon", "Lion", "AdamW"])
def test_the_rest_is_adamws(name):
    """Optax gives Muon's AdamW Nesterov momentum."""
    for ours, theirs in zip(arm(name), adamw(name == "Muon"), strict=True):
        for path in (("embed", "embedding"), ("head", "kernel")):
            np.testing.assert_allclose(ours[path[0]][path[1]], theirs[path[0]][path[1]], rtol=1e-5, atol=1e-6)


def test_norm_scales_do_not_decay():
    """With vanishing gradients a decayed leaf moves by rate times decay; a norm scale must not."""
    still = jax.tree.map(jnp.zeros_like, params())
    tx = optimizers(params())["AdamW"](lambda count: 1.0, {})
    updates, _ = jax.jit(tx.update)(still, tx.init(params()), params())
    np.testing.assert_array_equal(updates["final_norm"]["scale"], 0)
    np.testing.assert_allclose(updates["head"]["kernel"], -WEIGHT_DECAY * params()["head"]["kernel"], rtol=1e-6)


def test_the_second_text_is_prose_that_the_first_lacks():
    from jaxlib_icml.training.corpus import Document

    text, name = second_text(byte_lm.Text(np.zeros(1, np.uint8), np.zeros(1, np.uint8)))
    assert name
    assert len(text.train) > 300_000
    assert 0.05 < len(text.held_out) / len(text.train) < 0.2
    kept = byte_lm._join([Document("a.py", "first"), Document(byte_lm.PROSE, "prose"), Document("b.py", "last")])
    assert kept.tobytes() == b"first\nlast"
