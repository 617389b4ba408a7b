"""Mean-field quantities of a mixture-of-experts transformer at initialization: what a limit depends on.

Three averages are nested: over residual neurons, over experts, over the neurons of an expert. From "Hyperparameter
Transfer with Mixture-of-Experts Layers" (arXiv:2601.20205).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

from jaxlib_icml.moe.config import BaseSpec, MoEShape
from jaxlib_icml.moe.parameterization import rules

_QUADRATURE = 200
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: np.maximum(z, 0),
    "swiglu": lambda z: z * special.expit(z),  # times an independent standard normal
}


def alpha_star(shape: MoEShape) -> float:
    """α* = n / (m E L), which the limit of infinite size depends on.

    α* → 0 gives an ordinary differential equation in layer time, α* > 0 a stochastic one; equal α* and κ mean equal
    limits.

    Args:
      shape: Sizes.

    Returns:
      α*.

    >>> alpha_star(MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1))
    0.0625
    """
    return shape.width / (shape.expert_width * shape.num_experts * shape.num_layers)


def router_logit_std(width: int | None, gamma: float) -> float:
    """Standard deviation of a router's initial logits on unit-RMS tokens, n^(1/2 - γ); None: its limit."""
    if width is None:
        return 1.0 if gamma == 0.5 else 0.0
    return width ** (0.5 - gamma)


def selection_threshold(kappa: float, gamma: float = 0.5, bias_std: float = 0.0, *, width: int | None = None) -> float:
    """The quantile q* that selection becomes with many experts: P(g + b ≥ q*) = κ.

    Args:
      kappa: Share of the experts that a token uses, in (0, 1).
      gamma: Exponent of the router's initial standard deviation, n^-γ.
      bias_std: Standard deviation of normal selection biases.
      width: n; None: infinite, where γ > 1/2 leaves all gates at 1/2.

    Returns:
      q*, in gate units.

    Raises:
      ValueError: `kappa` outside (0, 1), `gamma` below 1/2, or a negative `bias_std`.

    >>> round(selection_threshold(1 / 4), 5)
    0.66251
    """
    if not 0 < kappa < 1:
        raise ValueError(f"kappa must be in (0, 1), got {kappa}")
    if gamma < 0.5:
        raise ValueError(f"gamma must be at least 1/2, got {gamma}")
    if not 0 <= bias_std < math.inf:
        raise ValueError(f"bias_std must be at least 0, got {bias_std}")
    std = router_logit_std(width, gamma)
    if bias_std == 0:
        return float(special.expit(-std * special.ndtri(kappa)))
    z, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE)
    gates, weights = special.expit(std * z), weights / weights.sum()
    tail = lambda q: float(weights @ special.ndtr((gates - q) / bias_std)) - kappa  # noqa: E731
    reach = 1 + 40 * bias_std
    return float(optimize.brentq(tail, -reach, 1 + reach, xtol=1e-12))


def gate_moment(kappa: float, gamma: float = 1.0, *, width: int | None = None) -> float:
    """E[g² | selected] of a sigmoid gate at initialization, without selection biases.

    Args:
      kappa: As in `selection_threshold`; 1 is allowed.
      gamma: Exponent of the router's initial standard deviation.
      width: n; None: infinite.

    Returns:
      The moment: 1/4 for γ = 1 and n → ∞.

    >>> gate_moment(0.25)
    0.25
    """
    std = router_logit_std(width, gamma)
    # Midpoints of equal shares of probability: quantiles of the selected tail.
    share = (np.arange(4000) + 0.5) / 4000 * kappa
    return float(np.mean(special.expit(-std * special.ndtri(share)) ** 2))


def init_stream_variance(
    base: BaseSpec, shape: MoEShape, *, scheme: str = "moe_mup", activation: str = "gelu"
) -> float:
    """Variance per coordinate of what all experts together add to the residual stream at initialization.

    Var E_i = m σ_down² E[φ(z)²] per expert, and with L branches of factor f and a experts each:
    L f² Var E E[g² | sel] / a, under the rules E[φ²] E[g² | sel] / (L a α), times c_d².

    Args:
      base: The tuned model.
      shape: Sizes of the model.
      scheme: As in `rules`.
      activation: "gelu", "relu" or "swiglu".

    Returns:
      The variance.

    Raises:
      ValueError: An unknown activation, or what `rules` refuses.

    >>> from jaxlib_icml.moe.config import UNIT_CONSTANTS
    >>> shape = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> base = BaseSpec(shape, constants=UNIT_CONSTANTS)
    >>> wide = MoEShape(width=64000, num_layers=2, expert_width=128000, num_experts=4, num_active=1)
    >>> round(init_stream_variance(base, wide, activation="relu") * 8 * 2 * 1 * 2, 1)
    1.0
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    z, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE)
    moment = float(weights @ _ACTIVATIONS[activation](z) ** 2 / weights.sum())
    rule = rules(base, shape, scheme)["expert_down"]
    expert = shape.expert_width * rule.init_std**2 * moment
    gamma = 0.5 if scheme == "sp" else base.router_exponent
    gate = gate_moment(shape.kappa, gamma, width=shape.width) if shape.num_experts > 1 else 1.0
    return shape.num_layers * rule.fwd_mult**2 * expert * gate / shape.num_active


class Advice(NamedTuple):
    """What to know before transferring.

    Attributes:
      warnings: Sentences about leaving the region in which transfer was shown; empty: inside.
      alpha_star: Of the base and of the target.
      init_variance: `init_stream_variance` of both, NaN where no rule is defined.
    """

    warnings: tuple[str, ...]
    alpha_star: tuple[float, float]
    init_variance: tuple[float, float]


def advise(base: BaseSpec, target: MoEShape, *, activation: str = "gelu") -> Advice:
    """Warn before hyper-parameters are carried where theory and experiments do not reach.

    Args:
      base: The tuned model.
      target: The model to train.
      activation: As in `init_stream_variance`.

    Returns:
      `Advice`.

    >>> small = MoEShape(width=64, num_layers=2, expert_width=64, num_experts=4, num_active=1)
    >>> advise(BaseSpec(small), small).warnings[0].split(";")[0]
    'the base model has alpha = 1, below 2'
    """
    warnings = []
    old = base.shape
    if not math.isclose(old.kappa, target.kappa):
        warnings.append(f"kappa goes from {old.kappa:g} to {target.kappa:g}; no rule covers that")
    if old.head_dim != target.head_dim:
        warnings.append(f"head_dim goes from {old.head_dim} to {target.head_dim}; scale the number of heads instead")
    for name, shape in (("base", old), ("target", target)):
        if shape.alpha < 2:
            warnings.append(
                f"the {name} model has alpha = {shape.alpha:g}, below 2; what experts start with and what they learn "
                "is then of one size, and the limit is not reached"
            )
    stars = alpha_star(old), alpha_star(target)
    if stars[1] > 4 * stars[0]:
        warnings.append(
            f"alpha* grows from {stars[0]:.3g} to {stars[1]:.3g}; the target is noisier than the base (fewer or "
            "narrower experts in fewer layers)"
        )
    try:
        variances = tuple(init_stream_variance(base, shape, activation=activation) for shape in (old, target))
    except ValueError:
        variances = (math.nan, math.nan)
    return Advice(tuple(warnings), stars, (variances[0], variances[1]))
