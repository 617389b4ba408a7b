"""Fine-tuning a converted language model towards the dense one it was cut from (`jaxlib_icml.moe.prism_losses`)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlib_icml.lm.loss import Batch
from jaxlib_icml.lm.transformer import Transformer
from jaxlib_icml.moe.coord_check import moe_activations
from jaxlib_icml.moe.prism_losses import (
    PrismLosses,
    dynamic_bias,
    information_density,
    output_distillation,
    prism_losses,
)
from jaxlib_icml.nn import tree_leaves

__all__ = ["DistillationAux", "DistillationWeights", "distillation_loss", "move_biases", "trainable"]

_TRAINED = frozenset({"experts", "router", "router_delta"})


@dataclasses.dataclass(frozen=True)
class DistillationWeights:
    """Weights of the terms.

    Raises:
      ValueError: A weight that is negative or not finite; the message names the field.
    """

    output: float = 1.0
    """Distillation of the logits."""
    hidden: float = 0.25
    """Relative squared error of the residual stream after each block."""
    combination: float = 1.0
    """Squared error of the chosen experts' sum."""
    routing: float = 1.0
    """Routing taught by reconstruction."""
    balance: float = 0.01
    """Entropy of the mean routing."""
    z: float = 1e-4
    """Squared log-partition of the router."""
    mixing: float = 0.5
    """How much tokens weigh by what the dense model does not know about them, in [0, 1]."""
    temperature: float = 2.0
    """Of the logits' distillation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name}: must be at least 0, got {getattr(self, field.name)}")
        if self.mixing > 1:
            raise ValueError(f"mixing: must be in [0, 1], got {self.mixing}")


class DistillationAux(NamedTuple):
    """What a training step wants to know besides the loss.

    Attributes:
      cross_entropy: Nats per target.
      output: Distillation of the logits.
      hidden: Mean over blocks of the relative squared error of the stream.
      blocks: Terms of the blocks, means over layers.
      load: (layers, experts), share of the tokens that chose each expert.
    """

    cross_entropy: Float[Array, ""]
    output: Float[Array, ""]
    hidden: Float[Array, ""]
    blocks: PrismLosses
    load: Float[Array, "layers experts"]


def distillation_loss(
    student: Transformer, teacher: Transformer, batch: Batch, weights: DistillationWeights | None = None
) -> tuple[Float[Array, ""], DistillationAux]:
    """Cross-entropy, distillation of logits and stream, and what teaches every block.

    Args:
      student: The converted model, layers not scanned.
      teacher: The dense model that it was cut from.
      batch: `tokens` and `targets`, (batch, seq) int32.
      weights: Of the terms; None: the defaults.

    Returns:
      `(loss, DistillationAux)`; gradients flow to the student only.

    Raises:
      ValueError: A student without experts, a teacher with some, different depths, or scanned layers.
    """
    weights = DistillationWeights() if weights is None else weights
    ours, theirs = student.config, teacher.config
    if not ours.num_experts or theirs.num_experts:
        raise ValueError("student, teacher: the student needs experts, the teacher must be dense")
    if ours.num_layers != theirs.num_layers or ours.scan_layers or theirs.scan_layers:
        raise ValueError("student, teacher: need equally many layers, which are not scanned")
    names = ("residual", "attention_output", "mlp_output")
    out, reference = student(batch["tokens"], capture=names), teacher(batch["tokens"], capture=names)
    logits, dense_logits = student.logits(out.hidden), jax.lax.stop_gradient(teacher.logits(reference.hidden))
    log_p = jax.nn.log_softmax(logits, axis=-1)
    cross_entropy = -jnp.mean(jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1))
    output = output_distillation(logits, dense_logits, weights.temperature)

    stream, dense_stream = (jnp.stack([x.activations[name] for name in names]).sum(0) for x in (out, reference))
    dense_stream = jax.lax.stop_gradient(dense_stream)
    error = jnp.mean((stream - dense_stream) ** 2, axis=(1, 2, 3)) / jnp.mean(dense_stream**2, axis=(1, 2, 3))
    hidden = jnp.mean(error)

    density = information_density(dense_logits).reshape(-1)
    blocks, loads = [], []
    for i in range(ours.num_layers):
        block, dense = student.layers[i], teacher.layers[i]
        entering = out.activations["residual"][i] + out.activations["attention_output"][i]
        # Each block is taught on the inputs that it gets, and does not change them to make its task easier.
        x = jax.lax.stop_gradient(block.mlp_norm(entering)).reshape(-1, ours.width)
        gap = dense.mlp(x) - (block.moe.shared(x) if hasattr(block.moe, "shared") else 0.0)
        routing = block.moe.route(x)
        outputs = moe_activations(block.moe, x)["expert_outputs"]
        blocks.append(
            prism_losses(outputs, gap, routing.logits, routing.indices, routing.weights, density, mixing=weights.mixing)
        )
        loads.append(routing.stats.load)
    mean: PrismLosses = jax.tree.map(lambda *terms: jnp.mean(jnp.stack(terms)), *blocks)
    loss = cross_entropy + weights.output * output + weights.hidden * hidden
    loss += weights.combination * mean.combination + weights.routing * mean.routing
    loss += weights.balance * mean.balance + weights.z * mean.z
    return loss, DistillationAux(cross_entropy, output, hidden, mean, jnp.stack(loads))


def trainable(params: Any) -> Any:
    """True at routers and routed experts, which fine-tuning changes; a mask for `optax.masked` or `optax.partition`.

    >>> trainable({"moe": {"experts": {"up": 1}, "shared": {"up": 1}}})
    {'moe': {'experts': {'up': True}, 'shared': {'up': False}}}
    """
    found = [not _TRAINED.isdisjoint(leaf.parts) and "attention" not in leaf.parts for leaf in tree_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def move_biases(student: Transformer, load: Float[Array, "layers experts"], rate: float = 1.0) -> None:
    """Move the selection biases of all layers towards equal loads (`jaxlib_icml.moe.prism_losses.dynamic_bias`)."""
    for i in range(student.config.num_layers):
        bias = student.layers[i].moe.expert_bias
        bias[...] = dynamic_bias(bias[...], load[i], rate=rate)
