"""The optimizers and the schedule of `icml train`."""

import math
from functools import partial
from typing import Any

import optax
from jax.sharding import Mesh

from jaxlib_icml.nn import state_shardings
from jaxlib_icml.optim import default_weight_decay_mask, gradient_stabilizer, olion
from jaxlib_icml.training.config import OptimizerConfig
from jaxlib_icml.training.step import OptimizerFactory
from jaxlib_icml.training.transfer import Transfer


def make_optimizer(
    config: OptimizerConfig, mesh: Mesh | None = None, transfer: Transfer | None = None
) -> OptimizerFactory:
    """The optimizer as a function of its learning rate.

    Args:
      config: which optimizer, and its numbers.
      mesh: the devices over which OLion shares its matrices; None: one device.
      transfer: rules for the learning rate, decay and ε of each parameter; None: one for all.

    Returns:
      learning rate (a float or a traced scalar) -> `optax.GradientTransformation`.

    >>> tx = make_optimizer(OptimizerConfig())(1e-3)
    """

    shardings = None if mesh is None or mesh.size == 1 else partial(state_shardings, mesh=mesh)

    def factory(learning_rate: Any) -> optax.GradientTransformation:
        stages = []
        if config.clip_norm is not None:
            stages.append(optax.clip_by_global_norm(config.clip_norm))
        if config.stabilize:
            stages.append(gradient_stabilizer())
        if transfer is not None:
            direction = {"param_shardings": shardings} if config.name == "olion" else {}
            stages.append(transfer.optimizer(config, learning_rate, **direction))
        elif config.name == "olion":
            stages.append(olion(learning_rate, weight_decay=config.weight_decay, param_shardings=shardings))
        else:
            stages.append(
                optax.adamw(
                    learning_rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=default_weight_decay_mask
                )
            )
        return optax.chain(*stages)

    return factory


def learning_rate_at(config: OptimizerConfig, step: int, progress: float) -> float:
    """Learning rate of a step: linear warm-up times a decay over the whole run.

    Args:
      config: peak, warm-up and decay.
      step: steps done before this one.
      progress: share of the run that is over, in [0, 1] (of the steps, or of the time).

    Returns:
      The learning rate.

    >>> learning_rate_at(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 1, 0.0)
    0.5
    """
    progress = min(max(progress, 0.0), 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.decay]
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * warmup * (config.final_fraction + (1.0 - config.final_fraction) * shape)
