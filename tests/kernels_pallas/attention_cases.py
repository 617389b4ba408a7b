"""What the tests of the attention operations share: inputs, float64 formulas, and how results are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("out", "dq", "dk", "dv")


def make_inputs(rows, seq, heads, kv_heads, dim, *, batch=1, seed=0, dtype=jnp.float32):
    """Query, key, value and the output's cotangent."""
    rng = np.random.default_rng(seed)
    shapes = ((rows, heads), (seq, kv_heads), (seq, kv_heads), (rows, heads))
    return tuple(jnp.asarray(rng.normal(size=(batch, *shape, dim)).astype(np.float32), dtype) for shape in shapes)


def random_segments(batch, seq, seed=0, kinds=4):
    """Packed rows: contiguous runs of ids, one of them 0 (padding)."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.sort(rng.integers(0, kinds, (batch, seq)), axis=1)[:, ::-1].copy(), jnp.int32)


def random_rows(batch, seq, count, seed=0):
    """Ascending positions, as many as each row of the batch happens to get, filled up with `seq`."""
    rng = np.random.default_rng(seed)
    idx = np.full((batch, count), seq, np.int32)
    for row in idx:
        number = int(rng.integers(0, min(count, seq) + 1))
        row[:number] = np.sort(rng.choice(seq, number, replace=False))
    return jnp.asarray(idx)


def window_visible(positions, seq, window, sinks=0, segment_ids=None):
    """(batch, rows, seq) Booleans: which keys a sliding window with sinks shows to rows at `positions`."""
    positions = np.asarray(positions)
    visible = np.zeros((*positions.shape, seq), bool)
    for b, places in enumerate(positions):
        ids = None if segment_ids is None else np.asarray(segment_ids[b])
        for i, t in enumerate(places):
            begin = 0
            if ids is not None:
                changes = np.flatnonzero(np.diff(ids[: t + 1])) + 1
                begin = int(changes[-1]) if len(changes) else 0
            visible[b, i, max(0, t - window + 1) : t + 1] = True
            visible[b, i, begin : min(begin + sinks, t + 1)] = True
    return _within_segments(visible, positions, segment_ids)


def causal_visible(positions, seq, segment_ids=None):
    """(batch, rows, seq) Booleans: everything up to each row's position; nothing for positions at `seq`."""
    positions = np.asarray(positions)
    visible = (np.arange(seq) <= positions[..., None]) & (positions[..., None] < seq)
    return _within_segments(visible, positions, segment_ids)


def _within_segments(visible, positions, segment_ids):
    if segment_ids is None:
        return visible
    ids = np.asarray(segment_ids)
    of_rows = np.take_along_axis(ids, np.minimum(positions, ids.shape[1] - 1), axis=1)[..., None]
    return visible & (ids[:, None, :] == of_rows) & (of_rows != 0)


def formulas(q, k, v, g, visible, scale=None):
    """Output and gradients in float64: dv = Pᵀ g, dS = P (g vᵀ - rowsum(g out)), dq = dS k, dk = dSᵀ q."""
    q, k, v, g = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, g))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        q_h, k_h, v_h, g_h = q[b, :, h], k[b, :, h // group], v[b, :, h // group], g[b, :, h]
        scores = np.where(visible[b], scale * q_h @ k_h.T, -np.inf)
        some = visible[b].any(axis=1, keepdims=True)
        largest = np.where(some, scores.max(axis=1, keepdims=True), 0.0)
        p = np.exp(scores - largest)
        p = np.where(some, p / np.where(some, p.sum(axis=1, keepdims=True), 1.0), 0.0)
        out[b, :, h] = p @ v_h
        ds = p * (g_h @ v_h.T - (g_h * out[b, :, h]).sum(axis=1, keepdims=True))
        dq[b, :, h] = scale * ds @ k_h
        dk[b, :, h // group] += scale * ds.T @ q_h
        dv[b, :, h // group] += p.T @ g_h
    return out, dq, dk, dv


def value_and_grads(operation, *, jit=True):
    """`operation(q, k, v)` -> a function (q, k, v, g) -> out, dq, dk, dv."""

    def run(q, k, v, g):
        out, pull_back = jax.vjp(operation, q, k, v)
        return out, *pull_back(g)

    return jax.jit(run) if jit else run


def assert_matches(got, want, value_tolerance=1e-5, grad_tolerance=2e-5):
    """Errors relative to the largest entry of each array."""
    for name, a, b, tolerance in zip(NAMES, got, want, (value_tolerance, *[grad_tolerance] * 3), strict=True):
        a = np.asarray(a.astype(jnp.float32), np.float64)
        assert np.isfinite(a).all(), name
        error = np.abs(a - b).max() / max(np.abs(b).max(), 0.05)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def partial(operation, *args, **kwargs):
    """`operation` of query, key and value only."""
    return functools.partial(lambda q, k, v: operation(q, k, v, *args, **kwargs))
