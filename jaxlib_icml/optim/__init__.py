"""Optimizers and gradient transformations.

Imported eagerly, so that `jaxlib_icml.optim.olion` is the function and not the module of the same name.
"""

from jaxlib_icml.optim.clipping import SpamState, ZClipState, agc, scale_by_spam, value_clip, zclip
from jaxlib_icml.optim.gradient_stabilizer import (
    StabilizerMetrics,
    StabilizerState,
    gradient_stabilizer,
    recovery_steps,
    stabilizer_bound,
    stabilizer_metrics,
)
from jaxlib_icml.optim.matrix_specs import (
    MatrixSpec,
    default_matrix_specs,
    default_weight_decay_mask,
    from_matrices,
    matrix_spec_table,
    resolve_matrix_specs,
    to_matrices,
)
from jaxlib_icml.optim.olion import (
    MuonDirectionState,
    ScaleByOlionState,
    muon_direction,
    olion,
    scale_by_olion,
)
from jaxlib_icml.optim.olion_diagnostics import olion_diagnostics
from jaxlib_icml.optim.orthogonalize import (
    NEWTON_SCHULZ_COEFFS,
    ORTHOGONALIZERS,
    POLAR_EXPRESS_COEFFS,
    orthogonalize,
)
from jaxlib_icml.optim.run_diagnostics import (
    RunMetrics,
    find_states,
    olion_run_metrics,
    stabilizer_run_metrics,
)

__all__ = [
    "NEWTON_SCHULZ_COEFFS",
    "ORTHOGONALIZERS",
    "POLAR_EXPRESS_COEFFS",
    "MatrixSpec",
    "MuonDirectionState",
    "RunMetrics",
    "ScaleByOlionState",
    "SpamState",
    "StabilizerMetrics",
    "StabilizerState",
    "ZClipState",
    "agc",
    "default_matrix_specs",
    "default_weight_decay_mask",
    "find_states",
    "from_matrices",
    "gradient_stabilizer",
    "matrix_spec_table",
    "muon_direction",
    "olion",
    "olion_diagnostics",
    "olion_run_metrics",
    "orthogonalize",
    "recovery_steps",
    "resolve_matrix_specs",
    "scale_by_olion",
    "scale_by_spam",
    "stabilizer_bound",
    "stabilizer_metrics",
    "stabilizer_run_metrics",
    "to_matrices",
    "value_clip",
    "zclip",
]
