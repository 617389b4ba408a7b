"""Layers spread over eight devices in several ways equal the layer on one; run by `test_expert_parallel`."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxlib_icml.lm import LMConfig
from jaxlib_icml.moe import SparseMoE
from jaxlib_icml.nn import state_shardings
from jaxlib_icml.training.config import OptimizerConfig
from jaxlib_icml.training.mesh import BATCH_AXES, MeshConfig, make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.step import make_train_program
from tests.collectives import collectives

MESHES = (
    MeshConfig(data=1, expert=8),
    MeshConfig(data=2, expert=4),
    MeshConfig(data=1, expert=4, tensor=2),
    MeshConfig(data=1, expert=2, tensor=2, fsdp=2),
)


def layers() -> None:
    """Outputs, statistics and all gradients, for balanced tokens, one busy expert and padding."""
    for options in ({"gate": "sigmoid", "shared_expert_width": 8}, {"gate": "softmax", "activation": "gelu"}):
        layer = SparseMoE(16, 24, 8, 3, rngs=nnx.Rngs(0), **options)
        for crowded in (False, True):
            if crowded:  # everybody chooses experts of one device
                layer.expert_bias[...] = jnp.array([9.0, 8.0, 7.0, 0, 0, 0, 0, 0])
            graphdef, state = nnx.split(layer)
            x = jax.random.normal(jax.random.key(0), (8, 16, 16))
            mask = jax.random.uniform(jax.random.key(1), (8, 16)) < 0.8

            def loss(state, x, mask, graphdef=graphdef):
                y, stats = nnx.merge(graphdef, state)(x, token_mask=mask)
                return jnp.mean(jnp.sin(y) * jnp.arange(16)) + stats.aux_loss, (y, stats)

            gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
            want = jax.device_get(jax.jit(gradient)(state, x, mask))
            for config in MESHES:
                mesh = make_mesh(config)
                spread = jax.device_put(state, state_shardings(state, mesh))
                rows = jax.device_put((x, mask), NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
                with jax.set_mesh(mesh):
                    compiled = jax.jit(gradient).lower(spread, *rows).compile()
                assert collectives(compiled)[0]["all-to-all"] >= 4, config
                got = jax.device_get(compiled(spread, *rows))
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def training() -> None:
    """Three steps of the language model, experts spread or not."""
    config = LMConfig(
        context_length=16, width=16, num_layers=2, num_heads=2, num_experts=4, expert_width=16, moe_balance="bias"
    )
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (8, 17), 0, 257), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    optimizer = OptimizerConfig(name="adamw", stabilize=False)
    for model in (config, dataclasses.replace(config, scan_layers=True, remat="full")):
        losses = []
        for mesh in (make_mesh(MeshConfig(data=1), jax.devices()[:1]), make_mesh(MeshConfig(data=2, expert=4))):
            program = make_train_program(model, make_optimizer(optimizer, mesh), mesh)
            state = program.init(jax.random.key(0))
            row = []
            for _ in range(3):
                state, metrics = program.step(state, batch, 1e-2)
                row.append(float(metrics.loss))
            losses.append(row)
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


if __name__ == "__main__":
    assert jax.device_count() == 8
    layers()
    training()
    sys.exit(0)
