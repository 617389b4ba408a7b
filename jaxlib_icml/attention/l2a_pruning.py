"""After training with L2A: who reads far back, which layers can do without, and what that saves.

"Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484). Everything here runs on
the host.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxlib_icml.attention.l2a_cache import cache_slots

__all__ = ["DocumentUsage", "Span", "UsageReport", "kv_cache_bytes", "prune_layers", "usage_report"]


def prune_layers(
    usage: Array | np.ndarray | Sequence[float], eps: float = 0.02, max_drop: float = 0.5
) -> tuple[bool, ...]:
    """The layers that become plain sliding-window attention: the least used ones.

    Usage is all that is looked at: a layer that few tokens use may be the one that a task rests on. Measure the pruned
    model.

    Args:
      usage: u_l, for every layer the mean of its routing mask over a calibration set.
      eps: Layers with u_l ≤ eps may go.
      max_drop: Largest fraction of all layers that go.

    Returns:
      For every layer whether it is pruned; of equally used ones the first go first.

    Raises:
      ValueError: usages or numbers out of [0, 1].

    >>> prune_layers([0.5, 0.0, 0.01, 0.015])
    (False, True, True, False)
    """
    usage = np.asarray(usage, np.float64)
    if usage.ndim != 1 or not ((usage >= 0) & (usage <= 1)).all():
        raise ValueError(f"usage must be one number between 0 and 1 per layer, got {usage}")
    for name, value in (("eps", eps), ("max_drop", max_drop)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    most = math.floor(max_drop * len(usage) + 1e-9)
    chosen = {int(layer) for layer in np.argsort(usage, kind="stable")[:most] if usage[layer] <= eps}
    return tuple(layer in chosen for layer in range(len(usage)))


def kv_cache_bytes(
    pruned: Sequence[bool],
    seq: int,
    *,
    window: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.bfloat16,
    sinks: int = 0,
) -> int:
    """Bytes of the keys and values of one sequence: Σ_l (w if pruned else T) · 2 G d · bytes of a number.

    Args:
      pruned: One entry per layer, as from `prune_layers`.
      seq: T, tokens.
      window: w; a shorter sequence needs no more than T.
      kv_heads: G.
      head_dim: d.
      dtype: Of keys and values.
      sinks: First positions that a pruned layer keeps too.

    Returns:
      Bytes.

    Raises:
      ValueError: a size below 1.

    >>> kv_cache_bytes([False, True], 1000, window=100, kv_heads=2, head_dim=8, dtype="float32")
    140800
    """
    for name, value in (("seq", seq), ("window", window), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sinks < 0:
        raise ValueError(f"sinks must be at least 0, got {sinks}")
    slots = sum(cache_slots(seq, window, pruned=bool(drop), sinks=sinks) for drop in pruned)
    return slots * 2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize


class DocumentUsage(NamedTuple):
    """One document of a batch.

    Attributes:
      row: Its row of the batch.
      start: Its first position.
      stop: The position behind its last one.
      segment: Its segment id, 1 where there are none.
      layers: (layers,) fraction of its tokens that each layer routed.
    """

    row: int
    start: int
    stop: int
    segment: int
    layers: np.ndarray


class Span(NamedTuple):
    """Consecutive tokens of a document, each of them routed by some layer.

    Attributes:
      row: Row of the batch.
      start: First position.
      stop: The position behind the last one.
      reads: Routed tokens in it, summed over layers.
    """

    row: int
    start: int
    stop: int
    reads: int


class UsageReport(NamedTuple):
    """Who read far back.

    Attributes:
      layers: (layers,) u_l, fraction of tokens that each layer routed.
      tokens: (batch, seq) fraction of layers that routed each token; 0 for padding.
      documents: In order.
      spans: Those with the most reads, most first.
    """

    layers: np.ndarray
    tokens: np.ndarray
    documents: tuple[DocumentUsage, ...]
    spans: tuple[Span, ...]


def usage_report(
    mask: Array | np.ndarray, *, segment_ids: Array | np.ndarray | None = None, top: int = 10
) -> UsageReport:
    """How much each layer, document and token used global attention, and which spans triggered it.

    Args:
      mask: (layers, batch, seq) boolean, the routing masks of all layers.
      segment_ids: (batch, seq) documents of packed rows; 0 is padding and not counted.
      top: Most spans that are listed.

    Returns:
      The report.

    Raises:
      ValueError: shapes or dtypes that do not fit.

    >>> report = usage_report(jnp.array([[[True, True, False, True]], [[False, True, False, False]]]))
    >>> report.layers.tolist(), report.spans[0]
    ([0.75, 0.25], Span(row=0, start=0, stop=2, reads=3))
    """
    routed: np.ndarray = np.asarray(mask)
    if routed.ndim != 3 or routed.dtype != np.bool_ or 0 in routed.shape:
        raise ValueError(
            f"mask must be a boolean (layers, batch, seq) array, got {routed.dtype} of shape {routed.shape}"
        )
    segments: np.ndarray = np.ones(routed.shape[1:], np.int64) if segment_ids is None else np.asarray(segment_ids)
    if segments.shape != routed.shape[1:] or not np.issubdtype(segments.dtype, np.integer):
        raise ValueError(f"segment_ids must be integers of shape {routed.shape[1:]}, got {segments.shape}")
    if top < 0:
        raise ValueError(f"top must be at least 0, got {top}")
    routed = routed & (segments != 0)
    reads = routed.sum(axis=0)
    documents, spans = [], []
    for row, ids in enumerate(segments):
        for start, stop in _runs(ids):
            if ids[start] == 0:
                continue
            documents.append(DocumentUsage(row, start, stop, int(ids[start]), routed[:, row, start:stop].mean(axis=1)))
            spans += [
                Span(row, start + first, start + last, int(reads[row, start + first : start + last].sum()))
                for first, last in _runs(reads[row, start:stop] > 0)
                if reads[row, start + first]
            ]
    spans.sort(key=lambda span: (-span.reads, span.row, span.start))
    counted = max(int((segments != 0).sum()), 1)
    return UsageReport(routed.sum(axis=(1, 2)) / counted, reads / len(routed), tuple(documents), tuple(spans[:top]))


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of the runs of equal values."""
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(itertools.pairwise(borders))
