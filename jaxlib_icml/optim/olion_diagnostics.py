"""Does OLion's theory describe this run? Isotropy, signal, and how good the cheap iteration's signs are."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim.matrix_specs import resolve_matrix_specs, to_matrices
from jaxlib_icml.optim.orthogonalize import (
    check_orthogonalizer,
    orthogonalize,
    svd_polar_factor,
    truncated_svd,
    unit_frobenius,
)

__all__ = ["olion_diagnostics"]


def olion_diagnostics(
    grads_or_mu: Any,
    matrix_specs: Any = None,
    *,
    orthogonalizer: str = "auto",
    ns_steps: Any = 5,
    ns_coeffs: Any = None,
    ns_dtype: Any = None,
) -> dict[str, dict[str, Array]]:
    """Measure, for every matrix, the quantities of OLion's descent lemma and the quality of the signs in use.

    With G = U diag(σ) Vᵀ of rank r, Q = UVᵀ, S = sign(Q), α = mean σ and m_k = u_kᵀSv_k (so that
    Σm_k = ‖Q‖₁): ⟨G, S⟩ >= Φ = α‖Q‖₁(1 - eρ). Costs two singular value decompositions per matrix: call it now
    and then, inside or outside `jit`.

    Args:
        grads_or_mu: gradients, or the momentum in an optimizer state; `None` and masked leaves are skipped.
        matrix_specs: as in `scale_by_olion`.
        orthogonalizer: the one in use; its signs are compared with the exact polar factor's.
        ns_steps: as in `scale_by_olion`.
        ns_coeffs: as in `scale_by_olion`.
        ns_dtype: as in `scale_by_olion`.

    Returns:
        From a leaf's path (with "[i]" for block i of a split) to arrays over its batch axes:

        * `isotropy`: e = √r ‖m - ‖Q‖₁/r‖₂ / ‖Q‖₁, small when the singular vectors look random;
        * `spread`: ρ = ‖σ - α‖₂ / (α√r);
        * `descent`: Φ / ‖G‖_F, negative when the lemma promises nothing;
        * `sign_spectral_norm`: ‖S'‖₂ / √max(d₁, d₂) of the signs S' in use, at least 1 without zeros;
        * `sign_agreement`: the share of entries where S' = S;
        * `zero_share`: that of zeros in S'.

        A zero matrix gives zeros, and one for both shares; a matrix with NaN gives NaN.

    Raises:
        ValueError: specs that do not fit, settings of the orthogonalizer out of range.

    Example:
        >>> report = olion_diagnostics({"w": jnp.array([[1.0, 1.0], [1.0, -1.0]])})
        >>> {name: round(float(value), 3) for name, value in report["w"].items() if name != "descent"}
        {'isotropy': 0.0, 'spread': 0.0, 'sign_spectral_norm': 1.0, 'sign_agreement': 1.0, 'zero_share': 0.0}

    Reference:
        Diagonal isotropy and descent lemma of "OLion: Approaching the Hadamard Ideal by Intersecting Spectral
        and l_inf Implicit Biases", arXiv 2602.01105.
    """
    check_orthogonalizer(orthogonalizer, ns_steps, ns_coeffs)
    specs = resolve_matrix_specs(matrix_specs, grads_or_mu)
    report = {}
    for leaf in tree_leaves(grads_or_mu):
        spec = specs[leaf.parts]
        if spec is None:
            continue
        blocks = to_matrices(leaf.value.astype(jnp.promote_types(leaf.value.dtype, jnp.float32)), spec)
        for i, block in enumerate(blocks):
            used = jnp.sign(orthogonalize(block, orthogonalizer, ns_steps, ns_coeffs, ns_dtype))
            name = leaf.path if len(blocks) == 1 else f"{leaf.path}[{i}]"
            report[name] = _diagnose(block, used)
    return report


def _diagnose(g: Float[Array, "*batch d1 d2"], used: Float[Array, "*batch d1 d2"]) -> dict[str, Array]:
    g = unit_frobenius(g)  # every quantity below is invariant to the scale of G
    u, sigma, vt, kept = truncated_svd(g)
    q = svd_polar_factor(g)
    s = jnp.sign(q)
    m = jnp.einsum("...ik,...ij,...kj->...k", u, s, vt, precision="highest")
    rank = jnp.maximum(jnp.sum(kept, axis=-1), 1)
    q1 = jnp.sum(jnp.abs(q), axis=(-2, -1))
    alpha = jnp.sum(sigma, axis=-1) / rank
    isotropy = ratio_or_zero(jnp.sqrt(rank) * _norm(m - kept * (q1 / rank)[..., None]), q1)
    spread = ratio_or_zero(_norm(sigma - kept * alpha[..., None]), alpha * jnp.sqrt(rank))
    top = jnp.linalg.svd(used, compute_uv=False)[..., 0]
    return {
        "isotropy": isotropy,
        "spread": spread,
        "descent": ratio_or_zero(alpha * q1 * (1 - isotropy * spread), _norm(sigma)),
        "sign_spectral_norm": top / max(g.shape[-2:]) ** 0.5,
        # The products with zero let NaN through, which compares unequal to everything.
        "sign_agreement": jnp.mean((used == s) + 0 * used, axis=(-2, -1)),
        "zero_share": jnp.mean((used == 0) + 0 * used, axis=(-2, -1)),
    }


def _norm(x: Float[Array, "*batch k"]) -> Float[Array, "*batch"]:
    return jnp.sqrt(jnp.sum(x * x, axis=-1))


def ratio_or_zero(x: Float[Array, "*batch"], y: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """x / y; where y is zero, x, which is zero there too."""
    return x / jnp.where(y == 0, 1, y)
