"""Approximate polar factors of batches of matrices, by matrix products alone.

For G = U diag(σ) Vᵀ the polar factor is U Vᵀ: the nearest matrix with orthonormal rows or columns. A quintic
iteration Z ← aZ + (bA + cA²)Z with A = ZZᵀ leaves the singular vectors alone and sends every singular value σ
of Z to aσ + bσ³ + cσ⁵, which a good choice of (a, b, c) drives towards 1. What differs here from the
textbook:

* the input is divided by a power of two near its largest entry before its Frobenius norm is taken, so that
  float16 entries near 6e4 do not overflow, entries near 1e-20 do not underflow, and power-of-two rescaling
  changes no bit of the result;
* `gram` runs the same polynomial on the smaller Gram matrix, which is cheaper from aspect ratio two on;
* products that are symmetric are computed by one triangle, where matrices are large enough for that to pay;
* the number of steps may be a traced integer.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from kernels_pallas import symmetric_product

__all__ = ["NEWTON_SCHULZ_COEFFS", "ORTHOGONALIZERS", "POLAR_EXPRESS_COEFFS", "orthogonalize"]

ORTHOGONALIZERS = ("auto", "gram", "identity", "ns", "polar_express", "svd")

NEWTON_SCHULZ_COEFFS = (3.4445, -4.7750, 2.0315)
"""The triple (a, b, c) of Keller Jordan's Muon, steep at zero: five steps end in about [0.6, 1.2]."""

POLAR_EXPRESS_COEFFS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""One triple per step, for singular values up to 1/1.01 ("The Polar Express", arXiv 2505.16932)."""

_POLAR_EXPRESS_MARGIN = 1.01
_HALF_PRECISION_RESTART = 2
# From which size on half a symmetric product is less work than a whole one: half precision is for accelerators, whose
# kernels start at one block; elsewhere it takes more to make up for the copies.
_SMALLEST_SYMMETRIC = {16: 128, 32: 768, 64: 768}


class _Coefficients(NamedTuple):
    """Triples (a, b, c) by step: the last one is repeated when there are more steps than triples."""

    table: Any  # a tuple of triples of floats, or a (k, 3) array

    def at(self, step: Any) -> tuple[Any, Any, Any]:
        if isinstance(step, int) and isinstance(self.table, tuple):
            return self.table[min(step, len(self.table) - 1)]
        table = jnp.asarray(self.table)
        row = table[jnp.minimum(step, table.shape[0] - 1)]
        return row[0], row[1], row[2]


def orthogonalize(
    x: Float[Array, "*batch rows columns"],
    method: str = "auto",
    steps: ArrayLike = 5,
    coeffs: ArrayLike | Sequence[Any] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch rows columns"]:
    """Approximate polar factor U Vᵀ of every matrix in a batch.

    Works under `jit`, `vmap`, `grad` (not with a traced `steps`) and `scan`. A zero matrix gives zero; a NaN
    or an infinity makes its whole matrix NaN (`identity`: stays where it is).

    Args:
        x: matrices G in the last two axes, any floating dtype, any scale.
        method: `"ns"`, the quintic Newton-Schulz iteration; `"gram"`, the same polynomial computed on the
            min(rows, columns)-sized Gram matrix; `"auto"`, `gram` for aspect ratios of at least two, else
            `ns`; `"polar_express"`, an iteration with a better polynomial per step; `"svd"`, the exact factor
            of the numerical row space; `"identity"`, x itself.
        steps: number of iterations, at least 1, a Python integer (unrolled) or an integer array (a loop, so
            that a traced value can change without a new trace). Unused by `svd` and `identity`.
        coeffs: a triple (a, b, c), or one triple per step, used in order; with more steps than triples the
            last is repeated. Default: `NEWTON_SCHULZ_COEFFS`, or `POLAR_EXPRESS_COEFFS` for `polar_express`.
        dtype: of the matrix products. Default: bfloat16 when the default backend is a GPU or a TPU; on CPU
            float32, or x's dtype if wider. `svd` uses float32 or wider in any case.

    Returns:
        Q, with x's shape and dtype.

    Raises:
        ValueError: unknown `method`, fewer than two axes, a complex or integer `x`, `steps` < 1, malformed
            `coeffs`.

    Example:
        >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, -1e-3, 0.0]])
        >>> jnp.round(orthogonalize(x, "svd"), 3).tolist()
        [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]

    Reference:
        Step 3 of the method in "OLion: Approaching the Hadamard Ideal by Intersecting Spectral and l_inf
        Implicit Biases", arXiv 2602.01105; Muon, Keller Jordan, 2024.
    """
    check_orthogonalizer(method, steps, coeffs)
    if x.ndim < 2:
        raise ValueError(f"x must have at least two axes, got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be real floating point, got dtype {x.dtype}")
    if 0 in x.shape or method == "identity":
        return x

    rows, columns = x.shape[-2:]
    if method == "auto":
        method = "gram" if max(rows, columns) >= 2 * min(rows, columns) else "ns"
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = unit_frobenius(x.astype(wide))
    if method == "svd":
        return svd_polar_factor(z).astype(x.dtype)

    if coeffs is None:
        coeffs = POLAR_EXPRESS_COEFFS if method == "polar_express" else NEWTON_SCHULZ_COEFFS
    if method == "polar_express":
        z = z / _POLAR_EXPRESS_MARGIN
    z = z.astype(product_dtype(x.dtype, dtype))
    tall = rows > columns
    z = jnp.swapaxes(z, -1, -2) if tall else z
    iterate = _gram_newton_schulz if method == "gram" else _newton_schulz
    q = iterate(z, as_static_integer(steps), _as_coefficients(coeffs))
    return (jnp.swapaxes(q, -1, -2) if tall else q).astype(x.dtype)


def check_orthogonalizer(method: str, steps: Any, coeffs: Any) -> None:
    """Raise ValueError for settings that no input could make valid; traced values pass.

    Args:
        method: one of `ORTHOGONALIZERS`.
        steps: an integer or integer array, at least 1.
        coeffs: None, a triple, or a sequence of triples.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if method not in ORTHOGONALIZERS:
        raise ValueError(f"orthogonalizer must be one of {', '.join(ORTHOGONALIZERS)}; got {method!r}")
    if isinstance(steps, bool) or not jnp.issubdtype(jnp.result_type(steps), jnp.integer) or jnp.ndim(steps):
        raise ValueError(f"the number of steps must be an integer scalar, got {steps!r}")
    static = as_static_integer(steps)
    if isinstance(static, int) and static < 1:
        raise ValueError(f"the number of steps must be at least 1, got {static}")
    if coeffs is None:
        return
    if method in ("svd", "identity"):
        raise ValueError(f"coefficients have no meaning for the orthogonalizer {method!r}; leave them None")
    table = _as_coefficients(coeffs).table
    if isinstance(table, tuple) and not all(math.isfinite(c) for triple in table for c in triple):
        raise ValueError(f"coefficients must be finite, got {coeffs!r}")


def as_static_integer(value: Any) -> Any:
    """A Python int where the value is known at trace time, else the traced value.

    Args:
        value: an integer, a concrete or a traced integer array.

    Returns:
        `int(value)` or `value`.
    """
    return value if isinstance(value, jax.core.Tracer) else operator.index(value)


def _as_coefficients(coeffs: Any) -> _Coefficients:
    """Triples as Python floats where they are known at trace time, else as an array."""
    if not hasattr(coeffs, "shape"):
        rows: Any = tuple(coeffs)
        rows = rows if rows and all(isinstance(row, Sequence) or jnp.ndim(row) for row in rows) else (rows,)
        if any(len(row) != 3 for row in rows):
            raise ValueError(f"coefficients must be a triple or a sequence of triples, got {coeffs!r}")
        coeffs = rows
        if any(isinstance(c, jax.core.Tracer) for c in jax.tree.leaves(rows)):
            coeffs = jnp.stack([jnp.stack([jnp.asarray(c, jnp.float32) for c in row]) for row in rows])
    elif coeffs.shape[-1:] != (3,) or coeffs.ndim > 2 or 0 in coeffs.shape:
        raise ValueError(f"coefficients must be a triple or a sequence of triples, got shape {coeffs.shape}")
    if isinstance(coeffs, jax.core.Tracer):
        return _Coefficients(jnp.atleast_2d(coeffs))
    rows = coeffs if isinstance(coeffs, tuple) else jnp.atleast_2d(coeffs)
    return _Coefficients(tuple((float(a), float(b), float(c)) for a, b, c in rows))


def product_dtype(x: DTypeLike, dtype: DTypeLike | None = None) -> Any:
    """The dtype of the iteration's products.

    Args:
        x: dtype of the matrices.
        dtype: the caller's choice.

    Returns:
        `dtype`, by default bfloat16 on GPU and TPU, and on CPU float32 or x if wider.
    """
    if dtype is not None:
        return jnp.dtype(dtype)
    return jnp.promote_types(x, jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(jnp.bfloat16)


def _matmul(x: Array, y: Array) -> Array:
    # float32 was asked for where it reaches here: no silent TF32 on GPUs, no bfloat16 passes on TPUs.
    half = jnp.finfo(x.dtype).bits <= 16
    return jnp.matmul(x, y, precision=None if half else lax.Precision.HIGHEST)


def _gram(z: Array) -> Array:
    """z zᵀ."""
    return _symmetric_product(z) if _halves(z) else _matmul(z, jnp.swapaxes(z, -1, -2))


def _commuting(x: Array, y: Array) -> Array:
    """x y for two polynomials of one symmetric matrix, which is symmetric again."""
    # Without the exact symmetry of the halved product, x yᵀ instead of x y would let rounding errors grow.
    return _symmetric_product(x, y) if _halves(x) else _matmul(x, y)


def _halves(x: Array) -> bool:
    """Whether computing one triangle of a symmetric product pays."""
    return x.shape[-2] >= _SMALLEST_SYMMETRIC[max(16, jnp.finfo(x.dtype).bits)]


def _symmetric_product(x: Array, y: Array | None = None) -> Array:
    # A Pallas kernel needs whole matrices, and a program that the compiler partitions may have cut them.
    kinds = jax.typeof(x).sharding.mesh.axis_types
    whole = all(kind == AxisType.Manual for kind in kinds) if kinds else jax.device_count() == 1
    return symmetric_product(x, y, implementation=None if whole else "xla")


def unit_frobenius(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch rows columns"]:
    """x / ‖x‖_F per matrix; zero stays zero, and x times a power of two gives the same bits.

    Args:
        x: matrices, float32 or wider.

    Returns:
        Matrices of Frobenius norm one or zero.
    """
    limit = -jnp.finfo(x.dtype).minexp
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    x = x * jnp.ldexp(jnp.ones((), x.dtype), -jnp.clip(exponent, -limit, limit))
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    # An infinite norm would turn the finite entries into zeros that look like a gradient.
    return x / jnp.where(norm == 0, 1, jnp.where(jnp.isfinite(norm), norm, jnp.nan))


def _newton_schulz(z: Array, steps: Any, coefficients: _Coefficients) -> Array:
    """Z ← aZ + (bA + cA²)Z with A = ZZᵀ, on wide matrices."""

    def step(i: Any, z: Array) -> Array:
        a, b, c = (jnp.asarray(k, z.dtype) for k in coefficients.at(i))
        A = _gram(z)
        return a * z + _matmul(b * A + c * _commuting(A, A), z)

    return _repeat(step, 0, steps, z)


def _gram_newton_schulz(z: Array, steps: Any, coefficients: _Coefficients) -> Array:
    """The same polynomial on the Gram matrix R = ZZᵀ: P = aI + bR + cR², Q ← PQ, R ← RP², at the end QZ.

    In half precision R drifts away from the Gram matrix of QZ, so after two steps QZ is formed and R rebuilt.
    """
    identity = jnp.eye(z.shape[-2], dtype=z.dtype)

    def step(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        q, r = carry
        p = polynomial(i, r)
        return _commuting(p, q), _commuting(_commuting(r, p), p)

    def polynomial(i: Any, r: Array) -> Array:
        a, b, c = (jnp.asarray(k, r.dtype) for k in coefficients.at(i))
        return a * identity + b * r + c * _commuting(r, r)

    def run(start: Any, stop: Any, z: Array) -> Array:
        r = _gram(z)
        if not (isinstance(start, int) and isinstance(stop, int)):
            q, _ = _repeat(step, start, stop, (jnp.broadcast_to(identity, r.shape), r))
            return _matmul(q, z)
        if start == stop:
            return z
        # Unrolled: the first product with Q = I and the last update of R are not needed.
        p = polynomial(start, r)
        q = p
        for i in range(start + 1, stop):
            r = _commuting(_commuting(r, p), p)
            p = polynomial(i, r)
            q = _commuting(p, q)
        return _matmul(q, z)

    if jnp.finfo(z.dtype).bits > 16:
        return run(0, steps, z)
    restart = min(steps, _HALF_PRECISION_RESTART) if isinstance(steps, int) else jnp.minimum(steps, 2)
    return run(restart, steps, run(0, restart, z))


def _repeat(step: Any, start: Any, stop: Any, carry: Any) -> Any:
    if isinstance(start, int) and isinstance(stop, int):
        for i in range(start, stop):
            carry = step(i, carry)
        return carry
    return lax.fori_loop(start, stop, step, carry)


class TruncatedSVD(NamedTuple):
    """z ≈ u diag(sigma) vt, u and sigma zero beyond the numerical rank.

    Attributes:
        u: (*batch, rows, k), k = min(rows, columns).
        sigma: (*batch, k), descending.
        vt: (*batch, k, columns).
        kept: (*batch, k), 1 for singular values above max(rows, columns) ε σ₁, else 0.
    """

    u: Array
    sigma: Array
    vt: Array
    kept: Array


def truncated_svd(z: Float[Array, "*batch rows columns"]) -> TruncatedSVD:
    """Singular value decomposition over the numerical row space.

    Args:
        z: matrices, float32 or wider.

    Returns:
        A `TruncatedSVD`.
    """
    u, sigma, vt = jnp.linalg.svd(z, full_matrices=False)
    # Not `sigma > cutoff`: NaN singular values count as kept, and so stay NaN.
    kept = (~(sigma <= max(z.shape[-2:]) * jnp.finfo(z.dtype).eps * sigma[..., :1])).astype(z.dtype)
    return TruncatedSVD(u * kept[..., None, :], sigma * kept, vt, kept)


def svd_polar_factor(z: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch rows columns"]:
    """U_r V_rᵀ of the truncated decomposition; zero rows and columns of z stay zero.

    Args:
        z: matrices, float32 or wider.

    Returns:
        The polar factors.
    """
    svd = truncated_svd(z)
    q = _matmul(svd.u, svd.vt)
    # LAPACK leaves about 1e-7 in rows and columns that are exactly zero; a later sign() would make that ±1.
    for axis in (-1, -2):
        q = jnp.where(jnp.all(z == 0, axis=axis, keepdims=True), 0, q)
    return q
