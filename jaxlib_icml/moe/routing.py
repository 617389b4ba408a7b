"""Choosing experts: gates, top-k selection with a selection-only bias, routing statistics, bias balancing."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = [
    "COMBINES",
    "GATES",
    "Routing",
    "RoutingStats",
    "route",
    "router_logits",
    "routing_stats",
    "update_expert_bias",
]

GATES = ("sigmoid", "softmax", "softmax_renorm", "cosine")
COMBINES = ("mean", "sum", "soft")


class RoutingStats(NamedTuple):
    """What the router did with a batch; padding tokens are not counted.

    Attributes:
      load: fraction of tokens that chose each expert, (experts,); sums to the number of active experts a.
      router_prob: mean router probability of each expert, (experts,); sums to 1. Differentiable.
      entropy: entropy in nats of the experts' shares of the work, load / a; log(experts) at balance.
      max_violation: largest |load - kappa| / kappa with kappa = a / experts; 0 at balance.
      aux_loss: load-balancing loss experts / a * sum_i load_i * router_prob_i (Switch Transformer,
        arXiv:2101.03961, eq. 4); 1 at balance, differentiable through router_prob only.
      z_loss: mean of logsumexp(router logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5). Differentiable.
      num_ties: tokens whose last chosen and first rejected expert had exactly equal scores, so that the lower
        index decided. At initialization anything but 0 means that scores do not tell experts apart.
    """

    load: Float[Array, "*layers experts"]
    router_prob: Float[Array, "*layers experts"]
    entropy: Float[Array, "*layers"]
    max_violation: Float[Array, "*layers"]
    aux_loss: Float[Array, "*layers"]
    z_loss: Float[Array, "*layers"]
    num_ties: Int[Array, "*layers"]


class Routing(NamedTuple):
    """The chosen experts of each token, best first, and how their outputs are weighted.

    Attributes:
      indices: (tokens, active); equal to the number of experts for padding tokens.
      weights: (tokens, active), combination weights; 0 for padding tokens.
      logits: (tokens, experts), before the gate and the selection bias.
      probs: (tokens, experts), a distribution over experts: softmax of the logits, for the sigmoid gate the
        gate values divided by their sum.
      stats: batch statistics.
    """

    indices: Int[Array, "tokens active"]
    weights: Float[Array, "tokens active"]
    logits: Float[Array, "tokens experts"]
    probs: Float[Array, "tokens experts"]
    stats: RoutingStats


def router_logits(
    x: Float[Array, "tokens width"],
    kernel: Float[Array, "width experts"],
    *,
    gate: str,
    cosine_scale: float = 10.0,
) -> Float[Array, "tokens experts"]:
    """x @ kernel, for the cosine gate `cosine_scale` * cos(x, column), in (at least) float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    if gate == "cosine":
        x, kernel = _unit(x, axis=1), cosine_scale * _unit(kernel, axis=0)
    # The default precision of TPUs and GPUs would round the inputs of this product to 8 or 10 bits.
    return jnp.dot(x, kernel, precision=lax.Precision.HIGHEST)


def _unit(x: Array, axis: int) -> Array:
    squared = jnp.sum(x * x, axis=axis, keepdims=True)
    return x * lax.rsqrt(jnp.maximum(squared, jnp.finfo(x.dtype).tiny))


def route(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"],
    *,
    num_active: int,
    gate: str,
    combine: str,
    token_mask: Bool[Array, " tokens"] | None = None,
) -> Routing:
    """Choose `num_active` experts for each token and weight them.

    With p = softmax(logits) and s = sigmoid(logits), experts are chosen by the a largest values of score +
    bias; the bias decides nothing else, and no gradient passes through the choice. Ties go to the lowest
    index.

    | gate | score | gate value g of a chosen expert |
    |---|---|---|
    | sigmoid | s | s |
    | softmax | p | p |
    | softmax_renorm | p | p / sum of p over the chosen |
    | cosine | logit | 1 |

    Weights are g ('sum'), g / a ('mean'), or a * r / (sum of r over the chosen) ('soft'; r = s for the
    sigmoid gate, else p), which keeps the scale of a plain sum.

    Args:
      logits: router logits.
      bias: selection bias.
      num_active: experts per token a, at most the number of experts.
      gate: one of `GATES`.
      combine: one of `COMBINES`.
      token_mask: False for padding tokens, which choose no expert and enter no statistics.

    Returns:
      Choices, weights and statistics.
    """
    num_tokens, num_experts = logits.shape
    squashed = jax.nn.sigmoid(logits) if gate == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    probs = squashed / jnp.sum(squashed, axis=-1, keepdims=True) if gate == "sigmoid" else squashed

    score = lax.stop_gradient(logits if gate == "cosine" else squashed) + lax.stop_gradient(bias)
    ranked, order = lax.top_k(score, min(num_active + 1, num_experts))
    indices = order[:, :num_active]
    if num_active < num_experts:
        tied = ranked[:, num_active - 1] == ranked[:, num_active]
    else:
        tied = jnp.zeros(num_tokens, bool)

    chosen = jnp.take_along_axis(squashed, indices, axis=-1)
    share = chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), jnp.finfo(chosen.dtype).tiny)
    if combine == "soft":
        weights = num_active * share
    else:
        value = {"softmax_renorm": share, "cosine": jnp.ones_like(chosen)}.get(gate, chosen)
        weights = value / num_active if combine == "mean" else value

    if token_mask is not None:
        indices = jnp.where(token_mask[:, None], indices, num_experts)
        weights = jnp.where(token_mask[:, None], weights, 0)
        tied = tied & token_mask
    stats = routing_stats(logits, probs, indices, tied, token_mask)
    return Routing(indices, weights, logits, probs, stats)


def routing_stats(
    logits: Float[Array, "tokens experts"],
    probs: Float[Array, "tokens experts"],
    indices: Int[Array, "tokens active"],
    tied: Bool[Array, " tokens"],
    token_mask: Bool[Array, " tokens"] | None = None,
) -> RoutingStats:
    """Statistics of one batch of routing decisions; see `RoutingStats` and `Routing` for the arguments."""
    (num_tokens, num_experts), num_active = logits.shape, indices.shape[1]
    kappa = num_active / num_experts
    mask = jnp.ones(num_tokens, bool) if token_mask is None else token_mask
    total = jnp.maximum(jnp.sum(mask), 1).astype(logits.dtype)

    counts = jnp.zeros(num_experts, jnp.int32).at[indices.reshape(-1)].add(1, mode="drop")
    load = counts.astype(logits.dtype) / total
    router_prob = jnp.sum(jnp.where(mask[:, None], probs, 0), axis=0) / total
    squared = jax.nn.logsumexp(logits, axis=-1) ** 2
    return RoutingStats(
        load=load,
        router_prob=router_prob,
        entropy=jnp.sum(jax.scipy.special.entr(load / num_active)),
        max_violation=jnp.max(jnp.abs(load - kappa)) / kappa,
        aux_loss=jnp.sum(load * router_prob) / kappa,
        z_loss=jnp.sum(jnp.where(mask, squared, 0)) / total,
        num_ties=jnp.sum(tied, dtype=jnp.int32),
    )


def update_expert_bias(
    bias: Float[Array, "*layers experts"],
    load: Float[Array, "..."],
    kappa: float,
    rate: float = 0.01,
) -> Float[Array, "*layers experts"]:
    """Balance experts without an auxiliary loss: b_i <- b_i - rate * (load_i - kappa).

    The sum of the biases stays constant, as the sum of load - kappa is 0. From "Hyperparameter Transfer with
    Mixture-of-Experts Layers" (arXiv:2601.20205).

    Args:
      bias: selection biases; leading axes (stacked layers) are allowed.
      load: fraction of the global batch's tokens that chose each expert, `RoutingStats.load`.
      kappa: num_active / num_experts, in (0, 1].
      rate: step size, not negative.

    Returns:
      The new biases, in the dtype of `bias`.

    Raises:
      ValueError: `kappa` or `rate` is out of range, or the shapes differ.

    >>> import jax.numpy as jnp
    >>> update_expert_bias(jnp.zeros(2), jnp.array([1.0, 0.0]), kappa=0.5, rate=0.25).tolist()
    [-0.125, 0.125]
    """
    if not 0 < kappa <= 1:
        raise ValueError(f"kappa must be in (0, 1], got {kappa}")
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"rate must be finite and not negative, got {rate}")
    if bias.shape != load.shape:
        raise ValueError(f"load must have the shape of bias, {bias.shape}, got {load.shape}")
    return (bias - rate * (load - kappa)).astype(bias.dtype)
