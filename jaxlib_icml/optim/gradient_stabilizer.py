"""GradientStabilizer: keep the direction of a gradient, replace its length by a statistic of past lengths.

"GradientStabilizer: Fix the Norm, Not the Gradient", arXiv 2502.17055 (v4). Differences from the paper:
averages are bias-corrected (as in the authors' code), the root mean square is stored as a root and updated
with `hypot` (squares of norms overflow float32 above 1.8e19), a zero or non-finite gradient leaves the
statistics untouched, and the statistics may be winsorised, which removes the long memory of a spike (see
`recovery_steps`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxlib_icml.optim._arguments import Number, ScalarOrSchedule, check_range, concrete, scalar_at
from jaxlib_icml.optim._norm_units import NormUnits


class StabilizerState(NamedTuple):
    """Statistics of `gradient_stabilizer`, float32 and int32, one entry per normalised unit.

    The trees have the structure of the parameters (scopes "leaf" and "layer", where a stacked leaf holds one
    entry per layer), are single scalars (scope "global"), or map labels to scalars.

    Attributes:
        count: t, the number of steps that entered the statistics.
        mean_norm: m_t, the exponential average of norms, without bias correction.
        rms_norm: sqrt(v_t), the root of the exponential average of squared norms, without bias correction.
        skipped: how many steps had a zero or non-finite norm.
    """

    count: PyTree
    mean_norm: PyTree
    rms_norm: PyTree
    skipped: PyTree


class StabilizerMetrics(NamedTuple):
    """Quantities to log, trees shaped like the fields of `StabilizerState`.

    Attributes:
        rho: length of the last emitted gradient, m^/(sqrt(v^) + eps); 0 before the first step.
        coefficient_of_variation: c_v of the norms that rho corresponds to, sqrt(max(rho^-2 - 1, 0));
            stationary norms give rho ~ 1/sqrt(1 + c_v^2).
        skipped: steps with a zero or non-finite norm so far.
    """

    rho: PyTree
    coefficient_of_variation: PyTree
    skipped: PyTree


def gradient_stabilizer(
    gamma1: ScalarOrSchedule = 0.6,
    gamma2: ScalarOrSchedule = 0.999,
    *,
    eps: ScalarOrSchedule = 1e-12,
    bias_correction: bool = True,
    scope: Literal["leaf", "global", "layer"] | PyTree | Callable[[PyTree], PyTree] = "leaf",
    stacked: str | Sequence[str] | PyTree | Callable[[str], bool] = "layers",
    winsorize: ScalarOrSchedule | None = None,
    on_nonfinite: str = "zero",
    loss_scale: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Rescales every gradient to (running mean of its norms) / (running root mean square of its norms).

    For a gradient g_t with norm R_t (per leaf by default, in float32): m_t = γ1 m_{t-1} + (1-γ1) R_t, v_t =
    γ2 v_{t-1} + (1-γ2) R_t², ρ_t = m̂_t/(√v̂_t + eps), and the output is ρ_t g_t/max(R_t, eps). Its length
    never exceeds `stabilizer_bound(γ1, γ2, t)`, whatever the spikes. Put it first in a chain (after unscaling
    of a loss scale and clipping, before L2 terms and the optimizer); with gradient accumulation, wrap the
    whole chain in `optax.MultiSteps`. Norms near `eps` (and below) shrink instead of being normalised. Norms
    up to 8e34 are measured; a finite gradient with a larger norm counts as non-finite, one with all elements
    below 1e-25 as zero.

    Args:
        gamma1: decay of the mean of norms, in [0, 1). Like `gamma2`, `eps` and `winsorize` it may be a schedule (a
            function of the unit's own step count) or a traced value (`optax.inject_hyperparams`); the bias
            correction uses the current value. Values known at construction are checked.
        gamma2: decay of the mean of squared norms, in [0, 1); gamma1² >= gamma2 warns: no uniform bound
            exists. In float32 the mean stops short of its limit by a relative 3e-8/(1 - gamma2).
        eps: positive guard of both divisions.
        bias_correction: divide by 1 - γ^t, as the authors' code does and their paper does not. Without it a
            constant gradient starts at length 12.6 and takes about 1000 steps to come down to 1.
        scope: what shares one norm. "leaf": each leaf; "layer": each leaf, and each slice along the leading
            axis of stacked leaves, so that scanned and unrolled models agree; "global": the whole tree;
            otherwise a pytree of labels (strings or ints; a prefix of the parameters' tree), or a function
            from the tree to such labels, where leaves with equal labels share a norm. Under
            `optax.inject_hyperparams` name a function in `static_args`.
        stacked: for scope "layer", the leaves with a leading layer axis: one or several path components (a
            leaf is stacked if it lies below such a component that is not followed by an index, as in
            "layers/mlp/kernel" but not "layers/0/mlp/kernel"), a function of the "/"-joined path, or a pytree
            of booleans (prefix).
        winsorize: κ > 1, or None for the paper's method. min(R_t, κ m̂_{t-1}) enters the averages instead of
            R_t (the direction still uses R_t): all bounds hold and recovery from a spike is immediate. 5 is a
            good value.
        on_nonfinite: what a unit with a NaN or infinite norm emits: "zero" zeros; "skip" the gradient as it
            came; "raise" zeros, and an error that names the unit, through `jax.experimental.checkify` (wrap
            the jitted function with `checkify.checkify`). Its statistics and count stay as they were in every
            case, as they do for an all-zero gradient.
        loss_scale: if true, `update` takes a keyword argument `loss_scale` (positive scalar, traced or not),
            the factor that the gradients still carry; the statistics see R_t/loss_scale, the output needs no
            unscaling.

    Returns:
        An `optax.GradientTransformationExtraArgs` with state `StabilizerState`. Outputs have the gradients'
        dtypes; half-precision gradients are measured in float32; complex leaves use |z|².

    Raises:
        ValueError: an argument is out of range, a leaf is not floating point or complex, a stacked leaf has
            no leading axis, or `loss_scale` is missing in `update`.

    Reference: "GradientStabilizer: Fix the Norm, Not the Gradient", arXiv 2502.17055, Algorithm 1.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(gradient_stabilizer(), optax.sgd(0.1))
        >>> updates, _ = tx.update({"w": jnp.array([3e6, -4e6])}, tx.init({"w": jnp.zeros(2)}))
        >>> print(jnp.round(updates["w"], 4))  # length 0.1, however large the gradient
        [-0.06  0.08]
    """
    _check_gammas(gamma1, gamma2)
    check_range("eps", eps, lambda x: 0 < x < math.inf, "a positive number")
    check_range("winsorize", winsorize, lambda x: 1 < x < math.inf, "None or a number above 1")
    if isinstance(scope, str) and scope not in ("leaf", "global", "layer"):
        raise ValueError(f"scope must be 'leaf', 'global', 'layer', a pytree of labels or a function, got {scope!r}")
    if on_nonfinite not in ("zero", "skip", "raise"):
        raise ValueError(f"on_nonfinite must be 'zero', 'skip' or 'raise', got {on_nonfinite!r}")

    def init(params: PyTree) -> StabilizerState:
        units = NormUnits(params, scope, stacked)
        return StabilizerState(*(units.zeros(dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32, jnp.int32)))

    def update(
        updates: PyTree, state: StabilizerState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, StabilizerState]:
        del params
        if loss_scale and "loss_scale" not in extra_args:
            raise ValueError("loss_scale=True needs update(..., loss_scale=s), got no loss_scale")
        units = NormUnits(updates, scope, stacked)
        units.check_state(state.count)
        if not units.leaves:
            return updates, state
        scale = jnp.asarray(extra_args["loss_scale"] if loss_scale else 1.0, jnp.float32)

        norm = units.norms() / scale
        finite = jnp.isfinite(norm)
        use = finite & (norm > 0)
        old = StabilizerState(*(units.ravel(field) for field in state))
        new = _accumulate(old, norm, use, gamma1, gamma2, winsorize, bias_correction)
        rho = jnp.where(use, _ratio(new, gamma1, gamma2, eps, bias_correction), 0)
        # Two factors: the product of rho and 1/R may underflow where g/R does not.
        inverse_norm = 1 / (scale * jnp.maximum(norm, scalar_at(eps, old.count)))
        if on_nonfinite == "raise":
            for name, ok in zip(units.names, units.split(finite), strict=True):
                checkify.check(jnp.all(ok), f"gradient_stabilizer: the gradient of {name} is not finite")

        out = []
        per_leaf = (units.per_leaf(x) for x in (inverse_norm, rho, finite))
        for g, inverse, r, ok in zip(units.leaves, *per_leaf, strict=True):
            scaled = (g.astype(_wide(g.dtype)) * inverse * r).astype(g.dtype)
            # A NaN gradient times zero is NaN: select.
            scaled = jnp.where(r > 0, scaled, jnp.zeros((), g.dtype))
            out.append(jnp.where(ok, scaled, g) if on_nonfinite == "skip" else scaled)
        new_state = StabilizerState(
            *(jax.tree.unflatten(jax.tree.structure(a), units.split(b)) for a, b in zip(state, new, strict=True))
        )
        return jax.tree.unflatten(units.treedef, out), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def stabilizer_bound(
    gamma1: Number = 0.6, gamma2: Number = 0.999, t: int | None = None, bias_correction: bool = True
) -> float:
    """The largest length ρ_t that any sequence of norms can produce (tight).

    By Cauchy-Schwarz, B_t = (1-γ1)/√(1-γ2) · √((1-q^t)/(1-q)) [· √(1-γ2^t)/(1-γ1^t) with bias correction],
    q = γ1²/γ2, attained by R_k = (γ1/γ2)^(t-k). Its limit and supremum is ρ̄ = (1-γ1)/√(1-γ2)/√(1-q), 15.816
    for the defaults. `eps` only lowers ρ, and winsorised norms are norms too.

    Args:
        gamma1: decay of the mean of norms, in [0, 1).
        gamma2: decay of the mean of squared norms, in [0, 1).
        t: number of steps in the statistics, at least 1; None for the bound over all t.
        bias_correction: as in `gradient_stabilizer`.

    Returns:
        The bound; `inf` where none exists (γ1² >= γ2, γ1 > 0 and t None).

    Raises:
        ValueError: an argument is out of range.

    Reference: arXiv 2502.17055 (a lemma: the limit, without bias correction).

    Example:
        >>> [round(stabilizer_bound(t=t), 3) for t in (1, 10, 1000)], round(stabilizer_bound(), 3)
        ([1.0, 1.588, 12.576], 15.816)
    """
    for name, gamma in (("gamma1", gamma1), ("gamma2", gamma2)):
        check_range(name, gamma, lambda x: 0 <= x < 1, "in [0, 1)")
    if t is not None and t < 1:
        raise ValueError(f"t must be None or at least 1, got {t}")
    gain = (1 - gamma1) / math.sqrt(1 - gamma2)
    q = 0.0 if gamma1 == 0 else gamma1**2 / gamma2 if gamma2 else math.inf
    if t is None:
        # The supremum with bias correction is the same: (1-q^t)(1-γ2^t) <= (1-γ1^t)², as q γ2 = γ1².
        return gain / math.sqrt(1 - q) if q < 1 else math.inf
    if t == 1 or q < 1:
        series = (1 - q**t) / (1 - q) if t > 1 else 1.0
    elif q == 1:
        series = float(t)
    else:
        try:
            series = (q**t - 1) / (q - 1) if math.isfinite(q) else math.inf
        except OverflowError:
            series = math.inf
    bound = gain * math.sqrt(series)
    return bound * math.sqrt(1 - gamma2**t) / (1 - gamma1**t) if bias_correction else bound


def recovery_steps(spike_ratio: Number, gamma2: Number = 0.999, *, rho: Number | None = None) -> float:
    """How many ordinary steps the statistics (without winsorising) need to forget a spike.

    After one norm S among norms R, √v falls as γ2^(n/2), so that ρ_n = 1/√(1 + (1-γ2)(S/R)² γ2^n): the
    ordinary gradients come out shorter by this factor. Adam hides most of it (it divides by its own root mean
    square), SGD does not; `winsorize` removes it.

    Args:
        spike_ratio: S/R, the spike's norm over the ordinary norm.
        gamma2: decay of the mean of squared norms, in (0, 1).
        rho: the ratio to come back to, in (0, 1); None for the rule 2/(1-γ2) ln(S√(1-γ2)/R), about ρ = 0.7.

    Returns:
        The number of steps, 0 if the ratio never falls that low.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(recovery_steps(1e6)), round(recovery_steps(1e6, rho=0.5))
        (20723, 19615)
    """
    check_range("spike_ratio", spike_ratio, lambda x: 0 < x < math.inf, "a positive number")
    check_range("gamma2", gamma2, lambda x: 0 < x < 1, "in (0, 1)")
    check_range("rho", rho, lambda x: 0 < x < 1, "None or in (0, 1)")
    log_excess = 2 * math.log(spike_ratio) + math.log1p(-gamma2)
    if rho is None:
        return max(log_excess / (1 - gamma2), 0.0)
    return max((log_excess - math.log(rho**-2 - 1)) / -math.log(gamma2), 0.0)


def stabilizer_metrics(
    state: PyTree,
    gamma1: ScalarOrSchedule = 0.6,
    gamma2: ScalarOrSchedule = 0.999,
    *,
    eps: ScalarOrSchedule = 1e-12,
    bias_correction: bool = True,
) -> StabilizerMetrics:
    """Lengths, variability of norms and skipped steps, for logging.

    Args:
        state: a `StabilizerState`, or any optimizer state that contains exactly one.
        gamma1: as given to `gradient_stabilizer`; so are the arguments below.
        gamma2: decay of the mean of squared norms.
        eps: guard of the division.
        bias_correction: whether the averages are bias-corrected.

    Returns:
        `StabilizerMetrics`, trees shaped like the fields of the state.

    Raises:
        ValueError: `state` contains no, or more than one, `StabilizerState`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = gradient_stabilizer()
        >>> _, state = tx.update({"w": jnp.full(4, 7.0)}, tx.init({"w": jnp.zeros(4)}))
        >>> print(round(float(stabilizer_metrics(state).rho["w"]), 4))
        1.0
    """
    is_state = lambda x: isinstance(x, StabilizerState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(f"state must contain exactly one StabilizerState, got {len(found)}")
    stats = found[0]

    def ratio(*fields: Array) -> Float[Array, "*units"]:
        return _ratio(StabilizerState(*fields), gamma1, gamma2, eps, bias_correction)

    rho = jax.tree.map(ratio, *stats)
    variation = jax.tree.map(
        lambda r: jnp.where(r > 0, jnp.sqrt(jnp.maximum(1 / jnp.square(jnp.where(r > 0, r, 1)) - 1, 0)), 0),
        rho,
    )
    return StabilizerMetrics(rho, variation, stats.skipped)


def _accumulate(
    state: StabilizerState,
    norm: Float[Array, "units"],
    use: Bool[Array, "units"],
    gamma1: ScalarOrSchedule,
    gamma2: ScalarOrSchedule,
    winsorize: ScalarOrSchedule | None,
    bias_correction: bool,
) -> StabilizerState:
    """One step of both averages, for all units at once; units outside `use` only count as skipped."""
    count, mean, rms, skipped = state
    g1 = scalar_at(gamma1, count)
    sqrt_g2 = jnp.sqrt(scalar_at(gamma2, count))
    if winsorize is not None:
        previous = mean / _one_minus_power(_log(g1), count) if bias_correction else mean
        norm = jnp.where(count > 0, jnp.minimum(norm, scalar_at(winsorize, count) * previous), norm)
    norm = jnp.where(use, norm, 0)
    # (1 - √γ2)(1 + √γ2) instead of 1 - γ2 makes the two weights' squares add up to 1 in float32 too.
    new_rms = jnp.hypot(sqrt_g2 * rms, jnp.sqrt((1 - sqrt_g2) * (1 + sqrt_g2)) * norm)
    return StabilizerState(
        count=jnp.where(use, optax.safe_increment(count), count),
        mean_norm=jnp.where(use, g1 * mean + (1 - g1) * norm, mean),
        rms_norm=jnp.where(use, new_rms, rms),
        skipped=jnp.where(use, skipped, optax.safe_increment(skipped)),
    )


def _ratio(
    state: StabilizerState,
    gamma1: ScalarOrSchedule,
    gamma2: ScalarOrSchedule,
    eps: ScalarOrSchedule,
    bias_correction: bool,
) -> Float[Array, "*units"]:
    """ρ_t = m̂_t/(√v̂_t + eps); 0 for units without a step."""
    count, mean, rms, _ = state
    step = jnp.maximum(count - 1, 0)  # at which the schedules were read when the step was taken
    if bias_correction:
        mean = mean / _one_minus_power(_log(scalar_at(gamma1, step)), count)
        # The logarithm of the γ2 that the rounded √γ2 of `_accumulate` stands for.
        log_gamma2 = 2 * _log(jnp.sqrt(scalar_at(gamma2, step)))
        rms = rms / jnp.sqrt(_one_minus_power(log_gamma2, count))
    return mean / (rms + scalar_at(eps, step))


def _one_minus_power(log_gamma: Float[Array, "*g"], t: Int[Array, "*units"]) -> Float[Array, "*units"]:
    """1 - γ^t without cancellation; t = 0 is read as 1, for units whose averages are still zero."""
    return -jnp.expm1(jnp.maximum(t, 1) * log_gamma)


def _log(gamma: Float[Array, "*g"]) -> Float[Array, "*g"]:
    return jnp.log1p(-(1 - gamma))  # float32 logarithms lose digits near 1


def _wide(dtype: Any) -> Any:
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32


def _check_gammas(gamma1: Any, gamma2: Any) -> None:
    for name, gamma in (("gamma1", gamma1), ("gamma2", gamma2)):
        check_range(name, gamma, lambda x: 0 <= x < 1, "in [0, 1)")
    g1, g2 = concrete(gamma1), concrete(gamma2)
    if g1 is not None and g2 is not None and g1 > 0 and g1**2 >= g2:
        warnings.warn(
            f"gamma1² = {g1**2:.6g} >= gamma2 = {g2:.6g}: no uniform bound on the output length exists",
            UserWarning,
            stacklevel=3,
        )
