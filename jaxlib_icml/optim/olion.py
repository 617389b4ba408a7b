"""OLion: Lion's momentum, orthogonalized, then its sign, at a fixed root mean square.

Orthogonalization bounds the spectral norm of an update, the sign its largest entry; matrices that do both at
best are scaled partial Hadamard matrices. One alternating projection, polar factor then sign, comes close and
is cheap.

What differs from the authors' released code: the input of the iteration is divided by its norm, not by norm +
1e-7, so that tiny gradients are treated like large ones; leaves are grouped by whole names and by shape, not
by substrings; fused, stacked, per-head and convolution kernels are cut into their matrices first; norms and
biases do not decay.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int8, Int32

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim._matrix_rule import MatrixRule, Scalar, at, scale_by_matrix_rule, wide_dtype
from jaxlib_icml.optim.distribution import resolve_shardings
from jaxlib_icml.optim.matrix_specs import (
    MatrixSpec,
    default_weight_decay_mask,
    resolve_matrix_specs,
)
from jaxlib_icml.optim.orthogonalize import as_static_integer, check_orthogonalizer, orthogonalize, product_dtype

__all__ = ["MuonDirectionState", "ScaleByOlionState", "muon_direction", "olion", "scale_by_olion"]

_NAN = -128  # in `ScaledSigns`


class ScaleByOlionState(NamedTuple):
    """State of `scale_by_olion`.

    Attributes:
        count: number of updates so far.
        mu: momentum M, like the parameters, `optax.MaskedNode` at leaves that are not matrices.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu: Any


class MuonDirectionState(NamedTuple):
    """State of `muon_direction`: the fields of `ScaleByOlionState`."""

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu: Any


def scale_by_olion(
    b1: Scalar = 0.95,
    b2: Scalar = 0.98,
    *,
    ns_steps: Scalar = 5,
    orthogonalizer: str = "auto",
    ns_coeffs: Any = None,
    ns_dtype: DTypeLike | None = None,
    rms_target: Scalar = 0.2,
    eps: Scalar = 1e-8,
    mu_dtype: DTypeLike | None = None,
    matrix_specs: Any = None,
    param_shardings: Any = None,
    alternations: Scalar = 1,
) -> optax.GradientTransformation:
    """The OLion direction of every matrix; leaves that are no matrices pass unchanged.

    Per matrix (one block after splits, heads and batch axes), with M₀ = 0:
    Mₜ = b₂Mₜ₋₁ + (1 - b₂)gₜ; G = (1 - b₁)gₜ + b₁Mₜ; S = sign(orthogonalize(G)); D = γS with
    γ = rms_target √(d₁d₂) / (‖S‖_F + ε), so that D has RMS `rms_target` whatever the shape and the number of
    zeros. A NaN or infinite gradient makes the update of its matrix NaN (with `identity`, of its entry).

    Args:
        b1: weight of the momentum in the mix, in [0, 1).
        b2: decay of the momentum, in [0, 1).
        ns_steps: iterations of the orthogonalizer, an integer of at least 1; may be a traced array.
        orthogonalizer: `"auto"`, `"ns"`, `"gram"`, `"polar_express"`, `"svd"` or `"identity"` (RMS-matched
            Lion); see `orthogonalize`.
        ns_coeffs: the iteration's (a, b, c), or one triple per step.
        ns_dtype: dtype of the iteration. Default: bfloat16 on GPU and TPU; on CPU float32 or wider. Read from
            `jax.default_backend()`, so name it when compiling for another platform.
        rms_target: root mean square of the update; 0.2 is typical of Adam.
        eps: added to ‖S‖_F.
        mu_dtype: dtype in which momentum is stored. Default: float32, or the parameter's dtype if wider.
        matrix_specs: a tree of `MatrixSpec` or None with the structure of the parameters, or a callable from
            parameters to such a tree; `optax.contrib.MuonDimensionNumbers` are understood too. Default:
            `default_matrix_specs`.
        param_shardings: a tree of `jax.sharding.NamedSharding` or None with the structure of the parameters (what
            `jax.jit` gets as `in_shardings`), or a callable from parameters to one. Then every matrix is brought
            together on one device, where the iteration runs without communication, and the signs travel back as
            bytes. Default: the compiler decides, which communicates in every product of a sharded matrix.
        alternations: how often to repeat polar factor and sign; more lowers the spectral norm of S slowly.

    Returns:
        An Optax transformation with state `ScaleByOlionState`. Updates have the parameters' dtype (the
        gradients' dtype when `update` gets no parameters).

    Raises:
        ValueError: an argument out of range (concrete values only), at construction; specs that do not fit,
            complex or integer matrices, at `init`, with the leaf's path.

    Example:
        >>> tx = scale_by_olion()
        >>> g = {"w": jnp.array([[1e-9, -2e-9, 0.0], [3e-9, 4e-9, 0.0]])}
        >>> jax.jit(tx.update)(g, tx.init(g))[0]["w"].round(3).tolist()
        [[0.24500000476837158, -0.24500000476837158, 0.0], [0.24500000476837158, 0.24500000476837158, 0.0]]

    Reference:
        Update rule of "OLion: Approaching the Hadamard Ideal by Intersecting Spectral and l_inf Implicit
        Biases", arXiv 2602.01105.
    """
    _check("b1", b1, 0, 1)
    _check("b2", b2, 0, 1)
    _check("rms_target", rms_target, 0, math.inf, closed=False)
    _check("eps", eps, 0, math.inf)
    _check_engine(orthogonalizer, ns_steps, ns_coeffs)
    if not callable(alternations):
        check_orthogonalizer(orthogonalizer, alternations, None)

    def mix(g: Array, mu: Array, count: Array) -> tuple[Array, Array]:
        mu = at(b2, count, mu.dtype) * mu + (1 - at(b2, count, mu.dtype)) * g
        return mu, (1 - at(b1, count, mu.dtype)) * g + at(b1, count, mu.dtype) * mu

    def project(matrix: Array, count: Array) -> ScaledSigns:
        steps = at(ns_steps, count)
        polar = partial(orthogonalize, method=orthogonalizer, steps=steps, coeffs=ns_coeffs, dtype=ns_dtype)
        target, small = at(rms_target, count, matrix.dtype), at(eps, count, matrix.dtype)
        return scaled_signs(matrix, polar, rms_target=target, eps=small, alternations=at(alternations, count))

    def finish(signs: ScaledSigns, count: Array) -> Array:
        return signs.expand()

    return scale_by_matrix_rule(
        MatrixRule(mix, project, finish), mu_dtype, matrix_specs, param_shardings, ScaleByOlionState
    )


class ScaledSigns(NamedTuple):
    """D = γS of a batch of matrices, a byte per entry.

    Attributes:
        signs: (*batch, rows, columns) int8, S; -128 stands for NaN.
        gamma: (*batch, 1, 1), γ.
    """

    signs: Int8[Array, "*batch rows columns"]
    gamma: Float[Array, "*batch 1 1"]

    def expand(self) -> Float[Array, "*batch rows columns"]:
        """D, in the dtype of γ."""
        return jnp.where(self.signs == _NAN, jnp.nan, self.signs.astype(self.gamma.dtype) * self.gamma)


def scaled_signs(
    matrix: Float[Array, "*batch rows columns"],
    polar: Callable[..., Any],
    *,
    rms_target: ArrayLike = 0.2,
    eps: ArrayLike = 1e-8,
    alternations: ArrayLike = 1,
) -> ScaledSigns:
    """D = γ sign(Q): steps 3 to 5 of the method, per matrix of a batch.

    Args:
        matrix: the mixed gradients G.
        polar: from G to Q.
        rms_target: root mean square of the result.
        eps: added to ‖S‖_F.
        alternations: number of projections followed by a sign, an integer of at least 1.

    Returns:
        D, with entries in {-γ, 0, γ}; zero for a zero matrix, NaN where Q is not finite.

    Example:
        >>> scaled_signs(jnp.array([[3.0, -1.0]]), lambda g: g).expand().round(3).tolist()
        [[0.20000000298023224, -0.20000000298023224]]
    """

    def polar_then_sign(_: Any, x: Array) -> Array:
        q = polar(x)
        return jnp.where(jnp.isfinite(q), jnp.sign(q), jnp.nan)  # sign(±inf) = ±1 would hide a broken gradient

    sign: Any = matrix
    repeats = as_static_integer(alternations)
    if isinstance(repeats, int):
        for i in range(repeats):
            sign = polar_then_sign(i, sign)
    else:
        sign = lax.fori_loop(0, repeats, polar_then_sign, matrix)

    # Counted in integers: float32 sums of ones stop growing at 2²⁴.
    nonzeros = jnp.sum(sign != 0, axis=(-2, -1), keepdims=True, dtype=jnp.int32)
    norm = jnp.sqrt(jnp.maximum(nonzeros, 1).astype(matrix.dtype)) + eps
    gamma = rms_target * (jnp.sqrt(jnp.asarray(matrix.shape[-2] * matrix.shape[-1], matrix.dtype)) / norm)
    return ScaledSigns(jnp.where(jnp.isnan(sign), _NAN, sign).astype(jnp.int8), jnp.asarray(gamma, matrix.dtype))


def muon_direction(
    beta: Scalar = 0.95,
    *,
    nesterov: bool = True,
    ns_steps: Scalar = 5,
    orthogonalizer: str = "auto",
    ns_coeffs: Any = None,
    ns_dtype: DTypeLike | None = None,
    rms_target: Scalar = 0.2,
    mu_dtype: DTypeLike | None = None,
    matrix_specs: Any = None,
    param_shardings: Any = None,
) -> optax.GradientTransformation:
    """Muon's direction on the engine of `scale_by_olion`: orthogonalized momentum without the sign.

    Mₜ = βMₜ₋₁ + (1 - β)gₜ, bias-corrected as in `optax.contrib.scale_by_muon`, then
    D = rms_target √max(d₁, d₂) orthogonalize(G), which has RMS `rms_target` when G has full rank and the
    orthogonalizer is exact.

    Args:
        beta: decay of the momentum, in [0, 1).
        nesterov: mix the gradient into the momentum before orthogonalizing.
        ns_steps: as in `scale_by_olion`.
        orthogonalizer: as in `scale_by_olion`.
        ns_coeffs: as in `scale_by_olion`.
        ns_dtype: as in `scale_by_olion`.
        rms_target: root mean square of the ideal update.
        mu_dtype: as in `scale_by_olion`.
        matrix_specs: as in `scale_by_olion`.
        param_shardings: as in `scale_by_olion`.

    Returns:
        An Optax transformation with state `MuonDirectionState`.

    Raises:
        ValueError: as `scale_by_olion`.

    Example:
        >>> tx = muon_direction(orthogonalizer="svd")
        >>> g = {"w": jnp.array([[2.0, 0.0], [0.0, -5.0]])}
        >>> tx.update(g, tx.init(g))[0]["w"].round(3).tolist()
        [[0.28300002217292786, 0.0], [0.0, -0.28300002217292786]]

    Reference:
        Jordan et al., "Muon", 2024; the RMS factor: "Muon is Scalable for LLM Training", arXiv 2502.16982.
    """
    _check("beta", beta, 0, 1)
    _check("rms_target", rms_target, 0, math.inf, closed=False)
    _check_engine(orthogonalizer, ns_steps, ns_coeffs)

    def mix(g: Array, mu: Array, count: Array) -> tuple[Array, Array]:
        b = at(beta, count, mu.dtype)
        mu = b * mu + (1 - b) * g
        step = (count + 1).astype(mu.dtype)
        if not nesterov:
            return mu, mu / (1 - b**step)
        return mu, b * mu / (1 - b ** (step + 1)) + (1 - b) * g / (1 - b**step)

    def project(matrix: Array, count: Array) -> Array:
        q = orthogonalize(matrix, orthogonalizer, at(ns_steps, count), ns_coeffs, ns_dtype)
        exact = orthogonalizer in ("svd", "identity")
        return q if exact else q.astype(product_dtype(q.dtype, ns_dtype))  # loses nothing, halves what travels

    def finish(q: Array, count: Array) -> Array:
        wide = wide_dtype(q.dtype)
        return at(rms_target, count, wide) * math.sqrt(max(q.shape[-2:])) * q.astype(wide)

    return scale_by_matrix_rule(
        MatrixRule(mix, project, finish), mu_dtype, matrix_specs, param_shardings, MuonDirectionState
    )


def olion(
    learning_rate: Scalar,
    b1: Scalar = 0.95,
    b2: Scalar = 0.98,
    *,
    ns_steps: Scalar = 5,
    orthogonalizer: str = "auto",
    ns_coeffs: Any = None,
    ns_dtype: DTypeLike | None = None,
    rms_target: Scalar = 0.2,
    eps: Scalar = 1e-8,
    mu_dtype: DTypeLike | None = None,
    matrix_specs: Any = None,
    param_shardings: Any = None,
    alternations: Scalar = 1,
    weight_decay: Scalar = 0.1,
    weight_decay_mask: Any = None,
    fallback: optax.GradientTransformation | None = None,
    fallback_learning_rate: Scalar | None = None,
    clip_norm: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    """OLion for the matrices of a model, AdamW for the rest; takes AdamW's learning rates and schedules.

    X ← X - η(D + λX) with the direction D of `scale_by_olion`. Embeddings, output heads, norm scales, biases,
    0-D and 1-D leaves get AdamW(b1=0.9, b2=0.95, eps=1e-8) with the same rate and decay. All arithmetic of
    half-precision leaves, AdamW's included, is in float32; the update is cast to the parameter's dtype at the
    end.

    Composes with `optax.chain`, `optax.masked`, `optax.MultiSteps`, `optax.apply_if_finite`, sharded and
    donated buffers, and `optax.inject_hyperparams` (every number may then be changed without a new trace;
    dtypes given as classes, such as `jnp.float32`, and callable `matrix_specs` or `weight_decay_mask` must be
    named in its `static_args`, because it takes callables for schedules).

    Args:
        learning_rate: η, a number or a schedule.
        b1: as in `scale_by_olion`.
        b2: as in `scale_by_olion`.
        ns_steps: as in `scale_by_olion`.
        orthogonalizer: as in `scale_by_olion`.
        ns_coeffs: as in `scale_by_olion`.
        ns_dtype: as in `scale_by_olion`.
        rms_target: as in `scale_by_olion`.
        eps: as in `scale_by_olion`.
        mu_dtype: as in `scale_by_olion`; matrices only.
        matrix_specs: as in `scale_by_olion`; a leaf with None goes to the fallback. `matrix_spec_table`
            prints the outcome.
        param_shardings: as in `scale_by_olion`.
        alternations: as in `scale_by_olion`.
        weight_decay: λ, multiplied by the scheduled η.
        weight_decay_mask: a tree of booleans like the parameters or a prefix of it, or a callable from
            parameters to one. Default: all matrices, embeddings and heads; no norm scales, biases, 0-D and
            1-D leaves.
        fallback: a complete optimizer (own rate, decay and sign) in the place of AdamW.
        fallback_learning_rate: of the built-in AdamW. Default: `learning_rate`.
        clip_norm: clip the gradients' global norm, over all leaves, first; the paper's recipes use 1.0.

    Returns:
        An Optax transformation; `update` needs the parameters.

    Raises:
        ValueError: as `scale_by_olion`; `fallback_learning_rate` together with `fallback`; `update` without
            params.

    Example:
        >>> tx = optax.chain(optax.clip_by_global_norm(1.0), olion(optax.cosine_decay_schedule(6e-4, 1000)))
        >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
        >>> updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        >>> float(updates["dense"]["kernel"][0, 0] / 6e-4).__round__(3)
        -0.3

    Reference:
        Update rule and grouping of "OLion: Approaching the Hadamard Ideal by Intersecting Spectral and l_inf
        Implicit Biases", arXiv 2602.01105.
    """
    for name, value in (
        ("learning_rate", learning_rate),
        ("weight_decay", weight_decay),
        ("fallback_learning_rate", fallback_learning_rate),
    ):
        _check(name, value, 0, math.inf)
    _check("clip_norm", clip_norm, 0, math.inf, closed=False)
    if fallback is not None and fallback_learning_rate is not None:
        raise ValueError("fallback_learning_rate is for the built-in AdamW; a given fallback has its own rate")
    direction = partial(
        scale_by_olion,
        b1,
        b2,
        ns_steps=ns_steps,
        orthogonalizer=orthogonalizer,
        ns_coeffs=ns_coeffs,
        ns_dtype=ns_dtype,
        rms_target=rms_target,
        eps=eps,
        mu_dtype=mu_dtype,
        alternations=alternations,
    )
    direction()  # checks its arguments now, not at init

    def build(params: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation for these parameters: names are read where the whole tree is visible."""
        specs = resolve_matrix_specs(matrix_specs, params)
        decays = _resolve_mask(weight_decay_mask, params, specs)
        decay = optax.add_decayed_weights(weight_decay, mask=_by_path(decays))
        rate = learning_rate if fallback_learning_rate is None else fallback_learning_rate
        if fallback is None:
            for leaf in tree_leaves(params):
                dtype = jnp.result_type(leaf.value)
                if not jnp.issubdtype(dtype, jnp.inexact):
                    raise ValueError(
                        f"leaf {leaf.path!r} has dtype {dtype}; AdamW needs floating point or complex leaves"
                    )
            adamw = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=weight_decay, mask=_by_path(decays))
            rest = _in_float32(adamw)
        else:
            rest = fallback if clip_norm is None else _in_parameter_dtype(fallback)
        shardings = resolve_shardings(param_shardings, params)
        matrices = optax.chain(
            direction(matrix_specs=_by_path(specs), param_shardings=_by_path(shardings)),
            decay,
            optax.scale_by_learning_rate(learning_rate),
        )
        labels = {parts: "fallback" if spec is None else "matrices" for parts, spec in specs.items()}
        grouped = optax.partition({"matrices": _in_float32(matrices), "fallback": rest}, _by_path(labels))
        return grouped if clip_norm is None else optax.chain(_clip_in_float32(clip_norm), grouped)

    def init(params: Any) -> Any:
        return build(params).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("olion needs the parameters: call update(grads, state, params)")
        return build(params).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(name: str, value: Any, low: int | float, high: int | float, *, closed: bool = True) -> None:
    """Concrete scalars in [low, high), or (low, high) when not closed; None, schedules and tracers pass."""
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    number = float(value)
    if not ((low <= number if closed else low < number) and number < high):
        raise ValueError(f"{name} must be in {'[' if closed else '('}{low}, {high}), got {number}")


def _check_engine(orthogonalizer: str, ns_steps: Any, ns_coeffs: Any) -> None:
    check_orthogonalizer(orthogonalizer, 1 if callable(ns_steps) else ns_steps, ns_coeffs)


def _by_path(values: Mapping[tuple[str, ...], Any]) -> Callable[[Any], Any]:
    """From a tree, of which leaves may be masked, to the tree of the values recorded for its leaves."""

    def lookup(tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [values[leaf.parts] for leaf in tree_leaves(tree)])

    return lookup


def _resolve_mask(
    mask: Any, params: Any, specs: Mapping[tuple[str, ...], MatrixSpec | None]
) -> dict[tuple[str, ...], bool]:
    if mask is None:
        mask = default_weight_decay_mask(params, _by_path(specs))
    if callable(mask):
        mask = mask(params)
    given = {leaf.parts: leaf.value for leaf in tree_leaves(mask)}
    decays = {}
    for parts in specs:
        prefixes = [parts[:length] for length in range(len(parts) + 1) if parts[:length] in given]
        if not prefixes or not isinstance(given[prefixes[0]], bool | jnp.bool_):
            raise ValueError(f"weight_decay_mask must hold a boolean for every leaf, none for {'/'.join(parts)!r}")
        decays[parts] = bool(given[prefixes[0]])
    return decays


def _cast_half(tree: Any) -> Any:
    """float16 and bfloat16 leaves in float32, all others as they are."""

    def cast(x: Any) -> Any:
        return x.astype(wide_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run `inner` with half-precision leaves in float32; its updates get the parameters' dtypes."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(_cast_half(updates), state, _cast_half(params), **extra)
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(_cast_half(params)), update)


def _in_parameter_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Hand gradients that clipping has made float32 to `inner` in the dtypes it was initialised for."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _clip_in_float32(clip_norm: Any) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` that takes, and leaves, half-precision gradients in float32."""
    scheduled = callable(clip_norm)
    clip = (optax.inject_hyperparams if scheduled else (lambda f: f))(optax.clip_by_global_norm)(clip_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return clip.update(_cast_half(updates), state, params)

    return optax.GradientTransformation(clip.init, update)
