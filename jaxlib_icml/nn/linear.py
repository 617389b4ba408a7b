"""Contractions whose half-precision inputs accumulate in float32, in the backward pass too.

`jax.lax.dot_general(bf16, bf16)` rounds its result to bfloat16, and its transpose multiplies a float32 cotangent with
a bfloat16 operand when the forward product asks for float32. Both leave the fast path of CPUs with bfloat16 matrix
units (six times slower on one with AMX), so the three products of a layer are written out here.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def contract(x: Float[Array, "..."], w: Float[Array, "..."], num_axes: int = 1) -> Float[Array, "..."]:
    """x @ w over the last `num_axes` axes of `x` and the first `num_axes` of `w`.

    Float32 inputs are multiplied as they are. Half-precision inputs (both of the same dtype) accumulate in float32 and
    the result is rounded once, to that dtype; the same holds for both gradients.

    Args:
      x: (*rows, *contracted).
      w: (*contracted, *columns).
      num_axes: how many axes are contracted.

    Returns:
      (*rows, *columns), in the dtype of the inputs.

    Raises:
      ValueError: dtypes differ, or the contracted axes do not match.

    >>> contract(jnp.ones((2, 3)), jnp.ones((3, 4, 5))).shape
    (2, 4, 5)
    """
    if x.dtype != w.dtype:
        raise ValueError(f"x and w: dtypes differ ({x.dtype} and {w.dtype})")
    if num_axes < 1 or x.shape[x.ndim - num_axes :] != w.shape[:num_axes]:
        raise ValueError(f"x and w: cannot contract {num_axes} axes of shapes {x.shape} and {w.shape}")
    inner = math.prod(w.shape[:num_axes])
    out = _matmul(x.reshape(-1, inner), w.reshape(inner, -1))
    return out.reshape(*x.shape[: x.ndim - num_axes], *w.shape[num_axes:])


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: _DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: None = None,
) -> Float[Array, "..."]:
    """`contract` in the signature that Flax layers accept as `dot_general=`.

    Args:
      lhs: (*rows, *contracted).
      rhs: (*contracted, *columns).
      dimension_numbers: no batch axes; the contracted axes are `lhs`'s last and `rhs`'s first, in order.
      precision: only None (the platform's default).
      preferred_element_type: None or the inputs' dtype.
      out_sharding: only None; shardings propagate.

    Returns:
      (*rows, *columns).

    Raises:
      ValueError: an argument outside these limits.
    """
    (lhs_axes, rhs_axes), batch = dimension_numbers
    count = len(lhs_axes)
    expected = (tuple(range(lhs.ndim - count, lhs.ndim)), tuple(range(count)))
    if any(batch) or (tuple(lhs_axes), tuple(rhs_axes)) != expected:
        raise ValueError(f"dimension_numbers: only trailing-by-leading contractions, got {dimension_numbers}")
    if out_sharding is not None:
        raise ValueError(f"out_sharding: unsupported, got {out_sharding}")
    if precision is not None or preferred_element_type not in (None, lhs.dtype):
        raise ValueError(f"precision/preferred_element_type: unsupported {precision}, {preferred_element_type}")
    return contract(lhs, rhs, count)


@jax.custom_vjp
def _matmul(x: Array, w: Array) -> Array:
    return _accumulate(x, w, 1, 0)


def _accumulate(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    out = lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )
    return out.astype(a.dtype)


def _matmul_fwd(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, w), (x, w)


def _matmul_bwd(residuals: tuple[Array, Array], out_bar: Array) -> tuple[Array, Array]:
    x, w = residuals
    return _accumulate(out_bar, w, 1, 1), _accumulate(x, out_bar, 0, 0)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
