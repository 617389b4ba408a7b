"""A trained dense feed-forward block cut into a shared part and routed experts, without training.

Hidden units that matter at every step of a generation become the shared expert; the others are grouped by what they
read and by when they are active, and a router is fitted to the groups' activity. With all experts active the block is
the dense one again, since experts' outputs are simply added. After "Prism-MoE: Efficient Dense-to-MoE Conversion for
Visual Autoregressive Generation" (ICML 2026), whose steps of a trajectory are the scales of an image; here they are
whatever the caller numbers.

`jaxlib_icml.moe.prism_compensation` repairs what the cut has cost, `jaxlib_icml.moe.prism_losses` trains the result.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxlib_icml.nn import activate

__all__ = [
    "DenseFFN",
    "PrismConfig",
    "SplitFFN",
    "TrajectoryStats",
    "accumulate_stats",
    "balance_bias",
    "balanced_kmeans",
    "fit_router",
    "route_counts",
    "select_shared",
    "split_ffn",
    "taylor_importance",
    "trajectory_profiles",
    "trajectory_stats",
    "unit_features",
]


@dataclasses.dataclass(frozen=True)
class PrismConfig:
    """How a dense block is cut.

    Raises:
      ValueError: A number out of range; the message names the field.
    """

    shared_ratio: float = 0.25
    """r_s, share of the hidden units that every token uses."""
    num_experts: int = 12
    """n_e, routed experts."""
    num_active: int = 2
    """k, experts per token; any number works later without another conversion."""
    candidate_multiplier: float = 2.0
    """Candidates for the shared part, relative to its size."""
    score: str = "energy"
    """What the candidates are chosen by: energy over the trajectory, or stability (mean over spread)."""
    weight_feature: float = 0.5
    """Weight of what a unit reads among the features that group units."""
    profile_feature: float = 1.0
    """Weight of when it is active."""
    iterations: int = 8
    """Rounds of the grouping."""
    ridge: float = 1e-2
    """Ridge of the router's fit, relative to the inputs' mean square."""
    balance_rate: float = 0.25
    """Step of the selection biases against the logarithm of the load."""
    balance_rounds: int = 1
    """How often biases are moved."""
    shared_ridge: float = 10.0
    """Ridge of the shared part's repair."""
    shared_cap: float = 0.05
    """Largest relative change of the shared part."""
    expert_ridge: float = 20.0
    """Ridge of the experts' repair, for first choices."""
    expert_cap: float = 0.02
    """Largest relative change of an expert, for first choices."""
    rank_factor: float = 1.2
    """By how much ridge grows and cap falls from one choice to the next."""
    min_tokens: int = 4096
    """Experts with fewer tokens are not repaired."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared_ratio < 1:
            raise ValueError(f"shared_ratio: must be in [0, 1), got {self.shared_ratio}")
        for name in ("num_experts", "num_active", "iterations", "min_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.num_active > self.num_experts:
            raise ValueError(f"num_active: {self.num_active} of only {self.num_experts} experts")
        if self.score not in ("energy", "stability"):
            raise ValueError(f"score: must be energy or stability, got {self.score!r}")
        if not 1 <= self.candidate_multiplier < math.inf:
            raise ValueError(f"candidate_multiplier: must be at least 1, got {self.candidate_multiplier}")
        for name in ("ridge", "shared_ridge", "expert_ridge", "shared_cap", "expert_cap", "rank_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}")
        for name in ("weight_feature", "profile_feature", "balance_rate", "balance_rounds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be at least 0, got {getattr(self, name)}")

    @property
    def active_share(self) -> float:
        """Share of the hidden units that a token uses."""
        return self.shared_ratio + self.num_active / self.num_experts * (1 - self.shared_ratio)

    def sizes(self, hidden: int) -> tuple[int, int]:
        """Units of the shared part and of each expert.

        Raises:
          ValueError: The units do not divide among the experts.
        """
        shared = round(self.shared_ratio * hidden)
        if (hidden - shared) % self.num_experts or hidden - shared < self.num_experts:
            raise ValueError(
                f"num_experts: {hidden - shared} hidden units beside {shared} shared ones do not divide among "
                f"{self.num_experts} experts"
            )
        return shared, (hidden - shared) // self.num_experts


class DenseFFN(NamedTuple):
    """y = act(x W_in + b_in) W_down + b_down.

    Attributes:
      inputs: `(up,)` for GELU, `(gate, up)` for SwiGLU, each (width, hidden).
      down: (hidden, width).
      input_biases: One (hidden,) for each input, or none.
      down_bias: (width,) or None; conversion leaves it outside.
    """

    inputs: tuple[Float[Array, "*experts width hidden"], ...]
    down: Float[Array, "*experts hidden width"]
    input_biases: tuple[Float[Array, "*experts hidden"], ...] = ()
    down_bias: Float[Array, " width"] | None = None

    def hidden(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens hidden"]:
        """Activations of the hidden units."""
        pre = tuple(x @ matrix for matrix in self.inputs)
        if self.input_biases:
            pre = tuple(p + b for p, b in zip(pre, self.input_biases, strict=True))
        return activate(pre)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """The block's output."""
        y = self.hidden(x) @ self.down
        return y if self.down_bias is None else y + self.down_bias


class SplitFFN(NamedTuple):
    """What a dense block becomes.

    Attributes:
      shared: The part that every token uses; None when there is none.
      experts: Routed experts, all arrays with a leading axis.
    """

    shared: DenseFFN | None
    experts: DenseFFN


def taylor_importance(grads: Iterable[DenseFFN], ffn: DenseFFN) -> Float[Array, " hidden"]:
    """First-order change of the loss when a hidden unit is removed, by absolute values.

    I_j sums over batches Σ |∂L/∂w w| over the unit's column of every input matrix, its biases and its row of the last
    one.

    Args:
      grads: Gradients of the loss with respect to the block's weights, one for each calibration batch.
      ffn: The block's weights.

    Returns:
      I.

    Raises:
      ValueError: No batches, or an importance that is not finite.
    """
    total: Any = None
    for grad in grads:
        parts = [jnp.sum(jnp.abs(g * w), axis=0) for g, w in zip(grad.inputs, ffn.inputs, strict=True)]
        parts += [jnp.abs(g * w) for g, w in zip(grad.input_biases, ffn.input_biases, strict=True)]
        parts.append(jnp.sum(jnp.abs(grad.down * ffn.down), axis=1))
        total = sum(parts) if total is None else total + sum(parts)
    if total is None:
        raise ValueError("grads: no batches to calibrate on")
    _check_finite("grads: importances", total)
    return total


class TrajectoryStats(NamedTuple):
    """Sums over the tokens seen so far.

    Attributes:
      square: (hidden, steps), Σ h² by step of the trajectory.
      size: (hidden,), Σ |h|.
      tokens: (steps,), how many there were.
    """

    square: Float[Array, "hidden steps"]
    size: Float[Array, " hidden"]
    tokens: Float[Array, " steps"]


def trajectory_stats(hidden: int, num_steps: int) -> TrajectoryStats:
    """Statistics of no tokens, of a block with `hidden` units over `num_steps` steps."""
    return TrajectoryStats(jnp.zeros((hidden, num_steps)), jnp.zeros(hidden), jnp.zeros(num_steps))


@jax.jit
def accumulate_stats(
    stats: TrajectoryStats, h: Float[Array, "tokens hidden"], steps: Int[Array, " tokens"]
) -> TrajectoryStats:
    """Statistics with more tokens.

    Args:
      stats: So far.
      h: Activations of the hidden units.
      steps: The step of the trajectory that each token belongs to; others than the known ones count nowhere.

    Returns:
      New statistics, float32.
    """
    h = h.astype(jnp.float32)
    at = jax.nn.one_hot(steps, stats.tokens.shape[0], dtype=jnp.float32)
    return TrajectoryStats(
        stats.square + jnp.einsum("th,ts->hs", h * h, at, precision=lax.Precision.HIGHEST),
        stats.size + jnp.sum(jnp.abs(h) * jnp.sum(at, axis=1)[:, None], axis=0),
        stats.tokens + jnp.sum(at, axis=0),
    )


def trajectory_profiles(
    stats: TrajectoryStats, down: Float[Array, "hidden width"], score: str = "energy"
) -> tuple[Float[Array, "hidden steps"], Float[Array, " hidden"]]:
    """What units contribute over the trajectory, and one score of each.

    C_{j,s} = mean over the tokens of step s of h_j² |W_down,j|².

    Args:
      stats: Sums over tokens.
      down: The last matrix.
      score: "energy": log(1 + Σ_s C_{j,s}). "stability": mean |h| / (standard deviation of |h| + 1e-6).

    Returns:
      Profiles log(1 + C), and scores.

    Raises:
      ValueError: No tokens; statistics that are not finite; an unknown score.
    """
    if score not in ("energy", "stability"):
        raise ValueError(f"score: must be energy or stability, got {score!r}")
    total = jnp.sum(stats.tokens)
    if not float(total) > 0:
        raise ValueError("stats: no tokens to calibrate on")
    _check_finite("stats: activations", stats.square)
    norms = jnp.sum(down.astype(jnp.float32) ** 2, axis=1)
    energy = stats.square / jnp.maximum(stats.tokens, 1) * norms[:, None]
    if score == "energy":
        return jnp.log1p(energy), jnp.log1p(jnp.sum(energy, axis=1))
    mean = stats.size / total
    variance = jnp.maximum(jnp.sum(stats.square, axis=1) / total - mean**2, 0)
    return jnp.log1p(energy), mean / (jnp.sqrt(variance) + 1e-6)


def select_shared(
    importance: Float[Array, " hidden"], score: Float[Array, " hidden"], n: int, multiplier: float | int = 2.0
) -> Int[Array, " shared"]:
    """The units of the shared part: of the `multiplier` n most important ones, the n with the highest score.

    Args:
      importance: Of every unit.
      score: Second score.
      n: Units to share.
      multiplier: Size of the pool of candidates, relative to n.

    Returns:
      Indices, increasing. A unit of importance 0 is chosen only where nothing else is left.

    Raises:
      ValueError: More units than there are, or a multiplier below 1.

    >>> select_shared(jnp.array([3.0, 2.0, 1.0, 0.0]), jnp.array([0.0, 1.0, 5.0, 9.0]), 1).tolist()
    [1]
    """
    if not 0 <= n <= importance.shape[0]:
        raise ValueError(f"n: must be at most {importance.shape[0]} units, got {n}")
    if not multiplier >= 1:
        raise ValueError(f"multiplier: must be at least 1, got {multiplier}")
    pool = min(importance.shape[0], math.ceil(multiplier * n))
    candidates = jnp.argsort(-importance, stable=True)[:pool]
    useless = importance[candidates] == 0
    order = jnp.lexsort((-score[candidates], useless))
    return jnp.sort(candidates[order][:n])


def unit_features(
    inputs: tuple[Float[Array, "width hidden"], ...],
    profiles: Float[Array, "hidden steps"],
    weight_feature: float | int = 0.5,
    profile_feature: float | int = 1.0,
) -> Float[Array, "hidden features"]:
    """What units are grouped by: what they read and when they are active, each of length 1 times its weight.

    Args:
      inputs: Input matrices; those of a gated block count as one.
      profiles: `trajectory_profiles`.
      weight_feature: Weight of the first.
      profile_feature: Weight of the second.

    Returns:
      Rows of length 1 (0 for units without any feature).
    """
    read = _unit_rows(jnp.concatenate(inputs, axis=0).T)
    return _unit_rows(jnp.concatenate([weight_feature * read, profile_feature * _unit_rows(profiles)], axis=1))


def _unit_rows(x: Array) -> Array:
    x = x.astype(jnp.float32)
    norm = jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1), 0)


def balanced_kmeans(
    features: Float[Array, "units features"],
    k: int,
    weights: Float[Array, " units"],
    *,
    iterations: int = 8,
    restarts: int = 1,
) -> Int[Array, "k size"]:
    """Groups of equal size of units that point the same way.

    Centres start as far from one another as they can (times the root of the weight); in each round the units, heaviest
    first, go to the nearest centre that has room, and centres become weighted means.

    Args:
      features: Rows of length 1.
      k: Groups; it must divide the units.
      weights: Importance of the units, not negative.
      iterations: Rounds.
      restarts: How many of the heaviest units to begin with; the best grouping counts.

    Returns:
      The units of each group, increasing. The same arguments give the same groups.

    Raises:
      ValueError: Units that do not divide into k groups; fewer restarts than 1 or more than units.

    >>> balanced_kmeans(jnp.array([[1.0, 0], [0, 1.0], [1.0, 0], [0, 1.0]]), 2, jnp.ones(4)).tolist()
    [[0, 2], [1, 3]]
    """
    units = features.shape[0]
    if k < 1 or units % k:
        raise ValueError(f"k: {units} units do not divide into {k} groups")
    if not 1 <= restarts <= units:
        raise ValueError(f"restarts: must be between 1 and {units}, got {restarts}")
    if iterations < 1:
        raise ValueError(f"iterations: must be at least 1, got {iterations}")
    return _balanced_kmeans(features.astype(jnp.float32), weights.astype(jnp.float32), k, iterations, restarts)


@functools.partial(jax.jit, static_argnames=("k", "iterations", "restarts"))
def _balanced_kmeans(features: Array, weights: Array, k: int, iterations: int, restarts: int) -> Array:
    units = features.shape[0]
    size = units // k
    order = jnp.argsort(-weights, stable=True)
    reach = jnp.sqrt(weights / jnp.maximum(jnp.mean(weights), jnp.finfo(jnp.float32).tiny))

    def farthest_first(first: Array) -> Array:
        def add(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            centres, nearest = state
            chosen = features[jnp.argmax(reach * (1 - nearest))]
            return centres.at[i].set(chosen), jnp.maximum(nearest, features @ chosen)

        start = jnp.zeros((k, features.shape[1])).at[0].set(features[first])
        return lax.fori_loop(1, k, add, (start, features @ features[first]))[0]

    def assign(centres: Array) -> Array:
        similarity = features @ centres.T

        def place(room: Array, unit: Array) -> tuple[Array, Array]:
            group = jnp.argmax(jnp.where(room > 0, similarity[unit], -jnp.inf))
            return room.at[group].add(-1), group

        groups = lax.scan(place, jnp.full(k, size, jnp.int32), order)[1]
        return jnp.zeros(units, jnp.int32).at[order].set(groups.astype(jnp.int32))

    def means(groups: Array, centres: Array) -> Array:
        total = jax.ops.segment_sum(weights[:, None] * features, groups, k)
        norm = jnp.linalg.norm(total, axis=1, keepdims=True)
        return jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1), centres)

    def one(first: Array) -> tuple[Array, Array]:
        def round_(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            centres, groups = state
            groups = assign(centres)
            return means(groups, centres), groups

        centres, groups = lax.fori_loop(0, iterations, round_, (farthest_first(first), jnp.zeros(units, jnp.int32)))
        return groups, jnp.sum(weights * jnp.sum(features * centres[groups], axis=1))

    groups, quality = lax.map(one, order[:restarts])
    best = groups[jnp.argmax(quality)]
    return jnp.argsort(best, stable=True).reshape(k, size)


def split_ffn(ffn: DenseFFN, shared: Int[Array, " shared"], experts: Int[Array, "experts size"]) -> SplitFFN:
    """Copy the units of a dense block into a shared part and experts; the last bias stays outside.

    Args:
      ffn: The block.
      shared: Units of the shared part.
      experts: Units of each expert.

    Returns:
      The parts, whose outputs sum to the block's (without its last bias).

    Raises:
      ValueError: A unit that is in no part, or in two.
    """
    used = np.sort(np.concatenate([np.asarray(shared).ravel(), np.asarray(experts).ravel()]))
    if not np.array_equal(used, np.arange(ffn.down.shape[0])):
        raise ValueError(f"shared, experts: must hold each of the {ffn.down.shape[0]} hidden units once")

    def part(units: Array) -> DenseFFN:
        def columns(matrix: Array) -> Array:
            return jnp.moveaxis(matrix[:, units], 0, -2)

        biases = tuple(bias[units] for bias in ffn.input_biases)
        return DenseFFN(tuple(columns(matrix) for matrix in ffn.inputs), ffn.down[units], biases)

    shared = jnp.asarray(shared)
    return SplitFFN(part(shared) if shared.size else None, part(jnp.asarray(experts)))


def fit_router(
    x: Float[Array, "tokens width"],
    h: Float[Array, "tokens hidden"],
    down: Float[Array, "hidden width"],
    groups: Int[Array, "experts size"],
    ridge: float = 1e-2,
) -> Float[Array, "width experts"]:
    """A linear router fitted to how active each group is.

    Targets are T_{t,e} = log(1 + Σ_{j in e} |h_j| |W_down,j|), centred over experts; ridge regression on x, whose λ is
    relative to the mean square of the inputs; then every expert's direction gets length 1, as the cosine gate has it.

    Args:
      x: Inputs of the block.
      h: Activations of the dense block's hidden units for them.
      down: The dense block's last matrix.
      groups: Units of each expert.
      ridge: λ over the mean diagonal of XᵀX.

    Returns:
      The router's kernel, float32.

    Raises:
      ValueError: No tokens, tokens that are not finite, or a ridge that is not positive.
    """
    if not x.shape[0]:
        raise ValueError("x: no tokens to fit a router to")
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge: must be positive, got {ridge}")
    _check_finite("x: inputs", x)
    _check_finite("h: activations", h)
    targets = expert_activity(h, down, groups)
    gram = np.asarray(jnp.einsum("ta,tb->ab", x, x, precision=lax.Precision.HIGHEST), np.float64)
    cross = np.asarray(jnp.einsum("ta,te->ae", x, targets, precision=lax.Precision.HIGHEST), np.float64)
    kernel = ridge_solve(gram, cross, ridge)
    norms = np.linalg.norm(kernel, axis=0)
    return jnp.asarray(kernel / np.where(norms > 0, norms, 1), jnp.float32)


def expert_activity(
    h: Float[Array, "tokens hidden"], down: Float[Array, "hidden width"], groups: Int[Array, "experts size"]
) -> Float[Array, "tokens experts"]:
    """log(1 + Σ_{j in e} |h_j| |W_down,j|), centred over experts."""
    size = jnp.abs(h) * jnp.linalg.norm(down, axis=1)
    activity = jnp.log1p(jnp.sum(size[:, groups], axis=-1))
    return activity - jnp.mean(activity, axis=-1, keepdims=True)


def ridge_solve(gram: np.ndarray, cross: np.ndarray, ridge: float) -> np.ndarray:
    """(G + λ mean(diag G) I)⁻¹ C in float64."""
    scale = max(float(np.mean(np.diag(gram))), np.finfo(np.float64).tiny)
    regular = gram + ridge * scale * np.eye(len(gram))
    return np.asarray(scipy.linalg.cho_solve(scipy.linalg.cho_factor(regular, lower=True), cross))


def route_counts(logits: Float[Array, "tokens experts"], bias: Float[Array, " experts"], k: int) -> Array:
    """How many tokens choose each expert: the k highest of logit + bias."""
    chosen = lax.top_k(logits + bias, k)[1]
    return jnp.zeros(logits.shape[1], jnp.int32).at[chosen.reshape(-1)].add(1)


def balance_bias(
    counts: Num[Array, " experts"],
    bias: Float[Array, " experts"] | None = None,
    *,
    rate: float = 0.25,
    limit: float = 2.0,
) -> Float[Array, " experts"]:
    """Selection biases moved against the logarithm of the load.

    b ← clip(b + centred[rate (log(1/n + 1/N) - log(f + 1/N))]) with the shares f of N choices among n experts.

    Args:
      counts: Tokens that chose each expert.
      bias: So far; None: zeros.
      rate: Step.
      limit: Largest absolute bias.

    Returns:
      New biases.

    Raises:
      ValueError: No choices at all.

    >>> [round(float(b), 3) for b in balance_bias(jnp.array([3, 1]))]
    [-0.087, 0.087]
    """
    total = float(jnp.sum(counts))
    if not total > 0:
        raise ValueError("counts: nobody chose anything")
    share = counts / total
    step = rate * (jnp.log(1 / counts.shape[0] + 1 / total) - jnp.log(share + 1 / total))
    step = step - jnp.mean(step)
    return jnp.clip((0.0 if bias is None else bias) + step, -limit, limit)


def _check_finite(what: str, x: Array) -> None:
    if not bool(jnp.all(jnp.isfinite(x))):
        raise ValueError(f"{what} are not finite")
