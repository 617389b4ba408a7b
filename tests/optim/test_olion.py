"""OLion's update: exact sizes, invariances, limits, theory, composition with Optax and Flax."""

import doctest
import sys
from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from flax import nnx

from jaxlib_icml.optim import (
    MatrixSpec,
    ScaleByOlionState,
    default_matrix_specs,
    muon_direction,
    olion,
    olion_diagnostics,
    orthogonalize,
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


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.olion"])
    assert result.attempted > 0
    assert result.failed == 0


# Sizes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_entry_of_a_dense_update_is_the_rms_target(dtype):
    shapes = [(1, 1), (1, 7), (16, 16), (5, 33), (64, 12)]
    for d in first_direction([jnp.asarray(gaussian(shape), dtype) for shape in shapes]):
        assert d.dtype == dtype
        np.testing.assert_array_equal(jnp.abs(d), jnp.asarray(0.2, dtype))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (24, 24)])
@pytest.mark.parametrize("orthogonalizer", ["auto", "svd", "identity"])
def test_rms_for_every_pattern_of_zeros(shape, orthogonalizer):
    rng = np.random.default_rng(3)
    for rows_kept, cols_kept in [(1, 1), (5, 3), (shape[0], 1), (7, shape[1])]:
        g = gaussian(shape)
        g[rng.permutation(shape[0])[rows_kept:]] = 0
        g[:, rng.permutation(shape[1])[cols_kept:]] = 0
        d = np.asarray(first_direction(jnp.asarray(g), orthogonalizer=orthogonalizer), np.float64)
        assert abs(np.sqrt(np.mean(d**2)) - 0.2) < 1e-6
        np.testing.assert_array_equal(d != 0, g != 0)


def test_rms_is_per_matrix():
    g = gaussian((3, 8, 12))
    g[0, :4] = 0
    d = np.asarray(first_direction(jnp.asarray(g)), np.float64)
    np.testing.assert_allclose(np.sqrt(np.mean(d**2, axis=(1, 2))), 0.2, atol=1e-6)
    np.testing.assert_allclose(np.abs(d[0, 4:]), 0.2 * np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(np.abs(d[1:]), 0.2, rtol=1e-6)


def test_step_of_the_parameters():
    eta, decay = 0.03, 0.1
    x, g = jnp.asarray(gaussian((16, 24))), jnp.asarray(gaussian((16, 24), 1))
    new, _ = run(olion(eta, weight_decay=decay), {"w": x}, {"w": g})
    np.testing.assert_allclose(jnp.max(jnp.abs(new["w"] - (1 - decay * eta) * x)), 0.2 * eta, rtol=1e-4)


def test_rms_target_eps_and_alternations_are_used():
    g = jnp.asarray(gaussian((16, 16)))
    np.testing.assert_allclose(jnp.abs(first_direction(g, rms_target=0.7)), 0.7, rtol=1e-6)
    np.testing.assert_allclose(jnp.abs(first_direction(g, eps=16.0)), 0.1, rtol=1e-6)
    twice = np.sign(polar(np.sign(polar(gaussian((16, 16)).astype(np.float64)))))
    np.testing.assert_array_equal(jnp.sign(first_direction(g, orthogonalizer="svd", alternations=2)), twice)


# Invariances


@pytest.mark.parametrize("shape", [(24, 24), (16, 48)])
def test_positive_rescaling_changes_nothing(shape):
    g = gaussian(shape)
    g /= np.linalg.norm(g)
    d = first_direction(jnp.asarray(g))
    for exponent in (-60, -40, -1, 1, 40, 60):
        np.testing.assert_array_equal(first_direction(jnp.asarray(g * np.float32(2.0**exponent))), d)
    for scale in (1e-12, 0.3, 1e6):
        assert np.mean(first_direction(jnp.asarray(g * np.float32(scale))) == d) >= 0.999


@pytest.mark.parametrize("orthogonalizer", ["auto", "svd"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transposition_permutation_and_sign_flips(orthogonalizer, dtype):
    rng = np.random.default_rng(5)
    with jax.enable_x64(dtype == np.float64):
        direction = partial(first_direction, orthogonalizer=orthogonalizer)
        for shape in [(48, 48), (32, 80)]:
            g = gaussian(shape, 1, dtype)
            d = np.asarray(direction(jnp.asarray(g)))
            assert d.dtype == dtype
            rows, cols = rng.permutation(shape[0]), rng.permutation(shape[1])
            flip_rows, flip_cols = (rng.choice([-1.0, 1.0], n).astype(dtype) for n in shape)
            pairs = [
                (direction(jnp.asarray(g.T)).T, d),
                (direction(jnp.asarray(g[rows][:, cols])), d[rows][:, cols]),
                (
                    direction(jnp.asarray(flip_rows[:, None] * g * flip_cols)),
                    flip_rows[:, None] * d * flip_cols,
                ),
            ]
            for got, wanted in pairs:
                share = np.mean(np.asarray(got) == wanted)
                assert share == 1 if dtype == np.float64 else share >= 0.999


# Momentum


def test_first_step_mixes_seven_percent_of_the_gradient():
    # G = (1 - b1 b2) g when M₀ = 0; seen without the sign through Lion's limit of one entry per block.
    g = jnp.asarray(gaussian((6, 9)))
    tx = scale_by_olion()
    _, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(state.mu, 0.02 * g, rtol=1e-6)
    mixed = 0.05 * g + 0.95 * state.mu
    np.testing.assert_allclose(mixed, (1 - 0.95 * 0.98) * g, rtol=1e-5)


def test_constant_gradient_gives_constant_signs():
    g = jnp.asarray(gaussian((16, 40)))
    tx = scale_by_olion()
    state, update, first = tx.init(g), jax.jit(tx.update), None
    for _ in range(6):
        d, state = update(g, state)
        first = d if first is None else first
        assert np.mean(d == first) >= 0.999


@pytest.mark.parametrize("shape", [(24, 64), (32, 32)])
@pytest.mark.parametrize(
    ("orthogonalizer", "reference"), [("auto", newton_schulz), ("svd", polar), ("identity", lambda g: g)]
)
def test_ten_steps_against_float64(shape, orthogonalizer, reference):
    grads = gaussian((10, *shape))
    tx = scale_by_olion(orthogonalizer=orthogonalizer)
    state, update = tx.init(jnp.asarray(grads[0])), jax.jit(tx.update)
    m, agreement = np.zeros(shape), []
    for g in grads:
        d, state = update(jnp.asarray(g), state)
        g = g.astype(np.float64)
        # With identity this is Lion at RMS 0.2: sign of 0.069 g + 0.931 M of the step before.
        mixed = (1 - 0.95 * 0.98) * g + 0.95 * 0.98 * m
        m = 0.98 * m + 0.02 * g
        agreement.append(np.mean(np.sign(d) == np.sign(reference(mixed))))
    assert np.mean(agreement) >= 0.999
    np.testing.assert_allclose(state.mu, m, atol=1e-6)
    assert state.count == 10


def test_identity_is_rms_matched_lion_of_optax():
    # Lion mixes with the old momentum: optax.lion(b1 = 0.931, b2 = 0.98) is the identity limit.
    tx, lion = scale_by_olion(orthogonalizer="identity"), optax.scale_by_lion(b1=0.95 * 0.98, b2=0.98)
    grads = jnp.asarray(gaussian((8, 12, 10)))
    state, lion_state = tx.init(grads[0]), lion.init(grads[0])
    for g in grads:
        d, state = tx.update(g, state)
        wanted, lion_state = lion.update(g, lion_state)
        assert np.mean(np.asarray(d) == 0.2 * np.asarray(wanted)) >= 0.999


# Limits and geometry


def test_hadamard_matrix_is_attained():
    h = scipy.linalg.hadamard(64).astype(np.float32)
    d = first_direction(jnp.asarray(3e-4 * h))
    np.testing.assert_array_equal(jnp.sign(d), h)
    np.testing.assert_allclose(np.linalg.norm(np.sign(d), 2), 8, rtol=1e-6)


@pytest.mark.parametrize("orthogonalizer", ["ns", "gram", "polar_express", "svd"])
def test_rank_one(orthogonalizer):
    u, v = gaussian(24), gaussian(40, 1)
    d = first_direction(jnp.asarray(np.outer(u, v)), orthogonalizer=orthogonalizer)
    np.testing.assert_array_equal(jnp.sign(d), np.sign(np.outer(u, v)))


def test_spectral_control():
    for seed in range(3):
        u, v, noise = gaussian((256, 4), seed), gaussian((4, 256), seed + 10), gaussian((256, 256), seed + 20)
        g = 3 * u @ v + noise
        assert np.linalg.norm(np.sign(g), 2) / 16 > 5
        assert np.linalg.norm(np.sign(first_direction(jnp.asarray(g))), 2) / 16 < 2


def test_descent_inequality():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((20, 12)), rng.standard_normal((20, 16))
        smoothness = np.linalg.norm(a, 2) ** 2
        x, eta = jnp.asarray(rng.standard_normal((12, 16))), 0.01
        tx = scale_by_olion(0.0, 0.0, orthogonalizer="svd", rms_target=1.0)

        @jax.jit
        def step(x):
            residual = a @ x - b
            g = a.T @ residual
            signs = tx.update(g, tx.init(g))[0]
            descent = olion_diagnostics(g)[""]["descent"] * jnp.linalg.norm(g)
            return x - eta * signs, 0.5 * jnp.sum(residual**2), descent

        start = 0.5 * np.sum((a @ np.asarray(x) - b) ** 2)
        for _ in range(100):
            new, f, descent = step(x)
            f_new = 0.5 * np.sum((a @ np.asarray(new) - b) ** 2)
            bound = f - eta * descent + smoothness / 2 * eta**2 * x.size
            assert f_new <= bound + 1e-9 * f
            x = new
        assert f_new < start / 2


# Blocks


def test_fused_split_heads_and_stacks_equal_separate_leaves():
    g = gaussian((32, 96))
    fused = first_direction({"w": jnp.asarray(g)}, matrix_specs={"w": MatrixSpec(0, 1, (32, 32, 32))})["w"]
    parts = [first_direction(jnp.asarray(block)) for block in np.split(g, 3, axis=1)]
    assert np.mean(fused == np.concatenate(parts, axis=1)) >= 0.9999

    heads = {"attn": {"query": {"kernel": jnp.asarray(gaussian((32, 4, 8)))}}}
    specs = default_matrix_specs(heads, per_head=True)
    per_head = first_direction(heads, matrix_specs=specs)["attn"]["query"]["kernel"]
    for i in range(4):
        single = first_direction(heads["attn"]["query"]["kernel"][:, i])
        assert np.mean(per_head[:, i] == single) >= 0.999
    together = first_direction(heads)["attn"]["query"]["kernel"]
    flat = first_direction(heads["attn"]["query"]["kernel"].reshape(32, 32))
    np.testing.assert_array_equal(together, flat.reshape(32, 4, 8))


def test_leaves_without_a_spec_pass_unchanged():
    g = {"kernel": jnp.asarray(gaussian((4, 6))), "bias": jnp.asarray(gaussian(6))}
    tx = scale_by_olion()
    state = tx.init(g)
    assert isinstance(state, ScaleByOlionState)
    assert isinstance(state.mu["bias"], optax.MaskedNode)
    np.testing.assert_array_equal(tx.update(g, state)[0]["bias"], g["bias"])


# Degenerate


def test_zero_gradient():
    params = transformer()
    new, state = run(olion(0.1, weight_decay=0.0), params, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(new, params)
    chex.assert_tree_all_finite(state)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("orthogonalizer", ["auto", "svd", "identity"])
def test_zero_rows_stay_zero_and_the_rest_grows(eps, orthogonalizer):
    g = jnp.asarray(gaussian((10, 20))).at[3].set(0)
    d = first_direction(g, eps=eps, orthogonalizer=orthogonalizer)
    np.testing.assert_array_equal(d[3], 0)
    np.testing.assert_allclose(jnp.abs(jnp.delete(d, 3, axis=0)), 0.2 * np.sqrt(10 / 9), rtol=1e-6)
    np.testing.assert_array_equal(first_direction(0 * g, eps=eps, orthogonalizer=orthogonalizer), 0 * g)


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("orthogonalizer", ["auto", "svd", "identity"])
def test_a_broken_gradient_shows_in_its_leaf_only(broken, orthogonalizer):
    params = {name: {"kernel": jnp.ones((3, 4))} for name in ("a", "b", "head")}
    good = jax.tree.map(jnp.ones_like, params)
    bad = {**good, "b": {"kernel": good["b"]["kernel"].at[1, 2].set(broken)}}
    tx = optax.apply_if_finite(olion(0.1, orthogonalizer=orthogonalizer, ns_steps=2), 5)
    plain = olion(0.1, orthogonalizer=orthogonalizer, ns_steps=2)
    update = jax.jit(plain.update)
    updates, state = update(bad, plain.init(params), params)
    assert {path for path, u in by_path(updates).items() if not jnp.isfinite(u).all()} == {"b/kernel"}
    # The state remembers: a later good gradient does not hide it.
    updates, _ = update(good, state, params)
    assert not jnp.isfinite(updates["b"]["kernel"][1, 2])
    updates, _ = first_updates(tx, bad, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"b1": 1.0}, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": -0.1}, r"b2 must be in \[0, 1\), got -0.1"),
        ({"b2": float("nan")}, r"b2 must be in \[0, 1\), got nan"),
        ({"ns_steps": 0}, "number of steps must be at least 1, got 0"),
        ({"alternations": 0}, "must be at least 1, got 0"),
        ({"orthogonalizer": "newton"}, "orthogonalizer must be one of"),
        ({"ns_coeffs": (1.0,)}, "triple or a sequence of triples"),
        ({"rms_target": 0.0}, r"rms_target must be in \(0, inf\), got 0.0"),
        ({"eps": -1e-8}, "eps must be in"),
        ({"learning_rate": float("inf")}, r"learning_rate must be in \[0, inf\)"),
        ({"weight_decay": -1.0}, "weight_decay must be in"),
        ({"fallback_learning_rate": -1.0}, "fallback_learning_rate must be in"),
        ({"clip_norm": 0.0}, r"clip_norm must be in \(0, inf\), got 0.0"),
        ({"fallback": optax.sgd(0.1), "fallback_learning_rate": 0.1}, "a given fallback has its own rate"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        olion(**{"learning_rate": 0.1, **kwargs})


def test_bad_leaves_are_named_at_init():
    params = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"at least two axes.*'dense/bias'"):
        olion(0.1, matrix_specs={"dense": {"kernel": None, "bias": MatrixSpec(0, 1)}}).init(params)
    with pytest.raises(ValueError, match=r"no spec for \['dense/bias'\]"):
        olion(0.1, matrix_specs={"dense": {"kernel": None}}).init(params)
    with pytest.raises(ValueError, match="leaf 'dense/kernel' has dtype complex64"):
        olion(0.1).init({"dense": {"kernel": jnp.ones((3, 4), jnp.complex64)}})
    with pytest.raises(ValueError, match=r"weight_decay_mask must hold a boolean.*'dense/bias'"):
        olion(0.1, weight_decay_mask={"dense": {"kernel": True}}).init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        olion(0.1).update(params, olion(0.1).init(params))


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


def test_schedules_for_every_scalar():
    params = {"dense": {"kernel": jnp.asarray(gaussian((8, 24))), "bias": jnp.ones(24)}}
    grads = random_like(params)
    numbers = {
        "learning_rate": 0.1,
        "b1": 0.9,
        "b2": 0.8,
        "ns_steps": 3,
        "rms_target": 0.3,
        "eps": 1e-3,
        "alternations": 2,
        "weight_decay": 0.2,
        "fallback_learning_rate": 0.05,
        "clip_norm": 2.0,
    }
    schedules = {name: (lambda count, value=value: jnp.asarray(value)) for name, value in numbers.items()}
    plain, _ = run(olion(**numbers), params, grads, steps=2)
    scheduled, _ = run(olion(**schedules), params, grads, steps=2)
    for path, leaf in by_path(scheduled).items():
        assert np.mean(np.isclose(leaf, by_path(plain)[path], atol=1e-5)) >= 0.99

    switch = scale_by_olion(0.0, 0.0, rms_target=lambda count: jnp.where(count < 1, 0.2, 0.5))
    g = jnp.asarray(gaussian((4, 6)))
    state = switch.init(g)
    for wanted in (0.2, 0.5):
        d, state = switch.update(g, state)
        np.testing.assert_allclose(jnp.abs(d), wanted, rtol=1e-6)


# Composition


def test_inject_hyperparams_traces_once():
    params = {"dense": {"kernel": jnp.asarray(gaussian((8, 24))), "bias": jnp.ones(24)}}
    grads = random_like(params)
    tx = optax.inject_hyperparams(olion)(learning_rate=0.1, clip_norm=5.0, fallback_learning_rate=0.1)
    traces = []

    @jax.jit
    def update(grads, state, params):
        traces.append(1)
        return tx.update(grads, state, params)

    state = jax.jit(tx.init)(params)
    settings = [
        {},
        {"learning_rate": 0.3, "ns_steps": 3, "rms_target": 0.4},
        {"b1": 0.5, "b2": 0.6, "alternations": 2},
    ]
    for changes in settings:
        for name, value in changes.items():
            state.hyperparams[name] = jnp.full_like(state.hyperparams[name], value)
        now = {name: value.item() for name, value in state.hyperparams.items()}
        updates, new_state = update(grads, state, params)
        static = olion(**now)
        wanted, _ = jax.jit(static.update)(grads, state.inner_state, params)
        for got, leaf in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
            assert np.mean(np.isclose(got, leaf, rtol=1e-4, atol=1e-6)) >= 0.99
        state = new_state
    assert len(traces) == 1


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


def test_multi_steps_averages_gradients():
    params = transformer()
    first, second = random_like(params, 1), random_like(params, 50)
    tx = optax.MultiSteps(quick_olion(0.1), every_k_schedule=2)
    update, state, current = jax.jit(tx.update), tx.init(params), params
    for grads in (first, second):
        updates, state = update(grads, state, current)
        current = optax.apply_updates(current, updates)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    wanted, _ = run(quick_olion(0.1), params, mean)
    for got, leaf in zip(jax.tree.leaves(current), jax.tree.leaves(wanted), strict=True):
        assert np.mean(np.isclose(got, leaf, atol=1e-5)) >= 0.99


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


def test_donated_buffers_and_scan():
    params, grads = transformer(), random_like(transformer())
    tx = quick_olion(0.1)
    wanted, _ = run(tx, params, grads, steps=3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donated, state = jax.tree.map(jnp.copy, params), tx.init(params)
    for _ in range(3):
        donated, state = step(donated, state)
    chex.assert_trees_all_equal(donated, wanted)

    def body(carry, _):
        return step(*carry), None

    (scanned, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=3)
    chex.assert_trees_all_close(scanned, wanted, atol=1e-5)


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


def test_sharded_equals_unsharded():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jnp.asarray(gaussian((32, 96))), "s": jnp.asarray(gaussian((2, 24, 24)))}
    grads = random_like(params)
    tx = olion(0.1, ns_steps=3)
    wanted, _ = run(tx, params, grads, steps=2)
    for axes in (("data", None), (None, "data")):
        sharding = {
            "w": jax.NamedSharding(mesh, jax.P(*axes)),
            "s": jax.NamedSharding(mesh, jax.P(*axes, None)),
        }
        placed, placed_grads = jax.device_put(params, sharding), jax.device_put(grads, sharding)
        got, _ = run(tx, placed, placed_grads, steps=2)
        for name in params:
            assert got[name].sharding.is_equivalent_to(sharding[name], got[name].ndim)
            assert np.mean(np.isclose(got[name], wanted[name], atol=1e-6)) >= 0.999


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
