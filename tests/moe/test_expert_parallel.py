"""Experts spread over devices: the same numbers, and only tokens travel."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.moe.dispatch import ExpertKernels, dense_experts
from jaxlib_icml.moe.expert_parallel import expert_parallel
from jaxlib_icml.nn import state_shardings
from jaxlib_icml.training.config import TrainConfig, updated
from jaxlib_icml.training.loop import train
from kernels_pallas import aot
from tests.collectives import collectives

ROOT = Path(__file__).parents[2]


def spread(count=2, names=("expert",)):
    sizes = (count,) + (1,) * (len(names) - 1)
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def problem(tokens=12, experts=4, active=2, width=8, hidden=6):
    keys = jax.random.split(jax.random.key(0), 6)
    matrices = [jax.random.normal(k, (experts, width, hidden)) for k in keys[:2]]
    kernels = ExpertKernels(tuple(matrices), jax.random.normal(keys[2], (experts, hidden, width)))
    indices = jax.lax.top_k(jax.random.normal(keys[3], (tokens, experts)), active)[1].astype(jnp.int32)
    return jax.random.normal(keys[4], (tokens, width)), kernels, jax.random.normal(keys[5], (tokens, active)), indices


def test_two_devices_equal_one():
    args = problem()
    for indices in (args[3], args[3] * 0 + jnp.arange(2), args[3].at[::3].set(4)):
        args = (*args[:3], indices)
        got = jax.jit(lambda *args: expert_parallel(*args, local=dense_experts, mesh=spread()))(*args)
        np.testing.assert_allclose(got, dense_experts(*args), atol=1e-5)


def test_layer_finds_the_mesh_that_surrounds_it():
    layer = SparseMoE(8, 6, 4, 2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)[0])
    with jax.set_mesh(spread()):
        sharded = jax.device_put(state, state_shardings(state, spread()))
        compiled = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)[0]).lower(sharded, x).compile()
    np.testing.assert_allclose(compiled(sharded, x), run(state, x), atol=1e-5)
    assert collectives(compiled)[0]["all-to-all"] == 4
    # A single token does not divide over two devices; nobody has to know.
    with jax.set_mesh(spread()):
        jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)[0])(sharded, x[:1, :1])


@pytest.mark.slow
def test_eight_devices():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
    command = [sys.executable, "-m", "tests.moe.expert_parallel_cases"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_misuse():
    args = problem()
    with pytest.raises(ValueError, match="no axis 'expert', only data"):
        expert_parallel(*args, local=dense_experts, mesh=spread(names=("data",)))
    with pytest.raises(ValueError, match="no axis 'expert', only none"):
        expert_parallel(*args, local=dense_experts)
    with pytest.raises(ValueError, match="3 experts do not divide over 2 devices"):
        expert_parallel(*problem(experts=3), local=dense_experts, mesh=spread())
    with pytest.raises(ValueError, match="11 tokens do not divide"):
        expert_parallel(*problem(tokens=11), local=dense_experts, mesh=spread())
    layer = SparseMoE(8, 6, 4, 2, path="expert_parallel", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no axis 'expert'"):
        layer(jnp.ones((2, 8)))


def test_a_run_whose_experts_do_not_divide_is_refused_before_it_starts(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 500)
    values = {
        "data": str(tmp_path / "a.txt"),
        "run_dir": str(tmp_path / "run"),
        "model": {"num_experts": 3},
        "mesh": {"data": 1, "expert": 2},
    }
    with pytest.raises(ValueError, match=r"num_experts: 3 .* mesh\.expert = 2"):
        train(updated(TrainConfig(), values))
    assert not (tmp_path / "run").exists()


@pytest.mark.aot
def test_a_pod_exchanges_tokens_and_keeps_its_experts():
    """Sixty-four v5p chips, experts over eight of them: four exchanges a layer each way, no expert's weights travel."""
    pod = aot.make_mesh("v5p:4x4x4", (8, 8), ("data", "expert"))
    width, hidden, experts, rows, seq = 1024, 2048, 64, 64, 1024
    layer = nnx.eval_shape(lambda: SparseMoE(width, hidden, experts, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(layer)
    shardings = state_shardings(state, pod)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    tokens = NamedSharding(pod, PartitionSpec(("data", "expert")))
    x = jax.ShapeDtypeStruct((rows, seq, width), jnp.bfloat16, sharding=tokens)

    def loss(state, x):
        with jax.sharding.use_abstract_mesh(pod.abstract_mesh):
            y, stats = nnx.merge(graphdef, state)(x)
        return jnp.mean(y.astype(jnp.float32) ** 2) + stats.aux_loss

    # Gathers and scatters stay on the main core: jaxlib cannot read the text of what goes to the sparse ones.
    names = ("xla_tpu_offload_gather_to_sparsecore", "xla_tpu_enable_offloading_scatter_to_sparsecore")
    options = dict.fromkeys(names, "false")
    gradient = jax.jit(jax.grad(loss, allow_int=True), out_shardings=shardings)
    count, received = collectives(gradient.lower(state, x).compile(options))
    assert count["all-to-all"] <= 8
    assert count["all-gather"] == 0
    # Per chip: its share of an expert's gradient, summed over `data`, and tokens there and back, twice.
    gradients = 3 * width * hidden * (experts // 8) * 4
    exchange = 4 * 8 * (rows * seq // 64) * width * 2
    assert received < 1.5 * (gradients + exchange)
