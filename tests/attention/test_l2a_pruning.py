"""Which layers go, what their caches weigh, and who read far back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.attention import (
    Span,
    cache_slots,
    init_cache,
    kv_cache_bytes,
    prune_layers,
    usage_report,
)

usages = st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.021, 0.3, 1.0]), min_size=1, max_size=12)


@given(usages, st.sampled_from([0.0, 0.02, 1.0]), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_the_least_used_layers_go_and_never_more_than_allowed(usage, eps, max_drop):
    pruned = prune_layers(usage, eps, max_drop)
    gone = [u for u, drop in zip(usage, pruned, strict=True) if drop]
    stay = [u for u, drop in zip(usage, pruned, strict=True) if not drop]
    assert len(gone) == min(sum(u <= eps for u in usage), int(max_drop * len(usage)))
    assert all(u <= eps for u in gone)
    assert not gone or not stay or max(gone) <= min(stay)


def test_half_of_the_layers_stay_by_default():
    # Check 8.
    assert prune_layers([0.0] * 7) == (True,) * 3 + (False,) * 4
    assert prune_layers(jnp.array([0.02, 0.0201])) == (True, False)


@given(
    st.lists(st.booleans(), max_size=6),
    *(st.integers(1, n) for n in (500, 64, 8, 128)),
    st.sampled_from([("float32", 4), ("bfloat16", 2), ("int8", 1)]),
)
def test_bytes_are_those_of_the_formula(pruned, seq, window, kv_heads, head_dim, dtype):
    # Check 8.
    slots = sum(min(window, seq) if drop else seq for drop in pruned)
    found = kv_cache_bytes(pruned, seq, window=window, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype[0])
    assert found == slots * 2 * kv_heads * head_dim * dtype[1]


def test_bytes_are_those_of_the_arrays():
    options = {"window": 16, "sinks": 4}
    found = kv_cache_bytes((False, True), 100, kv_heads=2, head_dim=8, dtype="bfloat16", **options)
    caches = [init_cache(1, cache_slots(100, pruned=drop, **options), 2, 8, "bfloat16") for drop in (False, True)]
    assert found == sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_usage_is_counted_per_layer_token_document_and_span(seed, segmented):
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 2, 20)) < 0.3
    segments = (
        np.repeat(rng.permuted(np.arange(5))[None], 2, 0).repeat(4, axis=1) if segmented else np.ones((2, 20), int)
    )
    report = usage_report(mask, segment_ids=jnp.asarray(segments) if segmented else None, top=1000)
    counted = segments != 0
    np.testing.assert_allclose(report.layers, (mask & counted).sum((1, 2)) / counted.sum())
    np.testing.assert_allclose(report.tokens, np.where(counted, mask.mean(0), 0))
    assert [(d.row, d.segment) for d in report.documents] == [
        (row, segment) for row in range(2) for segment in dict.fromkeys(segments[row].tolist()) if segment
    ]
    for d in report.documents:
        assert set(segments[d.row, d.start : d.stop].tolist()) == {d.segment}
        np.testing.assert_allclose(d.layers, mask[:, d.row, d.start : d.stop].mean(1))
    # Spans are disjoint, hold all reads, and end at unread tokens or at the borders of documents.
    covered = np.zeros((2, 20), int)
    for span in report.spans:
        covered[span.row, span.start : span.stop] += 1
        assert span.reads == mask[:, span.row, span.start : span.stop].sum()
    np.testing.assert_array_equal(covered, (mask.any(0) & counted).astype(int))
    assert sum(span.reads for span in report.spans) == (mask & counted).sum()
    assert [span.reads for span in report.spans] == sorted((span.reads for span in report.spans), reverse=True)
    for one in report.spans:
        for other in report.spans:
            adjacent = one.row == other.row and one.stop == other.start
            assert not adjacent or segments[one.row, one.stop - 1] != segments[other.row, other.start]


def test_only_the_busiest_spans_are_listed():
    mask = jnp.zeros((2, 1, 9), bool).at[:, 0, 1:3].set(True).at[0, 0, 5:7].set(True).at[0, 0, 8].set(True)
    assert usage_report(mask, top=2).spans == (Span(0, 1, 3, 4), Span(0, 5, 7, 2))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: prune_layers([0.1, 1.1]), "usage"),
        (lambda: prune_layers([float("nan")]), "usage"),
        (lambda: prune_layers(np.array([[0.1]])), "usage"),
        (lambda: prune_layers([0.1], eps=-1.0), "eps"),
        (lambda: prune_layers([0.1], max_drop=1.1), "max_drop"),
        (lambda: kv_cache_bytes([True], 0, window=1, kv_heads=1, head_dim=1), "seq"),
        (lambda: kv_cache_bytes([True], 1, window=0, kv_heads=1, head_dim=1), "window"),
        (lambda: kv_cache_bytes([True], 1, window=1, kv_heads=1, head_dim=1, sinks=-1), "sinks"),
        (lambda: usage_report(np.ones((1, 1, 3))), "mask"),
        (lambda: usage_report(np.ones((1, 3), bool)), "mask"),
        (lambda: usage_report(np.ones((1, 1, 3), bool), segment_ids=np.ones((1, 2), int)), "segment_ids"),
        (lambda: usage_report(np.ones((1, 1, 3), bool), top=-1), "top"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
