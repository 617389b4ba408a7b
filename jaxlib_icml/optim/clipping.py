"""Protections against gradient spikes that exist already: the baselines of `gradient_stabilizer`.

`agc` is `optax.adaptive_grad_clip` (Brock et al., arXiv 2102.06171); the paper's setting is 0.01.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from optax import adaptive_grad_clip as agc

from jaxlib_icml.optim._arguments import ScalarOrSchedule, check_range, scalar_at
from jaxlib_icml.optim._norm_units import NormUnits

__all__ = ["SpamState", "ZClipState", "agc", "scale_by_spam", "value_clip", "zclip"]

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


class SpamState(NamedTuple):
    """State of `scale_by_spam`.

    Attributes:
        count: steps taken, a scalar.
        mu: first moment, a tree like the gradients.
        nu: second moment, likewise.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count
    mu: PyTree
    nu: PyTree


def scale_by_spam(
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    *,
    threshold: ScalarOrSchedule = 5000.0,
    reset_every: int = 500,
    warmup: int = 150,
) -> optax.GradientTransformation:
    """Adam that clips entries far above their own second moment and regularly forgets its moments.

    Every entry with g² > threshold · v is set to sign(g) √(threshold · v), with v the second moment (without bias
    correction) before the step; entries with v = 0, as just after a reset, pass. Every `reset_every` steps both
    moments, and the count in the bias correction, start again from zero, and the update rises along a half cosine
    to full length within the next `warmup` steps. The first steps of a run do not: that is the schedule's business.

    Args:
        b1: decay of the first moment, in [0, 1); number, schedule or traced value, as are the next three.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment, positive.
        threshold: g²/v above which an entry is a spike, positive.
        reset_every: steps between resets, at least 1.
        warmup: steps of damped updates after a reset, at least 0 and below `reset_every`; 0 for none.

    Returns:
        An `optax.GradientTransformation` with state `SpamState`. Moments are float32 or wider. A non-finite
        gradient enters the moments, as in `optax.scale_by_adam` (combine with `optax.apply_if_finite`).

    Raises:
        ValueError: an argument is out of range, or a leaf is not real floating point.

    Reference: "SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training", arXiv 2501.06842, Algorithm 1.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_spam(threshold=4.0)
        >>> state = tx.init(jnp.zeros(1))
        >>> for gradient in (1.0, 1e6):
        ...     _, state = tx.update(jnp.array([gradient]), state)
        >>> print(state.nu.round(6))  # 0.999 · 0.001 + 0.001 · (4 · 0.001), not 1e9
        [0.001003]
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        check_range(name, decay, lambda x: 0 <= x < 1, "in [0, 1)")
    check_range("eps", eps, lambda x: 0 < x < math.inf, "a positive number")
    check_range("threshold", threshold, lambda x: x > 0, "positive")
    check_range("reset_every", reset_every, lambda x: x >= 1, "at least 1")
    check_range("warmup", warmup, lambda x: 0 <= x < reset_every, "at least 0 and below reset_every")

    def init(params: PyTree) -> SpamState:
        NormUnits(params, "global", (), complex_leaves=False)  # refuses other leaves
        zeros = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
        return SpamState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def update(updates: PyTree, state: SpamState, params: PyTree | None = None) -> tuple[PyTree, SpamState]:
        del params
        since = state.count % reset_every
        first, second, guard, limit = (scalar_at(x, state.count) for x in (b1, b2, eps, threshold))
        kept = since > 0

        def clip(g: Array, v: Array) -> Array:
            bound = jnp.sqrt(limit) * jnp.sqrt(v)
            g = g.astype(v.dtype)
            return jnp.where(kept & (v > 0) & (jnp.abs(g) > bound), jnp.sign(g) * bound, g)

        g = jax.tree.map(clip, updates, state.nu)
        mu, nu = (jax.tree.map(lambda x: jnp.where(kept, x, 0), moment) for moment in (state.mu, state.nu))
        mu = optax.tree.cast_like(optax.tree.update_moment(g, mu, first, 1), mu)
        nu = optax.tree.cast_like(optax.tree.update_moment(g, nu, second, 2), nu)
        mu_hat, nu_hat = (optax.tree.bias_correction(m, d, since + 1) for m, d in ((mu, first), (nu, second)))
        rise = 0.5 * (1 - jnp.cos(jnp.pi * jnp.minimum((since + 1) / max(warmup, 1), 1.0)))
        rise = jnp.where(state.count < reset_every, 1.0, rise)
        out = jax.tree.map(lambda m, v, u: (rise * m / (jnp.sqrt(v) + guard)).astype(u.dtype), mu_hat, nu_hat, updates)
        return out, SpamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)
