from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.optim import (
    default_matrix_specs,
    muon_direction,
    olion,
    orthogonalize,
    scale_by_olion,
)
from tests.optim.olion_helpers import (
    by_path,
    first_direction,
    first_updates,
    gaussian,
    is_matrix_path,
    quick_olion,
    run,
    transformer,
)

# Groups


def random_like(params, seed=1):
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten([jnp.asarray(gaussian(x.shape, seed + i), x.dtype) for i, x in enumerate(leaves)])


@pytest.mark.parametrize("rate", [0.02, optax.linear_schedule(0.01, 0.05, 4)])
def test_everything_else_follows_adamw_bit_for_bit(rate):
    params, grads = transformer(), random_like(transformer())
    ours, _ = run(quick_olion(rate), params, grads, steps=4)
    adamw = optax.adamw(
        rate,
        0.9,
        0.95,
        1e-8,
        weight_decay=0.1,
        mask=lambda p: jax.tree.map(lambda x: x.ndim > 1 and x.shape != (2, 4), p),
    )
    theirs, _ = run(adamw, params, grads, steps=4)
    theirs = by_path(theirs)
    for path, leaf in by_path(ours).items():
        if is_matrix_path(path):
            assert not np.allclose(leaf, theirs[path], atol=1e-3)
        else:
            np.testing.assert_array_equal(leaf, theirs[path])


def test_half_precision_is_the_rounded_float32_update():
    half = transformer(jnp.bfloat16)
    grads = random_like(half)
    wide, wide_grads = optax.tree.cast(half, jnp.float32), optax.tree.cast(grads, jnp.float32)
    tx = quick_olion(3e-4, clip_norm=1.0)
    state = tx.init(half)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state)}
    assert dtypes == {"float32", "int32"}
    updates, new_state = jax.jit(tx.update)(grads, state, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    wide_updates, _ = first_updates(tx, wide_grads, wide)
    chex.assert_trees_all_equal(updates, optax.tree.cast(wide_updates, jnp.bfloat16))


def test_float16_zero_gradient_and_large_gradient():
    params = transformer(jnp.float16)
    for scale in (0.0, 6e4):
        grads = jax.tree.map(lambda x, scale=scale: jnp.full_like(x, scale), params)
        tx = quick_olion(1e-3, clip_norm=1.0)
        updates, state = first_updates(tx, grads, params)
        chex.assert_tree_all_finite((updates, state))


def test_mu_dtype():
    g = jnp.asarray(gaussian((16, 24)))
    tx = scale_by_olion(mu_dtype="bfloat16")
    d, state = tx.update(g, tx.init(g))
    assert state.mu.dtype == jnp.bfloat16
    assert d.dtype == jnp.float32
    np.testing.assert_array_equal(state.mu, (0.02 * g).astype(jnp.bfloat16))


def test_float64_parameters_keep_float64_momentum():
    with jax.enable_x64(True):
        g = jnp.asarray(gaussian((8, 8), dtype=np.float64))
        assert scale_by_olion().init(g).mu.dtype == jnp.float64


def test_weight_decay_masks():
    params = transformer()
    zero = jax.tree.map(jnp.zeros_like, params)

    def decayed(**kwargs):
        tx = quick_olion(1.0, weight_decay=0.5, **kwargs)
        updates = by_path(first_updates(tx, zero, params)[0])
        wanted = by_path(jax.tree.map(lambda x: -0.5 * x, params))
        for path, update in updates.items():
            assert not update.any() or np.array_equal(update, wanted[path])
        return {path for path, update in updates.items() if update.any()}

    paths = set(by_path(params))
    assert decayed() == {path for path in paths if path.endswith(("kernel", "embedding"))}
    everything = jax.tree.map(lambda _: True, params)
    assert decayed(weight_decay_mask=everything) == paths
    assert decayed(weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim == 1, p)) == {"layers/norm/scale"}
    prefix = {"embed": True, "layers": False, "head": {"kernel": True}}
    assert decayed(weight_decay_mask=prefix) == {"embed/embedding", "head/kernel"}


def test_a_given_fallback_is_used_as_it_is():
    params, grads = transformer(), random_like(transformer())
    tx = quick_olion(0.1, fallback=optax.sgd(0.3, momentum=0.9))
    ours = by_path(first_updates(tx, grads, params)[0])
    for path, g in by_path(grads).items():
        if not is_matrix_path(path):
            np.testing.assert_array_equal(ours[path], -0.3 * g)
    half = transformer(jnp.bfloat16)
    clipped = quick_olion(0.1, fallback=optax.sgd(0.3, momentum=0.9), clip_norm=1e3)
    state = jax.eval_shape(clipped.init, half)
    updates, new_state = jax.eval_shape(clipped.update, half, state, half)
    chex.assert_trees_all_equal_dtypes(updates, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


def test_fallback_learning_rate():
    params, grads = transformer(), random_like(transformer())
    both = quick_olion(0.1, fallback_learning_rate=lambda count: 0.01, weight_decay=0.0)
    one = quick_olion(0.01, weight_decay=0.0)
    ours = by_path(first_updates(both, grads, params)[0])
    for path, wanted in by_path(first_updates(one, grads, params)[0]).items():
        np.testing.assert_allclose(ours[path], (10 if is_matrix_path(path) else 1) * wanted, rtol=1e-6)


@pytest.mark.parametrize("clip", [0.7, lambda count: 0.7])
def test_clip_norm_is_a_chain_with_clipping(clip):
    params, grads = transformer(), random_like(transformer())
    # OLion itself ignores the scale of a first gradient, AdamW nearly: the second moment shows the clipping.
    ours, state = run(quick_olion(0.1, clip_norm=clip), params, grads, steps=3)
    theirs, chained = run(optax.chain(optax.clip_by_global_norm(0.7), quick_olion(0.1)), params, grads, steps=3)
    chex.assert_trees_all_close(ours, theirs, atol=1e-6)
    nu, wanted = (optax.tree.get(s, "nu")["head"]["kernel"] for s in (state, chained))
    np.testing.assert_allclose(nu, wanted, rtol=1e-5)
    assert float(jnp.max(nu)) < 0.5 * float(jnp.max(0.05 * grads["head"]["kernel"] ** 2))


# Composition


def test_inject_hyperparams_with_static_arguments():
    params, grads = transformer(), random_like(transformer())
    specs = partial(default_matrix_specs, per_head=True)
    static = ("matrix_specs", "mu_dtype", "ns_dtype", "weight_decay_mask")
    kwargs = {"matrix_specs": specs, "mu_dtype": jnp.bfloat16, "ns_dtype": jnp.float32}
    kwargs["weight_decay_mask"] = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    tx = optax.inject_hyperparams(olion, static_args=static)(0.1, ns_steps=2, **kwargs)
    plain = olion(0.1, ns_steps=2, **kwargs)
    updates, _ = first_updates(tx, grads, params)
    wanted, _ = first_updates(plain, grads, params)
    for got, leaf in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
        assert np.mean(np.isclose(got, leaf, rtol=1e-4, atol=1e-6)) >= 0.99


def test_masked_and_none_leaves():
    params, grads = transformer(), random_like(transformer())
    # Freeze the keys and values: the output projection must still be seen as attention's.
    frozen = ("layers/attention/key", "layers/attention/value")
    mask = jax.tree_util.tree_map_with_path(
        lambda path, _: not jax.tree_util.keystr(path, simple=True, separator="/").startswith(frozen), params
    )
    specs = default_matrix_specs(params)
    plain = by_path(first_updates(quick_olion(0.1), grads, params)[0])
    for matrix_specs in (None, specs):
        tx = optax.masked(quick_olion(0.1, matrix_specs=matrix_specs), mask)
        updates = by_path(first_updates(tx, grads, params)[0])
        for path, g in by_path(grads).items():
            np.testing.assert_array_equal(updates[path], g if path.startswith(frozen) else plain[path])

    with_none = {**params, "frozen": None}
    tx = quick_olion(0.1)
    updates, _ = jax.jit(tx.update)({**grads, "frozen": None}, tx.init(with_none), with_none)
    assert updates.pop("frozen") is None
    chex.assert_trees_all_close(by_path(updates), plain, atol=1e-6)


@pytest.mark.slow
def test_nnx_optimizer():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(6, 10, rngs=rngs)
            self.head = nnx.Linear(10, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.dense(x)))

    model = Model(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, quick_olion(0.05, clip_norm=1.0), wrt=nnx.Param)
    x = jnp.asarray(gaussian((3, 6)))

    def loss(model):
        return jnp.sum(model(x) ** 2)

    grads = nnx.to_pure_dict(nnx.grad(loss)(model))

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer)
    wanted, _ = run(quick_olion(0.05, clip_norm=1.0), before, grads)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(after, wanted, atol=1e-6)
    step(model, optimizer)


# Muon on the same engine


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_direction_is_optax_muon(nesterov):
    tx = muon_direction(0.9, nesterov=nesterov, ns_dtype=jnp.float32)
    reference = optax.contrib.scale_by_muon(beta=0.9, nesterov=nesterov)
    grads = jnp.asarray(gaussian((4, 12, 30)))
    specs = optax.contrib.MuonDimensionNumbers()
    reference = optax.contrib.scale_by_muon(beta=0.9, nesterov=nesterov, weight_dimension_numbers=specs)
    state, theirs = tx.init(grads[0]), reference.init(grads[0])
    for g in grads:
        d, state = tx.update(g, state)
        q, theirs = reference.update(g, theirs)
        np.testing.assert_allclose(d, 0.2 * np.sqrt(30) * q, atol=1e-4)


def test_muon_direction_without_sign_is_the_olion_projection():
    g = jnp.asarray(gaussian((12, 30)))
    tx = muon_direction(orthogonalizer="svd", rms_target=1.0)
    d, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(d, np.sqrt(30) * orthogonalize(g, "svd"), atol=1e-4)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(d))), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(jnp.sign(d), jnp.sign(first_direction(g, orthogonalizer="svd")))
    assert state.count == 1
    with pytest.raises(ValueError, match="beta must be in"):
        muon_direction(1.0)
