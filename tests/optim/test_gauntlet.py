"""What every transformation of `jaxlib_icml.optim` must survive, in one table of cases.

A public factory without a row in `CASES` fails the first test. OLion and Muon run two Newton-Schulz steps.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlib_icml import optim
from jaxlib_icml.optim._arguments import ScalarOrSchedule
from jaxlib_icml.optim.olion import Scalar


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        factory: the public function.
        numbers: two values for every numeric argument; the first one is used where nothing is varied.
        static: numeric arguments that neither schedules nor traced values make sense for.
        fixed: other arguments.
        momentum: whether there is a momentum with `mu_dtype`.
        complex_leaves: whether complex leaves pass (else they are refused, with their path).
        alone: changes that make a leaf's update independent of other leaves, None where there are none.
    """

    factory: Callable[..., optax.GradientTransformation]
    numbers: dict[str, tuple[float, float]]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    momentum: bool = False
    complex_leaves: bool = False
    alone: dict[str, Any] | None = dataclasses.field(default_factory=dict)


def by_rank(tree):
    return jax.tree.map(lambda x: "even" if x.ndim % 2 == 0 else "odd", tree)


OLION = {
    "b1": (0.95, 0.5),
    "b2": (0.98, 0.6),
    "ns_steps": (2, 1),
    "rms_target": (0.2, 0.5),
    "eps": (1e-8, 0.1),
    "alternations": (1, 2),
}
OLION_RATES = {
    "learning_rate": (0.1, 0.03),
    "weight_decay": (0.1, 0.4),
    "fallback_learning_rate": (0.2, 0.05),
    "clip_norm": (5.0, 0.5),
}
STABILIZER = {"gamma1": (0.6, 0.2), "gamma2": (0.999, 0.9), "eps": (1e-12, 0.3), "winsorize": (5.0, 1.1)}
stabilizer = functools.partial(Case, optim.gradient_stabilizer, STABILIZER, complex_leaves=True)

CASES = {
    "olion": Case(optim.olion, OLION_RATES | OLION, momentum=True, alone={"clip_norm": None}),
    "scale_by_olion": Case(optim.scale_by_olion, OLION, momentum=True),
    "muon_direction": Case(
        optim.muon_direction, {"beta": (0.95, 0.5), "ns_steps": (2, 1), "rms_target": (0.2, 0.5)}, momentum=True
    ),
    "stabilizer-leaf": stabilizer(),
    "stabilizer-layer": stabilizer(fixed={"scope": "layer"}),
    "stabilizer-global": stabilizer(fixed={"scope": "global"}, alone=None),
    "stabilizer-labels": stabilizer(fixed={"scope": by_rank}, alone=None),
    "zclip": Case(optim.zclip, {"alpha": (0.97, 0.5), "z": (1.0, 0.5)}, {"warmup": 2}, complex_leaves=True, alone=None),
    "scale_by_spam": Case(
        optim.scale_by_spam,
        {"b1": (0.9, 0.5), "b2": (0.999, 0.9), "eps": (1e-8, 0.1), "threshold": (50.0, 1.5)},
        {"reset_every": 3, "warmup": 2},
    ),
    # Optax's own: no schedules, no check of its leaves.
    "agc": Case(optim.agc, {"clipping": (0.01, 0.1), "eps": (1e-3, 1.0)}, complex_leaves=True),
    "value_clip": Case(optim.value_clip, {"threshold": (0.1, 0.5)}),
}
OURS = [name for name in CASES if name != "agc"]
# The same code with other arguments: one of each kind is quick.
VARIANTS = {"scale_by_olion", "stabilizer-layer", "stabilizer-global", "stabilizer-labels"}


def parametrised(names):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in names]
    )


each_case, each_of_ours = parametrised(CASES), parametrised(OURS)


def make(name, which=0, **changes):
    case = CASES[name]
    numbers = {key: pair[which] for key, pair in case.numbers.items()}
    return case.factory(**{**case.static, **case.fixed, **numbers, **changes})


SHAPES = {
    "conv": {"kernel": (2, 2, 3, 4)},
    "dense": {"kernel": (4, 6), "bias": (6,)},
    "gain": (),
    "layers": {"kernel": (2, 4, 6)},
}
STEPS = 4


def random_tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


PARAMS = random_tree(100)
# Norms that vary, so that every clip and every statistic has something to do.
GRADS = [jax.tree.map(lambda g, s=s: g * s, random_tree(t)) for t, s in enumerate((1.0, 4.0, 0.5, 30.0))]


@functools.cache
def jitted(name, which=0):
    tx = make(name, which)
    return jax.jit(tx.init), jax.jit(tx.update)


@functools.cache
def plain_run(name):
    """Updates of every step and the states after them; shared by the tests, which change neither."""
    init, update = jitted(name)
    return run(init, update)


def run(init, update, grads=GRADS, params=PARAMS):
    state, outs, states = init(params), [], []
    for g in grads:
        out, state = update(g, state, params)
        outs.append(out)
        states.append(state)
    return outs, states


def assert_same(got, wanted, *, rtol=1e-5, share=1.0):
    """Equal structures, shapes and dtypes, and all values (or their share) equal up to rounding."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    near = [
        np.isclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=rtol, atol=1e-6).ravel()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    ]
    assert np.mean(np.concatenate([np.ones(1, bool), *near])) >= share


# The table


def public_factories():
    found = {}
    for name in optim.__all__:
        function = getattr(optim, name)
        if inspect.isfunction(function):
            returned = typing.get_type_hints(function).get("return")
            if inspect.isclass(returned) and issubclass(returned, optax.GradientTransformation):
                found[name] = function
    return found


def test_every_public_transformation_is_in_the_table():
    factories = public_factories()
    assert {"olion", "gradient_stabilizer", "agc"} <= set(factories)
    assert {id(f) for f in factories.values()} == {id(case.factory) for case in CASES.values()}


@pytest.mark.parametrize("name", OURS)
def test_every_number_of_a_signature_is_varied_and_schedulable(name):
    case = CASES[name]
    numeric, schedulable = set(), set()
    for key, parameter in inspect.signature(case.factory).parameters.items():
        hint = parameter.annotation
        if hint in (ScalarOrSchedule, Scalar, ScalarOrSchedule | None, Scalar | None):
            schedulable.add(key)
        if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
            numeric.add(key)
    assert schedulable == set(case.numbers)
    assert numeric - schedulable == set(case.static)


# Transformations of JAX


@each_case
def test_types_stay_and_values_are_finite(name):
    outs, states = plain_run(name)
    # A state that changes its types would break `lax.scan` and recompile.
    chex.assert_trees_all_equal_shapes_and_dtypes(states[-1], jitted(name)[0](PARAMS))
    chex.assert_trees_all_equal_shapes_and_dtypes(outs[-1], PARAMS)
    chex.assert_tree_all_finite((outs, states))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (outs[-1], GRADS[-1])), strict=True))


@pytest.mark.slow
@each_case
def test_jit_equals_eager(name):
    tx = make(name)
    state = tx.init(PARAMS)
    chex.assert_trees_all_equal(state, jitted(name)[0](PARAMS))
    outs, states = plain_run(name)
    assert_same(tx.update(GRADS[0], state, PARAMS), (outs[0], states[0]))


@each_case
def test_vmap_over_every_number(name):
    numbers = {key: jnp.asarray(pair) for key, pair in CASES[name].numbers.items()}

    @jax.jit
    @jax.vmap
    def update(numbers):
        tx = make(name, **numbers)
        return tx.update(GRADS[1], tx.init(PARAMS), PARAMS)[0]

    both = update(numbers)
    for which in range(2):
        init, static = jitted(name, which)
        wanted, _ = static(GRADS[1], init(PARAMS), PARAMS)
        assert_same(jax.tree.map(lambda x, i=which: x[i], both), wanted, rtol=1e-4)


@each_case
def test_donated_buffers(name):
    tx = make(name)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    outs, states = plain_run(name)
    params, state = jax.tree.map(jnp.copy, PARAMS), jax.tree.map(jnp.copy, jitted(name)[0](PARAMS))
    given = [x for x in jax.tree.leaves(params) if x.ndim]
    params, state = step(params, state, GRADS[0])
    assert_same((params, state), (optax.apply_updates(PARAMS, outs[0]), states[0]))
    assert all(x.is_deleted() for x in given)
    chex.assert_tree_all_finite(step(params, state, GRADS[1]))


# Wrappers of Optax


def below(keys, tree):
    return {key: tree[key] for key in keys}


@each_case
def test_masked_and_partition(name):
    """Three groups: ours, another transformation's, and one that no transformation sees."""
    ours = ("conv", "dense")
    labels = {"conv": "ours", "dense": "ours", "gain": "theirs", "layers": "theirs"}
    tx = optax.partition({"ours": make(name), "theirs": optax.scale(3.0)}, labels)
    tx = optax.masked(tx, {"conv": True, "dense": True, "gain": True, "layers": False})
    outs, _ = run(tx.init, jax.jit(tx.update), GRADS[:2])
    wanted, _ = run(*jitted(name), [below(ours, g) for g in GRADS[:2]], below(ours, PARAMS))
    for out, part, grads in zip(outs, wanted, GRADS, strict=False):
        assert_same(below(ours, out), part)
        np.testing.assert_array_equal(out["gain"], 3 * grads["gain"])
        np.testing.assert_array_equal(out["layers"]["kernel"], grads["layers"]["kernel"])


@each_case
def test_chain_and_apply_if_finite(name):
    tx = optax.apply_if_finite(optax.chain(optax.scale(-2.0), make(name), optax.scale(-0.5)), max_consecutive_errors=3)
    bad = {**GRADS[1], "gain": jnp.float32(jnp.nan)}
    (first, rejected, second), states = run(tx.init, jax.jit(tx.update), [GRADS[0], bad, GRADS[1]])
    doubled, _ = run(*jitted(name), [jax.tree.map(lambda g: -2 * g, g) for g in GRADS[:2]])
    assert_same([first, second], [jax.tree.map(lambda u: -0.5 * u, u) for u in doubled])
    chex.assert_trees_all_equal(rejected, jax.tree.map(jnp.zeros_like, rejected))
    chex.assert_trees_all_equal(states[1].inner_state, states[0].inner_state)


@functools.cache
def changing_run(name):
    """Static transformations: the first numbers for the first step, the second ones afterwards."""
    init, update = jitted(name)
    out, state = update(GRADS[0], init(PARAMS), PARAMS)
    outs = [out]
    for grads in GRADS[1:]:
        out, state = jitted(name, 1)[1](grads, state, PARAMS)
        outs.append(out)
    return outs


@each_case
def test_inject_hyperparams_traces_once(name):
    case = CASES[name]
    static = {*case.static, *(key for key, value in case.fixed.items() if callable(value))}
    numbers = {key: pair[0] for key, pair in case.numbers.items()}
    tx = optax.inject_hyperparams(case.factory, static_args=static)(**case.static, **case.fixed, **numbers)
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(PARAMS)
    for t, (grads, wanted) in enumerate(zip(GRADS, changing_run(name), strict=True)):
        for key, pair in case.numbers.items():
            state.hyperparams[key] = jnp.full_like(state.hyperparams[key], pair[t > 0])
        out, state = update(grads, state, PARAMS)
        assert_same(out, wanted, rtol=1e-4)


@each_of_ours
def test_schedules_for_every_number(name):
    pairs = CASES[name].numbers
    schedules = {key: (lambda count, a=a, b=b: jnp.where(count < 1, a, b)) for key, (a, b) in pairs.items()}
    tx = make(name, **schedules)
    outs, _ = run(jax.jit(tx.init), jax.jit(tx.update))
    assert_same(outs, changing_run(name), rtol=1e-4)


@each_case
def test_multi_steps_takes_the_mean(name):
    tx = optax.MultiSteps(make(name), every_k_schedule=STEPS)
    outs, _ = run(tx.init, jax.jit(tx.update))
    for out in outs[:-1]:
        chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))
    mean = jax.tree.map(lambda *g: sum(g) / STEPS, *GRADS)
    init, update = jitted(name)
    assert_same(outs[-1], update(mean, init(PARAMS), PARAMS)[0], rtol=1e-4)


# Leaves


@each_case
@pytest.mark.parametrize("tree", [{}, (), [], {"a": None, "b": [optax.MaskedNode()]}], ids=str)
def test_trees_without_leaves(name, tree):
    tx = make(name)
    state = tx.init(tree)
    out, after = tx.update(tree, state, tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    chex.assert_tree_all_finite(after)


HALF = [(name, dtype, None) for name in CASES for dtype in ("bfloat16", "float16")]
HALF += [(name, "bfloat16", mu) for name, case in CASES.items() if case.momentum for mu in ("float32", "bfloat16")]
QUICK_HALF = {("bfloat16", None), ("bfloat16", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "dtype", "mu_dtype"),
    [pytest.param(*x, marks=[pytest.mark.slow] if x[0] in VARIANTS or x[1:] not in QUICK_HALF else []) for x in HALF],
)
def test_half_precision(name, dtype, mu_dtype):
    tx = make(name, **({"mu_dtype": mu_dtype} if mu_dtype else {}))
    params, grads = random_tree(100, dtype), [random_tree(t, dtype) for t in range(2)]
    outs, states = run(jax.jit(tx.init), jax.jit(tx.update), grads, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(outs[0], params)
    chex.assert_trees_all_equal_shapes_and_dtypes(states[1], jax.eval_shape(tx.init, params))
    state_dtypes = {x.dtype.name for x in jax.tree.leaves(states)}
    assert state_dtypes <= {"float32", "int32", mu_dtype}
    assert mu_dtype is None or mu_dtype in state_dtypes
    # The same numbers in float32. Momentum in bfloat16 may turn the sign of an entry near zero.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads))
    wanted, _ = run(*jitted(name), wide[1], wide[0])
    outs = jax.tree.map(lambda x: x.astype(jnp.float32), outs)
    if name == "muon_direction" and mu_dtype == "bfloat16":  # no sign: errors of the momentum remain
        for out, full in zip(*map(jax.tree.leaves, (outs, wanted)), strict=True):
            assert np.linalg.norm(out - full) < 0.02 * np.linalg.norm(full)
    else:
        eps = float(jnp.finfo(dtype).eps)
        assert_same(outs, wanted, rtol=4 * eps, share=0.97 if mu_dtype == "bfloat16" else 1.0)


@each_case
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_complex_and_integer_leaves_are_refused_with_their_path(name, dtype):
    case = CASES[name]
    tree = {"dense": {"kernel": jnp.ones((4, 6), dtype)}, "gain": jnp.ones(())}
    if dtype == jnp.complex64 and case.complex_leaves:
        tree["dense"]["kernel"] *= 3 + 4j
        tx = make(name)
        out, _ = tx.update(tree, tx.init(tree), tree)
        chex.assert_trees_all_equal_shapes_and_dtypes(out, tree)
        z = np.asarray(out["dense"]["kernel"])
        np.testing.assert_allclose(np.angle(z), np.angle(3 + 4j), rtol=1e-5)
        assert np.all(np.abs(z) > 0)
    elif name in OURS:
        with pytest.raises(ValueError, match="dense/kernel"):
            make(name).init(tree)


@functools.cache
def jitted_alone(name):
    changes = CASES[name].alone
    if not changes:
        return jitted(name)
    tx = make(name, **changes)
    return jax.jit(tx.init), jax.jit(tx.update)


@each_case
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_broken_gradient_never_enters_the_state_silently(name, bad):
    """Either the state stays finite, or the leaf's updates are not finite, now and afterwards."""
    init, update = jitted_alone(name)
    broken = jax.tree.map(jnp.copy, GRADS[1])
    broken["dense"]["kernel"] = broken["dense"]["kernel"].at[1, 2].set(bad)
    outs, states = run(init, update, [GRADS[0], broken, GRADS[2]])
    healthy, _ = run(init, update, [GRADS[0], GRADS[1], GRADS[2]])
    finite = [all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree)) for tree in states]
    shown = [not bool(jnp.all(jnp.isfinite(out["dense"]["kernel"]))) for out in outs]
    assert finite[0]
    assert not shown[0]
    assert finite[1] or (shown[1] and shown[2])
    assert finite[2] or shown[2]
    if CASES[name].alone is not None:
        for out, wanted in zip(outs, healthy, strict=True):
            for key in ("conv", "gain", "layers"):
                chex.assert_trees_all_close(out[key], wanted[key], rtol=1e-6)
            np.testing.assert_allclose(out["dense"]["bias"], wanted["dense"]["bias"], rtol=1e-6)


LEAF_SHAPES = [(), (0,), (3,), (1, 1), (2, 3), (0, 4), (2, 0, 3), (2, 3, 4), (1, 2, 2, 3)]


def trees(dtypes):
    leaf = st.tuples(st.sampled_from(LEAF_SHAPES), st.sampled_from(dtypes)).map(lambda x: np.zeros(x[0], x[1]))
    keys = st.sampled_from(["kernel", "bias", "layers", "conv", "embedding", "w.1"])

    def extend(inner):
        few = st.lists(inner, max_size=3)
        return st.one_of(few, few.map(tuple), st.dictionaries(keys, inner, max_size=3))

    return st.recursive(leaf, extend, max_leaves=6)


def check_types(name, tree):
    tx = make(name)
    state = jax.eval_shape(tx.init, tree)
    out, after = jax.eval_shape(tx.update, tree, state, tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@each_case
def test_nested_containers_and_leaves_without_elements(name):
    rows = [jnp.zeros(shape, dtype) for shape in LEAF_SHAPES for dtype in (jnp.float32, jnp.bfloat16)]
    check_types(name, {"w.1": rows[:9], "layers": (rows[9:], {"conv": {"kernel": rows[-1]}, "none": None})})
    check_types(name, rows[0])


@pytest.mark.slow
@each_case
@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
@given(tree=trees([jnp.float32, jnp.bfloat16, jnp.float16]))
def test_any_tree_keeps_structure_shapes_and_dtypes(name, tree):
    check_types(name, tree)


@pytest.mark.slow
@each_case
@settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(tree=trees([jnp.float32]), seed=st.integers(0, 9), broken=st.booleans())
def test_any_tree_stays_finite(name, tree, seed, broken):
    tx = make(name, **(CASES[name].alone or {}))
    rng = np.random.default_rng(seed)
    params, grads = (jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree) for _ in range(2))
    out, state = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)
    chex.assert_tree_all_finite((out, state))
    leaves, treedef = jax.tree.flatten(grads)
    filled = [i for i, x in enumerate(leaves) if x.size]
    if broken and filled:
        leaves[filled[0]] = jnp.full_like(leaves[filled[0]], jnp.nan)
        out, state = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(treedef.unflatten(leaves), params)
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        assert finite or np.isnan(jax.tree.leaves(out)[filled[0]]).any()


# Machines


@each_case
def test_orbax_round_trip_in_the_middle_of_a_run(name, tmp_path):
    init, update = jitted(name)
    outs, states = plain_run(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": PARAMS, "opt_state": states[1]})
        checkpointer.wait_until_finished()
        abstract = {"params": PARAMS, "opt_state": init(PARAMS)}
        restored = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: abstract))
    state = restored["opt_state"]
    assert jax.tree.structure(state) == jax.tree.structure(states[1])
    for t in (2, 3):
        out, state = update(GRADS[t], state, restored["params"])
        chex.assert_trees_all_equal((out, state), (outs[t], states[t]))


@each_case
def test_sharded_equals_unsharded(name):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    axes = {
        "conv": {"kernel": (None, None, None, "x")},
        "dense": {"kernel": ("x", None), "bias": ("x",)},
        "gain": (),
        "layers": {"kernel": ("x", None, None)},
    }
    shardings = jax.tree.map(
        lambda axes: jax.NamedSharding(mesh, jax.P(*axes)), axes, is_leaf=lambda x: isinstance(x, tuple)
    )
    tx = make(name)

    @jax.jit
    def two_steps(grads, params):
        first, state = tx.update(grads[0], tx.init(params), params)
        second, state = tx.update(grads[1], state, params)
        return [first, second], state

    outs, state = two_steps([jax.device_put(g, shardings) for g in GRADS[:2]], jax.device_put(PARAMS, shardings))
    wanted, states = plain_run(name)
    assert_same((outs, state), (wanted[:2], states[1]), share=0.999)
    for out in outs:
        placed = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), out, shardings)
        assert all(jax.tree.leaves(placed))
