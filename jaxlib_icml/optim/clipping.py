"""Gradient clipping by adaptive thresholds and by value: the baselines of `gradient_stabilizer`.

`agc` is `optax.adaptive_grad_clip` (Brock et al., arXiv 2102.06171); the paper's setting is 0.01.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from optax import adaptive_grad_clip as agc

from jaxlib_icml.optim._arguments import ScalarOrSchedule, check_range, scalar_at
from jaxlib_icml.optim._norm_units import NormUnits

__all__ = ["ZClipState", "agc", "value_clip", "zclip"]

_EPS = 1e-6


class ZClipState(NamedTuple):
    """Statistics of `zclip`, scalars.

    Attributes:
        count: number of finite norms seen.
        mean: mean of the norms (of the warm-up, then exponential).
        variance: variance of the norms, likewise.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count
    mean: Float[Array, ""]
    variance: Float[Array, ""]


def zclip(alpha: ScalarOrSchedule = 0.97, z: ScalarOrSchedule = 2.5, warmup: int = 25) -> optax.GradientTransformation:
    """Scales gradients down when their global norm is an outlier of its own history.

    With mean μ and deviation σ of past norms, a norm n with z_n = (n - μ)/σ > z is reduced to μ + z² σ/z_n:
    the further out, the closer to the mean. The clipped norm then enters the exponential averages μ ← α μ +
    (1-α) n, σ² ← α σ² + (1-α)(n - μ)². The first `warmup` norms pass unchanged and give the first μ and σ.
    The reference implementation also clips at norm 1; chain `optax.clip_by_global_norm` for that.

    Args:
        alpha: decay of mean and variance, in [0, 1); number, schedule or traced value.
        z: threshold in standard deviations, positive; number, schedule or traced value.
        warmup: steps before clipping starts, at least 1.

    Returns:
        An `optax.GradientTransformation` with state `ZClipState`. A gradient with a non-finite norm passes as
        it came and leaves the statistics alone (combine with `optax.apply_if_finite`).

    Raises:
        ValueError: an argument is out of range, or a leaf is not floating point or complex.

    Reference: "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", arXiv 2504.02507, Algorithm 1.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = zclip(warmup=2)
        >>> state = tx.init({"w": jnp.zeros(1)})
        >>> for norm in (1.0, 3.0, 100.0):
        ...     updates, state = tx.update({"w": jnp.array([norm])}, state)
        >>> print(f"{updates['w'][0]:.3f}")  # mean 2, deviation 1, z_n = 98
        2.064
    """
    check_range("alpha", alpha, lambda x: 0 <= x < 1, "in [0, 1)")
    check_range("z", z, lambda x: x > 0, "positive")
    check_range("warmup", warmup, lambda x: x >= 1, "at least 1")

    def init(params: PyTree) -> ZClipState:
        NormUnits(params, "global", ())  # refuses integer leaves
        return ZClipState(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))

    def update(updates: PyTree, state: ZClipState, params: PyTree | None = None) -> tuple[PyTree, ZClipState]:
        del params
        units = NormUnits(updates, "global", ())
        if not units.leaves:
            return updates, state
        norm = units.norms()[0]
        finite = jnp.isfinite(norm)
        n = jnp.where(finite, norm, 0)
        count, mean, variance = state
        warming = count < warmup

        deviation = jnp.sqrt(variance)
        threshold, a = scalar_at(z, count), scalar_at(alpha, count)
        score = (n - mean) / (deviation + _EPS)
        outlier = ~warming & (score > threshold)
        target = jnp.where(outlier, mean + threshold**2 * deviation / jnp.where(outlier, score, 1), n)

        new_count = count + 1
        warm_mean = mean + (n - mean) / new_count
        warm_variance = (variance * count + (n - mean) * (n - warm_mean)) / new_count
        run_mean = a * mean + (1 - a) * target
        run_variance = a * variance + (1 - a) * jnp.square(target - run_mean)
        new_state = ZClipState(
            jnp.where(finite, optax.safe_increment(count), count),
            jnp.where(finite, jnp.where(warming, warm_mean, run_mean), mean),
            jnp.where(finite, jnp.where(warming, warm_variance, run_variance), variance),
        )
        scale = jnp.where(outlier & finite, target / (n + _EPS), 1)
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates), new_state

    return optax.GradientTransformation(init, update)


def value_clip(threshold: ScalarOrSchedule = 0.1) -> optax.GradientTransformation:
    """Clips every gradient entry to [-threshold, threshold] (`optax.clip`, with the paper's threshold).

    Args:
        threshold: positive bound on entries; number, schedule or traced value.

    Returns:
        An `optax.GradientTransformation`; its state is empty, or counts steps for a schedule
        (`optax.ScaleByScheduleState`). NaN entries stay NaN.

    Raises:
        ValueError: threshold is not positive, or a leaf is not real floating point.

    Example:
        >>> import jax.numpy as jnp
        >>> print(value_clip(0.5).update(jnp.array([0.2, -3.0]), optax.EmptyState())[0])
        [ 0.2 -0.5]
    """
    check_range("threshold", threshold, lambda x: x > 0, "positive")
    scheduled = callable(threshold)

    def init(params: PyTree) -> PyTree:
        NormUnits(params, "global", (), complex_leaves=False)  # refuses other leaves
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)) if scheduled else optax.EmptyState()

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        bound = threshold
        if callable(threshold):
            bound = threshold(state.count)
            state = optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

        def clip(g: Array) -> Array:
            limit = jnp.asarray(bound, g.dtype)  # a float32 limit would widen half-precision gradients
            return jnp.clip(g, -limit, limit)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(init, update)
