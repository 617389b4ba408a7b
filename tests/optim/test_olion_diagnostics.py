"""The identities and bounds behind OLion, measured on random matrices."""

import doctest
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxlib_icml.optim import MatrixSpec, olion_diagnostics, orthogonalize

diagnose = jax.jit(olion_diagnostics, static_argnames=("matrix_specs", "orthogonalizer", "ns_steps"))


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def in_float64(g, rank=None):
    """(e, ρ, Φ/‖G‖_F, ⟨G, S⟩, α, m, ‖Q‖₁, σ) straight from the definitions."""
    u, sigma, vt = np.linalg.svd(g, full_matrices=False)
    rank = rank or len(sigma)
    u, sigma, vt = u[:, :rank], sigma[:rank], vt[:rank]
    q = u @ vt
    s = np.sign(q)
    m = np.array([u[:, k] @ s @ vt[k] for k in range(rank)])
    q1, alpha = np.abs(q).sum(), sigma.mean()
    e = np.linalg.norm(m - q1 / rank) * np.sqrt(rank) / q1
    rho = np.linalg.norm(sigma - alpha) / (alpha * np.sqrt(rank))
    return e, rho, alpha * q1 * (1 - e * rho) / np.linalg.norm(g), np.sum(g * s), alpha, m, q1, sigma


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.olion_diagnostics"])
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_definitions(shape):
    g = gaussian(shape)
    report = diagnose({"w": jnp.asarray(g, jnp.float32)})["w"]
    e, rho, descent, *_ = in_float64(g)
    np.testing.assert_allclose(report["isotropy"], e, rtol=1e-3)
    np.testing.assert_allclose(report["spread"], rho, rtol=1e-4)
    np.testing.assert_allclose(report["descent"], descent, rtol=1e-3)
    assert report["zero_share"] == 0
    exact = diagnose({"w": jnp.asarray(g, jnp.float32)}, orthogonalizer="svd")["w"]
    assert exact["sign_agreement"] == 1
    q = np.sign(scipy.linalg.polar(g)[0])
    np.testing.assert_allclose(exact["sign_spectral_norm"], np.linalg.norm(q, 2) / np.sqrt(max(shape)), rtol=1e-4)


def test_decomposition_of_the_inner_product():
    # ⟨G, S⟩ = α‖Q‖₁ + Σ(σ_k - α)(m_k - mean m) and Σm_k = ‖Q‖₁, exactly.
    for seed, shape in enumerate([(16, 16), (12, 40), (40, 12)]):
        g = gaussian(shape, seed)
        _, _, _, inner, alpha, m, q1, sigma = in_float64(g)
        np.testing.assert_allclose(m.sum(), q1, rtol=1e-10)
        np.testing.assert_allclose(inner, alpha * q1 + np.sum((sigma - alpha) * (m - m.mean())), rtol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "rank deficient", "ill conditioned", "heavy tails"])
def test_descent_bound_is_never_violated(kind):
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        shape = (50, 12, 20)
        g = rng.standard_normal(shape)
        if kind == "rank deficient":
            g = rng.standard_normal((50, 12, 3)) @ rng.standard_normal((50, 3, 20))
        elif kind == "ill conditioned":
            u, _, vt = np.linalg.svd(g, full_matrices=False)
            g = (u * np.logspace(0, -9, 12)) @ vt
        elif kind == "heavy tails":
            g = rng.standard_cauchy(shape)
        report = diagnose(jnp.asarray(g), orthogonalizer="svd")[""]
        signs = np.sign(jax.jit(orthogonalize, static_argnames="method")(jnp.asarray(g), method="svd"))
        inner = np.sum(g * signs, axis=(1, 2)) / np.linalg.norm(g, axis=(1, 2))
        assert np.all(np.asarray(report["descent"]) <= inner * (1 + 1e-9) + 1e-12)
        assert np.all(np.asarray(report["isotropy"]) >= 0)
        if kind == "rank deficient":
            wanted = [in_float64(matrix, rank=3)[0] for matrix in g]
            np.testing.assert_allclose(report["isotropy"], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "draws", "tolerance"),
    [
        ((256, 64), 8, 0.015),
        ((64, 64), 40, 0.02),
        pytest.param((512, 512), 2, 0.015, marks=pytest.mark.slow),
    ],
)
def test_random_singular_vectors(shape, draws, tolerance):
    g = jnp.asarray(gaussian((draws, *shape), 11), jnp.float32)
    report = diagnose(g, orthogonalizer="svd")[""]
    rank = min(shape)
    scale = np.sqrt(rank / (shape[0] * shape[1]))
    assert np.all((np.asarray(report["isotropy"]) > 0.5 * scale) & (np.asarray(report["isotropy"]) < scale))
    for matrix in np.asarray(g):
        q1 = np.abs(scipy.linalg.polar(matrix)[0]).sum()
        assert abs(q1 / np.sqrt(rank * shape[0] * shape[1]) / np.sqrt(2 / np.pi) - 1) < tolerance


def test_newton_schulz_signs_agree_with_the_polar_factor_for_gaussian_matrices():
    report = diagnose(jnp.asarray(gaussian((4, 128, 128)), jnp.float32))[""]
    assert np.all((np.asarray(report["sign_agreement"]) > 0.91) & (np.asarray(report["sign_agreement"]) < 0.96))


def test_hadamard_matrix_is_ideal():
    report = diagnose(jnp.asarray(scipy.linalg.hadamard(16), jnp.float32))[""]
    for name, wanted in {"isotropy": 0, "spread": 0, "sign_spectral_norm": 1, "sign_agreement": 1}.items():
        np.testing.assert_allclose(report[name], wanted, atol=1e-5)
    np.testing.assert_allclose(report["descent"], 16, rtol=1e-5)  # ⟨G, S⟩/‖G‖_F = 256/16


@pytest.mark.slow
def test_blocks_zeros_and_nan():
    g = gaussian((6, 12)).astype(np.float32)
    g[2] = 0
    stack = jnp.stack([jnp.asarray(g), jnp.zeros((6, 12)), jnp.full((6, 12), jnp.nan)])
    report = olion_diagnostics({"w": stack, "bias": jnp.ones(3)}, {"w": MatrixSpec(1, 2, (8, 4)), "bias": None})
    assert set(report) == {"w[0]", "w[1]"}
    for values in report.values():
        np.testing.assert_allclose(values["zero_share"][:2], [1 / 6, 1], rtol=1e-6)
        assert values["sign_agreement"][1] == 1
        for value in values.values():
            assert np.isfinite(value[:2]).all()
            assert np.isnan(value[2])


def test_bad_settings():
    with pytest.raises(ValueError, match="orthogonalizer must be one of"):
        olion_diagnostics(jnp.eye(3), orthogonalizer="qr")
    with pytest.raises(ValueError, match="no spec for"):
        olion_diagnostics({"w": jnp.eye(3)}, {})
