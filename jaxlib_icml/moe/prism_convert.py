"""One dense feed-forward block to shared and routed experts: cut, router, balance, repair, report."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_icml.moe.dispatch import ExpertKernels, dense_experts
from jaxlib_icml.moe.prism_compensation import compensate_experts, compensate_shared
from jaxlib_icml.moe.prism_moe import (
    DenseFFN,
    PrismConfig,
    SplitFFN,
    TrajectoryStats,
    balance_bias,
    balanced_kmeans,
    fit_router,
    route_counts,
    select_shared,
    split_ffn,
    trajectory_profiles,
    unit_features,
)
from jaxlib_icml.moe.routing import Routing, route, router_logits

__all__ = ["COSINE_SCALE", "ConvertedFFN", "LayerReport", "convert_ffn", "partition_units"]

COSINE_SCALE = 10.0
"""τ of the router, which `SparseMoE` has as its default."""


class ConvertedFFN(NamedTuple):
    """A converted block.

    Attributes:
      split: Shared part and experts.
      router: (width, experts), columns of length 1.
      bias: (experts,), selection biases.
      down_bias: The dense block's last bias, or None.
    """

    split: SplitFFN
    router: Float[Array, "width experts"]
    bias: Float[Array, " experts"]
    down_bias: Float[Array, " width"] | None

    def route(self, x: Float[Array, "tokens width"], num_active: int) -> Routing:
        """What the cosine gate chooses."""
        logits = router_logits(x, self.router, gate="cosine", cosine_scale=COSINE_SCALE)
        return route(logits, self.bias, num_active=num_active, gate="cosine", combine="sum")

    def __call__(self, x: Float[Array, "tokens width"], num_active: int) -> Float[Array, "tokens width"]:
        """The block's output with this many experts per token; with all of them the dense block's."""
        routing = self.route(x, num_active)
        y = _experts(self.split.experts, x, routing)
        if self.split.shared is not None:
            y = y + self.split.shared(x)
        return y if self.down_bias is None else y + self.down_bias


def _experts(experts: DenseFFN, x: Array, routing: Routing) -> Array:
    if not experts.input_biases:
        kernels = ExpertKernels(experts.inputs, experts.down)
        return dense_experts(x, kernels, routing.weights, routing.indices)
    outputs = jax.lax.map(lambda expert: expert(x), experts)
    chosen = jnp.take_along_axis(jnp.moveaxis(outputs, 0, 1), routing.indices[..., None], axis=1)
    return jnp.einsum("tk,tkn->tn", routing.weights, chosen)


class LayerReport(NamedTuple):
    """What the conversion of one block has done, on the calibration tokens.

    Attributes:
      cut_error: Root mean square error of the output relative to the dense block's, before the repair.
      error: The same afterwards.
      shared_error: The same with the shared part alone, before the repair.
      load: Share of the choices of each expert.
      entropy: Of the load, relative to that of equal loads.
      shared_step: Relative change of the shared part's last matrix.
      expert_steps: (choices, experts), relative changes of the experts' last matrices.
    """

    cut_error: float
    error: float
    shared_error: float
    load: np.ndarray
    entropy: float
    shared_step: float
    expert_steps: np.ndarray


def partition_units(
    ffn: DenseFFN,
    importance: Float[Array, " hidden"],
    stats: TrajectoryStats,
    config: PrismConfig,
    *,
    restarts: int = 1,
) -> tuple[Int[Array, " shared"], Int[Array, "experts size"]]:
    """Units of the shared part, and of each expert.

    Args:
      ffn: The block.
      importance: `taylor_importance` of its units.
      stats: Their activations over the trajectory.
      config: Sizes and weights.
      restarts: As in `balanced_kmeans`.

    Returns:
      Indices of units; every unit is in one place.

    Raises:
      ValueError: Units that do not divide among the experts; statistics of no tokens, or not finite.
    """
    num_shared, _ = config.sizes(ffn.down.shape[0])
    profiles, score = trajectory_profiles(stats, ffn.down, config.score)
    shared = select_shared(importance, score, num_shared, config.candidate_multiplier)
    rest = jnp.setdiff1d(jnp.arange(ffn.down.shape[0]), shared, size=ffn.down.shape[0] - num_shared)
    features = unit_features(
        tuple(matrix[:, rest] for matrix in ffn.inputs), profiles[rest], config.weight_feature, config.profile_feature
    )
    groups = balanced_kmeans(
        features, config.num_experts, importance[rest], iterations=config.iterations, restarts=restarts
    )
    return shared, rest[groups]


def convert_ffn(
    ffn: DenseFFN,
    shared: Int[Array, " shared"],
    groups: Int[Array, "experts size"],
    x: Float[Array, "tokens width"],
    config: PrismConfig,
    *,
    target: Float[Array, "tokens width"] | None = None,
    compensate: bool = True,
) -> tuple[ConvertedFFN, LayerReport]:
    """Cut a block, fit its router, balance it, and repair what the cut has cost.

    Args:
      ffn: The dense block.
      shared: Units of the shared part.
      groups: Units of each expert.
      x: Inputs of the block in the converted model, along its trajectory.
      config: How.
      target: Outputs to come close to, those of the dense model for the same tokens; None: the dense block's on `x`.
      compensate: Whether to repair.

    Returns:
      The converted block, and a report.

    Raises:
      ValueError: No tokens, values that are not finite, a block that puts out zeros, or units that are in no part or in
        two.
    """
    if not x.shape[0]:
        raise ValueError("x: no tokens to calibrate on")
    split = split_ffn(ffn, shared, groups)
    hidden = ffn.hidden(x)
    router = fit_router(x, hidden, ffn.down, groups, config.ridge)
    logits = router_logits(x, router, gate="cosine", cosine_scale=COSINE_SCALE)
    bias = jnp.zeros(config.num_experts)
    for _ in range(int(config.balance_rounds)):
        bias = balance_bias(route_counts(logits, bias, config.num_active), bias, rate=config.balance_rate)
    converted = ConvertedFFN(split, router, bias, ffn.down_bias)

    target = ffn(x) if target is None else target
    size = float(jnp.linalg.norm(target))
    if not size > 0:
        raise ValueError("target: the dense block puts out nothing, so that there is nothing to come close to")
    missing = target - converted(x, config.num_active)
    cut = float(jnp.linalg.norm(missing)) / size
    alone = jnp.zeros_like(target) if split.shared is None else split.shared(x)
    alone = alone if ffn.down_bias is None else alone + ffn.down_bias
    routing = converted.route(x, config.num_active)
    shared_step, steps = 0.0, np.zeros((config.num_active, config.num_experts))
    if compensate:
        if split.shared is not None:
            new_shared, missing, repair = compensate_shared(split.shared, x, missing, config)
            split, shared_step = split._replace(shared=new_shared), float(repair.relative_step[0])
        split, missing, repair = compensate_experts(split, x, missing, routing.indices, config)
        steps = repair.relative_step
        converted = converted._replace(split=split)
    load = np.asarray(routing.stats.load, np.float64) / config.num_active
    entropy = -np.sum(np.where(load > 0, load * np.log(np.where(load > 0, load, 1)), 0))
    report = LayerReport(
        cut_error=cut,
        error=float(jnp.linalg.norm(missing)) / size,
        shared_error=float(jnp.linalg.norm(target - alone)) / size,
        load=load,
        entropy=float(entropy / np.log(config.num_experts)) if config.num_experts > 1 else 1.0,
        shared_step=shared_step,
        expert_steps=steps,
    )
    return converted, report
