"""What to log of OLion and GradientStabilizer while a run goes on, at a cost that does not show.

`olion_diagnostics` looks at every matrix and pays for it with several singular value decompositions each. Here a
call looks at a few matrices of the momentum, others in the next call, with one decomposition each; and everything
about the stabilizer follows from its scalars before and after a step.
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim._arguments import ScalarOrSchedule, check_range, scalar_at
from jaxlib_icml.optim.gradient_stabilizer import StabilizerState, stabilizer_metrics
from jaxlib_icml.optim.matrix_specs import MatrixSpec, resolve_matrix_specs, to_matrices
from jaxlib_icml.optim.olion import ScaleByOlionState
from jaxlib_icml.optim.olion_diagnostics import ratio_or_zero
from jaxlib_icml.optim.orthogonalize import check_orthogonalizer, orthogonalize, truncated_svd, unit_frobenius

__all__ = ["RunMetrics", "find_states", "olion_run_metrics", "stabilizer_run_metrics"]

_State = TypeVar("_State")


class RunMetrics(NamedTuple):
    """Figures to log.

    Attributes:
        summary: name to scalar, float32, over everything that was measured.
        each: name of a matrix or normalised unit to its figures, which have the names of the summary or more.
    """

    summary: dict[str, Array]
    each: dict[str, dict[str, Array]]


def find_states(opt_state: Any, kind: type[_State]) -> list[_State]:
    """All states of one kind, however deep in a chain, partition, mask, accumulator or injection.

    Args:
        opt_state: any Optax state; that of an `nnx.Optimizer` too.
        kind: the NamedTuple to look for, such as `StabilizerState` or `ScaleByOlionState`.

    Returns:
        The states, in the order of the tree.

    Example:
        >>> import optax
        >>> from jaxlib_icml.optim import gradient_stabilizer
        >>> state = optax.chain(gradient_stabilizer(), optax.adam(0.1)).init({"w": jnp.zeros(2)})
        >>> len(find_states(state, StabilizerState)), len(find_states(state, ScaleByOlionState))
        (1, 0)
    """

    def is_kind(x: Any) -> bool:
        return isinstance(x, kind)

    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(x)]


class _Matrix(NamedTuple):
    """One matrix of a leaf: which block of the spec's split, and which matrix of the block's batch."""

    name: str
    leaf: Array
    spec: MatrixSpec
    block: int
    number: int


def olion_run_metrics(
    opt_state: Any,
    params: Any,
    *,
    call: int = 0,
    num_matrices: int = 4,
    matrix_specs: Any = None,
    orthogonalizer: str = "auto",
    ns_steps: Any = 5,
    ns_coeffs: Any = None,
    ns_dtype: Any = None,
) -> RunMetrics:
    """Isotropy, spread and quality of the signs of a few of OLion's matrices, read off its momentum.

    The momentum M stands for the mixed gradient G that the update is made of, of which it is 93% by default. A call
    measures `num_matrices` matrices spread evenly over the model, and the calls 0, 1, 2, ... measure each matrix in
    turn. Call it between steps, every N of them. A matrix costs one thin singular value decomposition and one
    orthogonalization, plus, once per shape, a compilation; the amortised share of the step time is about
    num_matrices · t_svd / (N · t_step), which `python -m experiments bench optimizer_metrics` measures. Nothing is
    waited for: figures are fetched when they are read.

    Args:
        opt_state: state with at least one `ScaleByOlionState` in it.
        params: the parameters (their names and shapes are used).
        call: number of this call, a Python integer, such as `step // N`.
        num_matrices: matrices per call, at least 1; a large number measures all of them.
        matrix_specs: as given to `olion`; so are the arguments below.
        orthogonalizer: the one in use; its signs are compared with the exact polar factor's.
        ns_steps: number of its iterations; no traced value.
        ns_coeffs: its coefficients.
        ns_dtype: dtype of its products.

    Returns:
        `RunMetrics`; the summary holds means over the matrices measured, `each` is keyed by the leaf's path, with
        "[i]" for block i of a split or matrix i of a stack. The figures are those of `olion_diagnostics`:
        `isotropy` e, `spread` ρ, `sign_agreement` and `zero_share`.

    Raises:
        ValueError: no OLion state, specs that do not fit, arguments out of range.

    Example:
        >>> from jaxlib_icml.optim import olion
        >>> params = {"w": jnp.array([[1.0, 1.0], [1.0, -1.0]])}
        >>> tx = olion(0.1)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> {name: round(float(x), 3) for name, x in olion_run_metrics(state, params).summary.items()}
        {'isotropy': 0.0, 'spread': 0.0, 'sign_agreement': 1.0, 'zero_share': 0.0}

    Reference:
        Diagonal isotropy and descent lemma of "OLion: Approaching the Hadamard Ideal by Intersecting Spectral and
        l_inf Implicit Biases", arXiv 2602.01105.
    """
    check_orthogonalizer(orthogonalizer, ns_steps, ns_coeffs)
    if call < 0 or num_matrices < 1:
        raise ValueError(f"call must be at least 0 and num_matrices at least 1, got {call} and {num_matrices}")
    states = find_states(opt_state, ScaleByOlionState)
    if not states:
        raise ValueError("opt_state must contain a ScaleByOlionState, got none")
    specs = resolve_matrix_specs(matrix_specs, params)
    matrices = [matrix for state in states for matrix in _matrices(state.mu, specs)]

    # Neighbours in the list are layers of one stack: every call takes its matrices from all over the model.
    stride = -(-len(matrices) // num_matrices)
    chosen = dict.fromkeys((call + i * stride) % len(matrices) for i in range(min(num_matrices, len(matrices))))
    steps, coeffs = int(ns_steps), _hashable(ns_coeffs)
    each = {}
    for matrix in (matrices[i] for i in chosen):
        g = _take(matrix.leaf, matrix.number, matrix.spec, matrix.block)
        each[matrix.name] = _measure(g, orthogonalizer, steps, coeffs, ns_dtype)
    names = ("isotropy", "spread", "sign_agreement", "zero_share")
    if not each:
        return RunMetrics({}, {})
    return RunMetrics({name: jnp.mean(jnp.stack([x[name] for x in each.values()])) for name in names}, each)


def _matrices(mu: Any, specs: dict[tuple[str, ...], MatrixSpec | None]) -> list[_Matrix]:
    found = []
    for leaf in tree_leaves(mu):
        spec = specs[leaf.parts]
        if spec is None or 0 in leaf.value.shape:
            continue
        batches = _batch_shapes(leaf.value.shape, spec)
        for i, batch in enumerate(batches):
            path = leaf.path if len(batches) == 1 else f"{leaf.path}[{i}]"
            names = [f"{path}[{j}]" for j in range(math.prod(batch))] if batch else [path]
            found += [_Matrix(name, leaf.value, spec, i, j) for j, name in enumerate(names)]
    return found


@lru_cache
def _batch_shapes(shape: tuple[int, ...], spec: MatrixSpec) -> tuple[tuple[int, ...], ...]:
    """The batch axes of every block."""
    blocks = jax.eval_shape(partial(to_matrices, spec=spec), jax.ShapeDtypeStruct(shape, jnp.float32))
    return tuple(block.shape[:-2] for block in blocks)


@partial(jax.jit, static_argnames=("spec", "block"))
def _take(leaf: Float[Array, "..."], index: Any, spec: MatrixSpec, block: int) -> Float[Array, "rows columns"]:
    """One matrix, wide (OLion does not see the orientation, and this way there are fewer shapes to compile for)."""
    matrices = to_matrices(leaf, spec)[block]
    matrix = matrices.reshape(-1, *matrices.shape[-2:])[index]
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _hashable(coeffs: Any) -> Any:
    return None if coeffs is None else tuple(tuple(row) for row in np.atleast_2d(np.asarray(coeffs, float)).tolist())


@partial(jax.jit, static_argnames=("method", "steps", "coeffs", "dtype"))
def _measure(
    g: Float[Array, "rows columns"], method: str, steps: int, coeffs: Any, dtype: Any
) -> dict[str, Float[Array, ""]]:
    """With G = U diag(σ) Vᵀ, Q = UVᵀ, S = sign(Q), α = mean σ and m_k = u_kᵀSv_k over the numerical rank r."""
    g = unit_frobenius(g)
    signs = jnp.sign(orthogonalize(g, method, steps, coeffs, dtype))
    u, sigma, vt, kept = truncated_svd(g)
    q = jnp.matmul(u, vt, precision="highest")
    # Zero rows and columns stay zero; the decomposition leaves rounding errors there, whose signs mean nothing.
    q = q * jnp.any(g != 0, axis=1, keepdims=True) * jnp.any(g != 0, axis=0, keepdims=True)
    exact = jnp.sign(q)
    rank = jnp.maximum(jnp.sum(kept), 1)
    m = jnp.sum(jnp.matmul(u.T, exact, precision="highest") * vt, axis=1)
    q1, alpha = jnp.sum(jnp.abs(q)), jnp.sum(sigma) / rank
    nothing = 0 * jnp.sum(signs)  # NaN where a comparison hides it
    figures = {
        "isotropy": ratio_or_zero(jnp.sqrt(rank) * jnp.linalg.norm(m - kept * (q1 / rank)), q1),
        "spread": ratio_or_zero(jnp.linalg.norm(sigma - kept * alpha), alpha * jnp.sqrt(rank)),
        "sign_agreement": jnp.mean(signs == exact),
        "zero_share": jnp.mean(signs == 0),
    }
    return {name: (value + nothing).astype(jnp.float32) for name, value in figures.items()}


def stabilizer_run_metrics(
    before: Any,
    after: Any,
    gamma1: ScalarOrSchedule = 0.6,
    gamma2: ScalarOrSchedule = 0.999,
    *,
    eps: ScalarOrSchedule = 1e-12,
    bias_correction: bool = True,
    spike_factor: float | int = 5.0,
) -> RunMetrics:
    """Raw and stabilised norms of one step, and which of them spiked, from the states around the step.

    The norm R_t = (m_t - γ1 m_{t-1})/(1 - γ1) follows from the averages (within about 1e-7 m_t), so that no gradient
    is read: the cost is some arithmetic on a few scalars per unit, inside or outside `jit`. In a step that donates
    its state call it inside, or keep `jax.device_get(find_states(opt_state, StabilizerState)[0])` from before.

    Args:
        before: a `StabilizerState`, or any optimizer state with exactly one in it, from before the step.
        after: the same after the step.
        gamma1: as given to `gradient_stabilizer`; so are the three arguments below.
        gamma2: decay of the mean of squared norms.
        eps: guard of the division.
        bias_correction: whether the averages are bias-corrected.
        spike_factor: a norm of this many times the running mean of the norms before it is a spike. With
            `winsorize` it should not be larger: the norm that enters the statistics, and is seen here, is never more
            than `winsorize` times that mean.

    Returns:
        `RunMetrics`. In `each`, per unit (the state's paths; an entry per layer for stacked leaves): `norm` R_t and
        `length` ρ_t of the stabilised gradient, `ratio` ρ_t/R_t, `spike` and `skipped` (0 or 1; norms that are zero
        or not finite are skipped, with zeros for the rest). In the summary: `norm_ratio`, the norm of all stabilised
        gradients together over that of the raw ones; `spikes` and `skipped`, the number of units.

    Raises:
        ValueError: not exactly one state, or states of different shapes; `spike_factor` not above 1.

    Example:
        >>> from jaxlib_icml.optim import gradient_stabilizer
        >>> tx = gradient_stabilizer()
        >>> start = tx.init(jnp.zeros(2))
        >>> _, state = tx.update(jnp.array([3.0, 4.0]), start)
        >>> print(stabilizer_run_metrics(start, state).summary["norm_ratio"].round(3))  # length 1 instead of 5
        0.2

    Reference:
        "GradientStabilizer: Fix the Norm, Not the Gradient", arXiv 2502.17055, Algorithm 1.
    """
    check_range("spike_factor", spike_factor, lambda x: x > 1, "above 1")
    old, new = (_only_state(state, name) for name, state in (("before", before), ("after", after)))
    with_paths = jax.tree_util.tree_flatten_with_path(new.count)[0]
    shapes = [jnp.shape(x) for _, x in with_paths]
    if shapes != [jnp.shape(x) for x in jax.tree.leaves(old.count)]:
        raise ValueError("before and after must be states of the same optimizer, got different shapes")
    if not shapes:
        return RunMetrics({}, {})
    # All units in one vector: a handful of operations, whatever the number of leaves.
    old, new = (StabilizerState(*map(_ravel, state)) for state in (old, new))
    g1 = scalar_at(gamma1, old.count)
    used = new.count > old.count
    norm = jnp.where(used, (new.mean_norm - g1 * old.mean_norm) / (1 - g1), 0)
    length = jnp.where(used, stabilizer_metrics(new, gamma1, gamma2, eps=eps, bias_correction=bias_correction).rho, 0)
    usual = old.mean_norm
    if bias_correction:
        usual = usual / (1 - g1 ** jnp.maximum(old.count, 1))
    # A winsorised norm equals the threshold up to rounding.
    spike = used & (old.count > 0) & (norm >= (1 - 1e-4) * spike_factor * usual)
    figures = {
        "norm": norm,
        "length": length,
        "ratio": length / jnp.where(norm > 0, norm, 1),
        "spike": spike.astype(jnp.float32),
        "skipped": (new.skipped > old.skipped).astype(jnp.float32),
    }
    scale = jnp.where(jnp.max(norm) > 0, jnp.max(norm), 1)  # squares of norms may overflow
    summary = {
        "norm_ratio": jnp.linalg.norm(length) / jnp.maximum(jnp.linalg.norm(norm / scale), 1e-30) / scale,
        "spikes": jnp.sum(figures["spike"]),
        "skipped": jnp.sum(figures["skipped"]),
    }
    each: dict[str, dict[str, Array]] = {}
    start = 0
    for (path, x), shape in zip(with_paths, shapes, strict=True):
        stop = start + jnp.size(x)
        unit = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        each[unit] = {name: vector[start:stop].reshape(shape) for name, vector in figures.items()}
        start = stop
    return RunMetrics(summary, each)


def _only_state(state: Any, name: str) -> StabilizerState:
    found = find_states(state, StabilizerState)
    if len(found) != 1:
        raise ValueError(f"{name} must contain exactly one StabilizerState, got {len(found)}")
    return found[0]


def _ravel(tree: Any) -> Array:
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
