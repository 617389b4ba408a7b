"""What a converted block is trained with: routing that is taught by reconstruction, where the dense model is sure.

After "Prism-MoE" (ICML 2026), stage II. How confidence weighs tokens and how neighbours are tied is reconstructed from
the abstract; the rest is the released code's.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

__all__ = [
    "PrismLosses",
    "dynamic_bias",
    "information_density",
    "neighbour_loss",
    "output_distillation",
    "prism_losses",
    "reconstruction_scores",
    "token_weights",
]


def information_density(teacher_logits: Float[Array, "*tokens vocab"]) -> Float[Array, "*tokens"]:
    """u = H(softmax of the dense model's logits) / log V, in [0, 1]: 0 where it is sure, 1 where it knows nothing."""
    log_p = jax.nn.log_softmax(teacher_logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1) / math.log(teacher_logits.shape[-1])


def token_weights(density: Float[Array, "*tokens"], mixing: float = 0.5) -> Float[Array, "*tokens"]:
    """w = (1 - m) + m u / mean(u), of mean 1; m = 0 treats all tokens alike.

    Raises:
      ValueError: `mixing` outside [0, 1].
    """
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing: must be in [0, 1], got {mixing}")
    return (1 - mixing) + mixing * density / jnp.maximum(jnp.mean(density), jnp.finfo(density.dtype).tiny)


def reconstruction_scores(
    outputs: Float[Array, "experts tokens width"], gap: Float[Array, "tokens width"]
) -> Float[Array, "tokens experts"]:
    """2 <E_e(x), gap> - |E_e(x)|² = |gap|² - |gap - E_e(x)|²: the error that an expert alone removes.

    Args:
      outputs: What every expert makes of every token.
      gap: What the shared part leaves: the dense block's output minus the shared part's.

    Returns:
      Scores; the best single expert has the highest.
    """
    return 2 * jnp.einsum("etn,tn->te", outputs, gap) - jnp.sum(outputs**2, axis=-1).T


class PrismLosses(NamedTuple):
    """Terms of one block, scalars.

    Attributes:
      combination: Mean squared error of the chosen experts' sum against the gap.
      routing: Cross-entropy of the router against the experts that reconstruct best.
      balance: 1 - H(mean routing probability) / log n_e.
      z: Mean squared log-partition of the router.
    """

    combination: Float[Array, ""]
    routing: Float[Array, ""]
    balance: Float[Array, ""]
    z: Float[Array, ""]

    def total(self, balance_weight: float = 0.01, z_weight: float = 1e-4) -> Float[Array, ""]:
        """Their weighted sum."""
        return self.combination + self.routing + balance_weight * self.balance + z_weight * self.z


def prism_losses(
    outputs: Float[Array, "experts tokens width"],
    gap: Float[Array, "tokens width"],
    logits: Float[Array, "tokens experts"],
    indices: Int[Array, "tokens active"],
    weights: Float[Array, "tokens active"],
    density: Float[Array, " tokens"],
    *,
    mixing: float = 0.5,
) -> PrismLosses:
    """The losses of one converted block.

    Args:
      outputs: What every expert makes of every token.
      gap: The dense block's output minus the shared part's. No gradient flows to it.
      logits: The router's.
      indices: Experts that each token chose.
      weights: Their combination weights.
      density: `information_density` of the dense model for each token.
      mixing: m of `token_weights`.

    Returns:
      The terms. Targets of the routing are softmax(standardised scores / (1/2 + u/2)), sharp where the dense model is
      sure, and no gradient flows to them.
    """
    per_token = token_weights(density, mixing)
    gap = jax.lax.stop_gradient(gap)
    chosen = jnp.take_along_axis(jnp.moveaxis(outputs, 0, 1), indices[..., None], axis=1)
    missing = jnp.einsum("tk,tkn->tn", weights, chosen) - gap
    combination = jnp.mean(per_token[:, None] * missing**2)

    scores = jax.lax.stop_gradient(reconstruction_scores(outputs, gap))
    scores = scores - jnp.mean(scores, axis=-1, keepdims=True)
    spread = jnp.std(scores, axis=-1, keepdims=True)
    scores = scores / jnp.maximum(spread, jnp.finfo(scores.dtype).tiny ** 0.5)
    target = jax.nn.softmax(scores / (0.5 + 0.5 * density[:, None]), axis=-1)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    routing = -jnp.mean(per_token * jnp.sum(target * log_p, axis=-1))

    mean = jnp.mean(jnp.exp(log_p), axis=0)
    balance = 1 - jnp.sum(jax.scipy.special.entr(mean)) / math.log(max(logits.shape[-1], 2))
    return PrismLosses(combination, routing, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2))


def neighbour_loss(
    logits: Float[Array, "tokens experts"],
    density: Float[Array, " tokens"],
    pairs: Int[Array, "pairs 2"],
    valid: Bool[Array, " pairs"] | None = None,
) -> Float[Array, ""]:
    """Neighbours of one step should be routed alike, the more so the more alike their densities are.

    Args:
      logits: The router's.
      density: `information_density`.
      pairs: Tokens that lie side by side, for images the 4-neighbours of a scale.
      valid: Which pairs count; None: all.

    Returns:
      Mean over pairs of (1 - |u - u'|) |p - p'|².
    """
    p = jax.nn.softmax(logits, axis=-1)
    first, second = pairs[:, 0], pairs[:, 1]
    weight = 1 - jnp.abs(density[first] - density[second])
    weight = weight if valid is None else jnp.where(valid, weight, 0)
    count = pairs.shape[0] if valid is None else jnp.maximum(jnp.sum(valid), 1)
    return jnp.sum(weight * jnp.sum((p[first] - p[second]) ** 2, axis=-1)) / count


def output_distillation(
    logits: Float[Array, "*tokens vocab"], teacher_logits: Float[Array, "*tokens vocab"], temperature: float = 2.0
) -> Float[Array, ""]:
    """T² KL(teacher || student) of softened distributions, mean over tokens; no gradient flows to the teacher.

    Raises:
      ValueError: A temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: must be positive, got {temperature}")
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits) / temperature, axis=-1)
    student = jax.nn.log_softmax(logits / temperature, axis=-1)
    return temperature**2 * jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1))


def dynamic_bias(
    bias: Float[Array, "*layers experts"],
    load: Num[Array, "*layers experts"],
    *,
    rate: float = 1.0,
    limit: float = 2.0,
) -> Float[Array, "*layers experts"]:
    """Selection biases after a step: b + rate clip(1/n_e - f, ±0.1), within ±limit.

    Args:
      bias: So far.
      load: Tokens' choices of each expert, in any unit; their shares are f.
      rate: Step.
      limit: Largest absolute bias.

    Returns:
      New biases.
    """
    share = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.clip(bias + rate * jnp.clip(1 / load.shape[-1] - share, -0.1, 0.1), -limit, limit)
