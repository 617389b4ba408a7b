"""Rounding to a low-precision grid in full precision, with a straight-through gradient.

The quantizer of quantization-aware training: the forward pass sees the values that the format can hold, the backward
pass sees the identity. Scales are symmetric: the largest magnitude of a slice lands on the largest value of the grid,
so nothing is ever clipped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["FORMATS", "fake_quant"]


class Format(NamedTuple):
    """A sign-symmetric grid of numbers.

    Attributes:
      largest: The largest value.
      mantissa_bits: Explicit mantissa bits of a floating-point grid; None for the integers up to `largest`.
      min_exponent: Exponent of the smallest normal number; below it the grid is uniform down to zero.
    """

    largest: float
    mantissa_bits: int | None = None
    min_exponent: int = 0


FORMATS: dict[str, Format] = {
    # One exponent bit only tells subnormal from normal numbers, and both have the same step: 0, 1, ..., 7.
    "e1m2": Format(7.0),
    "e2m1": Format(6.0, mantissa_bits=1, min_exponent=0),
    "int4": Format(7.0),
    "int8": Format(127.0),
    "fp8_e4m3": Format(448.0, mantissa_bits=3, min_exponent=-6),
}
"""The grids by name, before scaling. Symmetric scaling never reaches -8, so that `int4` and `e1m2` are the same."""


def fake_quant(
    x: Float[Array, "*shape"],
    fmt: str = "e1m2",
    axis: int | Sequence[int] | None = None,
    ste: bool = True,
) -> Float[Array, "*shape"]:
    """Rounds `x` to the scaled grid of a low-precision format; the gradient passes straight through.

    s = max|x| / largest over each slice, and x becomes s · round(x / s), to nearest with ties to even. Applying it
    twice changes nothing more (in float16 unless the values are subnormal). Slices of zeros stay zero. A NaN or an
    infinity makes its whole slice NaN: it has no scale.

    Args:
      x: float16, bfloat16, float32 or float64; rounding is done in float32 (float64 for float64).
      fmt: "e1m2" (sign, 1 exponent and 2 mantissa bits: the uniform grid 0, ±1, ..., ±7), "e2m1" (0, 0.5, 1, 1.5, 2, 3,
        4, 6), "int4" (0, ±1, ..., ±7), "int8" (up to ±127) or "fp8_e4m3" (up to ±448, no infinities).
      axis: the axes over which the largest magnitude is taken, so that the remaining ones have a scale per index;
        None: one scale for the tensor. For a kernel (in, out), `axis=0` gives a scale per output.
      ste: straight-through estimator: the gradient is the identity inside the range of the grid, which with these
        scales is everywhere. False: the derivative of the function itself, in which rounding contributes nothing and
        only the element that sets a scale has one.

    Returns:
      The rounded values, in the shape and dtype of `x`.

    Raises:
      ValueError: an unknown format, an axis that `x` does not have or that is named twice, or a dtype that is not
        floating point.

    >>> fake_quant(jnp.array([0.3, -1.2, 7.0, 2.5]), "e1m2").tolist()
    [0.0, -1.0, 7.0, 2.0]
    >>> jax.grad(lambda x: fake_quant(x).sum())(jnp.array([0.3, 7.0])).tolist()
    [1.0, 1.0]

    Reference:
      E1M2 for weights and activations: "GradientStabilizer: Fix the Norm, Not the Gradient", arXiv 2502.17055. The
      estimator: "Estimating or Propagating Gradients Through Stochastic Neurons", arXiv 1308.3432.
    """
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, got {x.dtype}")
    axes = _axes(axis, x.ndim)
    if not ste:
        return _quantize(x, fmt, axes)
    return _straight_through(x, fmt, axes)


def _axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    given = tuple(range(ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -ndim <= a < ndim for a in given):
        raise ValueError(f"axis must lie in [{-ndim}, {ndim}) for an array of {ndim} axes, got {axis}")
    axes = tuple(sorted({a % ndim for a in given}))
    if len(axes) < len(given):
        raise ValueError(f"axis names an axis twice: {axis}")
    return axes


def _quantize(x: Array, fmt: str, axes: tuple[int, ...]) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True, initial=0)
    # Slices so small that their scale would be subnormal are lifted by a power of two, which changes no digit.
    lift = jnp.where(largest < 2.0**-100, 2.0**24, 1).astype(wide.dtype)
    grid = FORMATS[fmt]
    scale = jnp.where(largest == 0, 1, largest * lift / grid.largest)
    rounded = jax.lax.stop_gradient(_round(wide * lift / scale, grid))
    # The largest magnitude is kept to the last digit, so that a second application finds the same scale.
    exact = jnp.where(jnp.abs(rounded) == grid.largest, jnp.sign(rounded) * largest, rounded * scale / lift)
    return exact.astype(x.dtype)


def _round(y: Array, grid: Format) -> Array:
    """The nearest grid value of numbers that do not exceed the largest one; ties to the even mantissa."""
    if grid.mantissa_bits is None:
        return jnp.round(y)
    _, exponent = jnp.frexp(y)  # |y| in [2^(exponent - 1), 2^exponent)
    step = jnp.ldexp(jnp.ones_like(y), jnp.maximum(exponent - 1, grid.min_exponent) - grid.mantissa_bits)
    return jnp.round(y / step) * step


def _forward(x: Array, fmt: str, axes: tuple[int, ...]) -> Array:
    return _quantize(x, fmt, axes)


_straight_through: Any = jax.custom_jvp(_forward, nondiff_argnums=(1, 2))


@_straight_through.defjvp
def _identity_tangent(
    fmt: str, axes: tuple[int, ...], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return _straight_through(primals[0], fmt, axes), tangents[0]
