"""Sharded updates: equal to the unsharded ones, with whole matrices on single devices."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlib_icml.optim import MatrixSpec, olion, scale_by_olion
from jaxlib_icml.optim.distribution import MatrixLayout, matrix_layout
from jaxlib_icml.optim.olion import scaled_signs
from jaxlib_icml.optim.orthogonalize import orthogonalize
from kernels_pallas import aot
from tests.collectives import collectives

P = PartitionSpec
ROOT = Path(__file__).parents[2]


def mesh(*shape, names=("fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def test_layouts():
    both = mesh(2, 1)
    sharding = NamedSharding(both, P("fsdp", None, "tensor"))
    heads = matrix_layout(sharding, (4, 8, 6), MatrixSpec((0, 1), 2), (32, 6))
    assert heads == MatrixLayout(both, (), ("fsdp",), ("tensor",))
    experts = matrix_layout(sharding, (4, 8, 6), MatrixSpec(1, 2), (4, 8, 6))
    assert experts == MatrixLayout(both, (("fsdp",),), (), ("tensor",))
    # Blocks that two devices cannot share evenly, and tensors that are whole already.
    uneven = NamedSharding(both, P(None, "fsdp"))
    assert matrix_layout(uneven, (8, 12), MatrixSpec(0, 1, split=(7, 5)), (8, 7)) == MatrixLayout(both, (), (), ())
    assert matrix_layout(None, (8, 12), MatrixSpec(0, 1), (8, 12)) is None
    assert matrix_layout(NamedSharding(mesh(1, 1), P("fsdp")), (8, 12), MatrixSpec(0, 1), (8, 12)) is None


def test_bad_shardings_are_named():
    params = {"a": {"kernel": jnp.zeros((4, 4))}}
    with pytest.raises(ValueError, match="nothing for 'a/kernel'"):
        olion(0.1, param_shardings={"a": {}}).init(params)
    with pytest.raises(ValueError, match="NamedSharding or None, got 'fsdp' for 'a/kernel'"):
        olion(0.1, param_shardings={"a": {"kernel": "fsdp"}}).init(params)


@pytest.mark.parametrize("spec", [P("fsdp", None), P(None, "fsdp"), P()])
def test_olion_on_two_devices_equals_olion_on_one(spec):
    """Whole optimizer, three steps, parameters in every layout of two devices."""
    keys = jax.random.split(jax.random.key(3), 3)
    params = {name: jax.random.normal(k, (16, 24)) for name, k in zip("ab", keys, strict=False)}
    params["embed"] = jax.random.normal(keys[2], (10, 16))
    shardings = {name: NamedSharding(mesh(2, 1), spec) for name in params}

    def train(tx, params):
        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state)
        return params

    want = train(olion(0.1), params)
    got = train(olion(0.1, param_shardings=shardings), jax.device_put(params, shardings))
    for name in params:
        assert np.mean(np.abs(got[name] - want[name]) < 1e-5) > 0.999


@pytest.mark.slow
def test_every_layout_on_eight_devices():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
    command = [sys.executable, "-m", "tests.optim.distribution_cases"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compile_update(tx, params):
    """`tx.update` for gradients and momentum in the layout of the parameters."""
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, P())
    state = jax.eval_shape(tx.init, params)
    scalars = {name: x for name, x in state._asdict().items() if name != "mu"}
    scalars = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), scalars)
    state = state._replace(mu=params, **scalars)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(tx.update, out_shardings=shardings).lower(params, state).compile()


def shapes(mesh, **leaves):
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in leaves.items()
    }


@pytest.mark.aot
def test_eight_layers_on_a_pod(monkeypatch):
    """Width 2048, MLP 8192, 16 x 4 chips: few collectives, none in the iteration, little imbalance, few bytes."""
    # The compiler counts the operations of plain products only, not those inside Pallas kernels.
    monkeypatch.setattr(sys.modules["jaxlib_icml.optim.orthogonalize"], "_SMALLEST_SYMMETRIC", {16: math.inf})
    pod = aot.make_mesh("v5p:4x4x4", (16, 4), ("fsdp", "tensor"))
    square, wide, into, back = (2048, 2048), (2048, 8192), P("fsdp", "tensor"), P("tensor", "fsdp")
    layer = {"q": (square, into), "k": (square, into), "v": (square, into), "o": (square, back)}
    layer |= {"up": (wide, into), "down": (wide[::-1], back)}
    params = {f"layer{i}": shapes(pod, **layer) for i in range(8)}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    ours = compile_update(scale_by_olion(ns_dtype="bfloat16", param_shardings=shardings), params)
    numbers = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)
    muon = compile_update(optax.contrib.scale_by_muon(weight_dimension_numbers=numbers), params)

    count, received = collectives(ours)
    muon_count, muon_received = collectives(muon)
    assert count.total() <= 24
    assert muon_count["all-gather"] > 400
    assert received <= muon_received / 3
    assert "while" not in ours.as_text()  # unrolled: nothing is hidden in a loop, and all operations are counted

    def flops(shape):
        def one(g):
            return scaled_signs(g, lambda x: orthogonalize(x, dtype="bfloat16"))

        return aot.compile_for("v5p", one, jax.ShapeDtypeStruct((1, *shape), jnp.float32)).cost_analysis()["flops"]

    # 32 square matrices can be shared by 32 of the 64 chips, 16 wide ones by 16.
    assert ours.cost_analysis()["flops"] <= 1.35 * (flops(square) + flops(wide))


@pytest.mark.aot
def test_scanned_layers_and_stacked_experts():
    chips = aot.make_mesh("v5p:2x2x1", (2, 2), ("fsdp", "expert"))
    scanned = shapes(chips, w=((8, 256, 512), P(None, "fsdp", "expert")))
    shardings = jax.tree.map(lambda x: x.sharding, scanned)
    tx = scale_by_olion(ns_dtype="bfloat16", param_shardings=shardings)
    count, _ = collectives(compile_update(tx, scanned))
    assert 0 < count.total() <= 3

    experts = shapes(chips, up=((8, 256, 512), P(("expert", "fsdp"))), down=((8, 512, 256), P(("expert", "fsdp"))))
    shardings = jax.tree.map(lambda x: x.sharding, experts)
    tx = scale_by_olion(ns_dtype="bfloat16", param_shardings=shardings)
    count, _ = collectives(compile_update(tx, experts))
    assert count.total() == 0


@pytest.mark.aot
def test_shared_matrices_take_the_symmetric_kernel():
    """Inside the iteration of sharded parameters matrices are whole, so half of every symmetric product is left out."""
    chips = aot.make_mesh("v5p:2x2x1", (4,), ("fsdp",))
    params = shapes(chips, w=((512, 1024), P("fsdp", None)))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    text = compile_update(scale_by_olion(ns_dtype="bfloat16", param_shardings=shardings), params).as_text()
    assert "symmetric_product" in text
    assert "tpu_custom_call" in text
