"""L2A in NumPy's float64: dense masked softmax with its gradient written out, combined as the paper's formulas read."""

import jax
import numpy as np


def random_inputs(batch, seq, heads, kv_heads, dim, seed=0, dtype="float32"):
    """q, k, v."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (heads, kv_heads, kv_heads)
    return tuple(jax.random.normal(key, (batch, seq, n, dim)).astype(dtype) for key, n in zip(keys, sizes, strict=True))


def visible(mask, window, *, sinks=0, segment_ids=None):
    """(batch, seq, seq): what row t sees, everything before it where `mask`, else its window and sinks."""
    mask = np.asarray(mask)
    batch, seq = mask.shape
    seen = np.zeros((batch, seq, seq), bool)
    segments = np.ones((batch, seq), int) if segment_ids is None else np.asarray(segment_ids)
    for b in range(batch):
        for t in range(seq):
            if t == 0 or segments[b, t] != segments[b, t - 1]:
                start = t
            if segments[b, t] == 0:
                continue
            first = start if mask[b, t] else max(start, t - window + 1)
            seen[b, t, first : t + 1] = True
            seen[b, t, start : min(start + sinks, t + 1)] = True
    return seen


def dense(q, k, v, seen):
    """Output of a masked softmax, and the function from its cotangent to (dq, dk, dv); rows that see nothing are 0."""
    q, k, v = (np.asarray(x.astype("float32"), np.float64) for x in (q, k, v))
    group, kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    keys, values = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = q.shape[-1] ** -0.5
    scores = scale * np.einsum("bthd,bshd->bhts", q, keys, optimize=True)
    scores = np.where(seen[:, None], scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhts,bshd->bthd", weights, values, optimize=True)

    def pull(cotangent):
        c = np.asarray(cotangent, np.float64)
        dweights = np.einsum("bthd,bshd->bhts", c, values, optimize=True)
        dscores = scale * weights * (dweights - (weights * dweights).sum(-1, keepdims=True))

        def grouped(x):
            return x.reshape(*x.shape[:2], kv_heads, group, x.shape[3]).sum(3)

        return (
            np.einsum("bhts,bshd->bthd", dscores, keys, optimize=True),
            grouped(np.einsum("bhts,bthd->bshd", dscores, q, optimize=True)),
            grouped(np.einsum("bhts,bthd->bshd", weights, c, optimize=True)),
        )

    return out, pull


def l2a(q, k, v, mask, logits, *, window, combine="replace", estimator="st", sinks=0, segment_ids=None):
    """Output for tokens routed as `mask` (after dropping), and the function to (dq, dk, dv, dlogits)."""
    options = {"sinks": sinks, "segment_ids": segment_ids}
    m = np.asarray(mask, np.float64)
    if segment_ids is not None:
        m = m * (np.asarray(segment_ids) != 0)
    p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    local, pull_local = dense(q, k, v, visible(np.zeros(mask.shape, bool), window, **options))
    wide, pull_wide = dense(q, k, v, visible(np.ones(mask.shape, bool), window, segment_ids=segment_ids))
    gate = (m if estimator == "st" else m * p)[:, :, None, None]
    other = wide - local if combine == "replace" else wide

    def pull(cotangent):
        c = np.asarray(cotangent, np.float64)
        parts = (pull_local(c * (1 - gate) if combine == "replace" else c), pull_wide(c * gate))
        return *(a + b for a, b in zip(*parts, strict=True)), m * p * (1 - p) * (c * other).sum((2, 3))

    return local + gate * other, pull
