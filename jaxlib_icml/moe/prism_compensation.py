"""Repairing a block that was cut into experts, in closed form: ridge regression of what is missing, with small steps.

After "Prism-MoE" (ICML 2026), stage I'; see `jaxlib_icml.moe.prism_moe`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlib_icml.moe.prism_moe import DenseFFN, PrismConfig, SplitFFN, ridge_solve

__all__ = ["Repair", "capped_step", "compensate_experts", "compensate_shared"]


class Repair(NamedTuple):
    """What a repair did.

    Attributes:
      before: Root mean square of what is missing, before.
      after: The same afterwards, on the tokens that it was fitted to.
      relative_step: Change of each matrix relative to its size: (1,) for the shared part, (choices, experts) for the
        routed ones, 0 for those with too few tokens.
    """

    before: float
    after: float
    relative_step: np.ndarray


def capped_step(
    hidden: Float[Array, "tokens hidden"],
    missing: Float[Array, "tokens width"],
    old: Float[Array, "hidden width"],
    ridge: float,
    cap: float,
) -> tuple[Float[Array, "hidden width"], float]:
    """D = (A + λ mean(diag A) I)⁻¹ B with A = Σ h hᵀ and B = Σ h missingᵀ, shortened to |D|_F ≤ cap |old|_F.

    Args:
      hidden: Activations h.
      missing: What should be added to the output.
      old: The matrix that D will be added to.
      ridge: λ.
      cap: Largest relative length; infinite for none.

    Returns:
      D, float32, and its length relative to `old`.

    Raises:
      ValueError: Values that are not finite.
    """
    gram, cross = _normal_equations(hidden, missing)
    return _capped(gram, cross, old, ridge, cap)


@jax.jit
def _normal_equations(h: Array, r: Array) -> tuple[Array, Array]:
    h, r = h.astype(jnp.float32), r.astype(jnp.float32)
    product = lambda a, b: jnp.einsum("ta,tb->ab", a, b, precision=lax.Precision.HIGHEST)  # noqa: E731
    return product(h, h), product(h, r)


def _capped(gram: Array, cross: Array, old: Array, ridge: float, cap: float) -> tuple[Array, float]:
    a, b = np.asarray(gram, np.float64), np.asarray(cross, np.float64)
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        raise ValueError("hidden, missing: are not finite")
    step = ridge_solve(a, b, ridge)
    size = float(np.linalg.norm(np.asarray(old, np.float64)))
    length = float(np.linalg.norm(step))
    if length > cap * size:
        step *= cap * size / length
        length = cap * size
    return jnp.asarray(step, jnp.float32), length / size if size else 0.0


@jax.jit
def _choice_equations(expert: DenseFFN, x: Array, left: Array, weight: Array, mine: Array) -> tuple[Array, Array]:
    """Normal equations over the tokens of one choice; others count as zeros, so that all choices share a program."""
    h = jnp.where(mine[:, None], weight[:, None] * expert.hidden(x), 0)
    return _normal_equations(h, left)


@jax.jit
def _taken_off(expert: DenseFFN, x: Array, left: Array, weight: Array, step: Array) -> Array:
    return left - (weight[:, None] * expert.hidden(x)) @ step


def compensate_shared(
    shared: DenseFFN, x: Float[Array, "tokens width"], missing: Float[Array, "tokens width"], config: PrismConfig
) -> tuple[DenseFFN, Float[Array, "tokens width"], Repair]:
    """Repair the last matrix of the shared part.

    Args:
      shared: The shared part.
      x: Inputs of the block in the converted model.
      missing: The dense block's output minus the converted one's.
      config: `shared_ridge` and `shared_cap`.

    Returns:
      The new part, what is still missing, and a report.

    Raises:
      ValueError: No tokens, or values that are not finite.
    """
    _check_tokens(x)
    h = shared.hidden(x)
    step, length = capped_step(h, missing, shared.down, config.shared_ridge, config.shared_cap)
    left = missing - h @ step
    new = shared._replace(down=(shared.down + step).astype(shared.down.dtype))
    return new, left, Repair(_rms(missing), _rms(left), np.array([length]))


def compensate_experts(
    split: SplitFFN,
    x: Float[Array, "tokens width"],
    missing: Float[Array, "tokens width"],
    indices: Int[Array, "tokens active"],
    config: PrismConfig,
    weights: Float[Array, "tokens active"] | None = None,
) -> tuple[SplitFFN, Float[Array, "tokens width"], Repair]:
    """Repair the experts' last matrices, first choices first.

    For each choice s and expert e, what the tokens whose s-th choice is e still miss is fitted by e's hidden units;
    then it is taken off for all tokens that use e. Ridge and cap tighten from choice to choice; experts with fewer
    tokens than max(min_tokens, size (1/2 + s / (2 (k - 1)))) stay as they are.

    Args:
      split: The parts.
      x: Inputs of the block in the converted model.
      missing: The dense block's output minus the converted one's.
      indices: The experts that each token chose, best first.
      config: `expert_ridge`, `expert_cap`, `rank_factor` and `min_tokens`.
      weights: Combination weights; None: 1, a plain sum.

    Returns:
      The new parts, what is still missing, and a report.

    Raises:
      ValueError: No tokens, or values that are not finite.
    """
    _check_tokens(x)
    experts, k = split.experts, indices.shape[1]
    number, size = experts.down.shape[:2]
    weights = jnp.ones(indices.shape, x.dtype) if weights is None else weights
    steps, left, down = np.zeros((k, number)), missing, experts.down
    counts = [np.bincount(np.asarray(indices[:, s]), minlength=number) for s in range(k)]
    for s in range(k):
        needed = max(config.min_tokens, size * (0.5 + 0.5 * s / max(k - 1, 1)))
        ridge, cap = config.expert_ridge * config.rank_factor**s, config.expert_cap / config.rank_factor**s
        for e in np.flatnonzero(counts[s] >= needed):
            expert = jax.tree.map(lambda matrix, e=e: matrix[e], experts._replace(down=down))
            weight = jnp.sum(jnp.where(indices == e, weights, 0), axis=1)
            gram, cross = _choice_equations(expert, x, left, weight, indices[:, s] == e)
            step, steps[s, e] = _capped(gram, cross, down[e], ridge, cap)
            left = _taken_off(expert, x, left, weight, step)
            down = down.at[e].add(step.astype(down.dtype))
    new = split._replace(experts=experts._replace(down=down))
    return new, left, Repair(_rms(missing), _rms(left), steps)


def _check_tokens(x: Array) -> None:
    if not x.shape[0]:
        raise ValueError("x: no tokens to repair with")


def _rms(x: Array) -> float:
    return float(jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2)))
