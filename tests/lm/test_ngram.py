"""The n-gram model against a dictionary implementation, and against entropies known in closed form."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.lm import ngram
from jaxlib_icml.lm.ngram import WittenBellNGram


def dictionary_model(documents, order):
    """p(byte | context) by the recursion of Witten and Bell, with counts in dictionaries."""
    followers = defaultdict(Counter)
    for text in documents:
        for end in range(len(text)):
            for length in range(min(order - 1, end) + 1):
                followers[text[end - length : end]][text[end]] += 1

    def probability(byte, context):
        lower = probability(byte, context[1:]) if context else 1 / 256
        seen = followers.get(context)
        if not seen:
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    return lambda byte, history: probability(byte, history[max(0, len(history) - order + 1) :])


texts = st.lists(st.one_of(st.binary(max_size=12), st.text("ab\0", max_size=30).map(str.encode)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(train=texts, held_out=texts, order=st.integers(1, 8), block=st.integers(1, 9))
def test_matches_the_dictionary_model(train, held_out, order, block):
    train, held_out = [*train, b"abba"], [*held_out, b"abab"]
    reference = dictionary_model(train, order)
    model = WittenBellNGram.fit(train, order)
    expected = [[math.log2(reference(byte, text[:i])) for i, byte in enumerate(text)] for text in held_out]
    with pytest.MonkeyPatch.context() as patch:  # many blocks even for short texts
        patch.setattr(ngram, "_BLOCK", block)
        for text, row in zip(held_out, expected, strict=True):
            np.testing.assert_allclose(model.log2_probabilities(text), row, rtol=1e-12, atol=1e-12)
        mean = -sum(map(sum, expected)) / sum(map(len, held_out))
        assert model.bits_per_byte(held_out) == pytest.approx(mean, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(train=texts, context=st.one_of(st.binary(max_size=9), st.text("ab", max_size=9).map(str.encode)))
def test_distributions_sum_to_one_and_are_those_scored(train, context):
    model = WittenBellNGram.fit([*train, b"ab"], 4)
    probabilities = model.next_byte_probabilities(context)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert (probabilities > 0).all()
    for byte in (0, 97, 98, 255):
        scored = model.log2_probabilities(context + bytes([byte]))[-1]
        assert scored == pytest.approx(math.log2(probabilities[byte]), rel=1e-12)


def test_counts_do_not_cross_documents():
    # "b" never follows "a" inside a document, so the bigram model must leave p(b | a) to the lower orders.
    apart = WittenBellNGram.fit([b"xa", b"bx"] * 50, 2)
    joined = WittenBellNGram.fit([b"xabx" * 50], 2)
    unigram = apart.next_byte_probabilities(b"")[ord("b")]
    assert apart.next_byte_probabilities(b"a")[ord("b")] == pytest.approx(unigram, rel=1e-12)
    assert joined.next_byte_probabilities(b"a")[ord("b")] > 0.9


def test_rate_approaches_the_entropy_of_the_source():
    """A Markov chain of order 2 on two bytes: p(next = oldest) = 0.9, so H = h(0.9) = 0.469 bits."""
    generator = np.random.default_rng(0)
    flips = generator.random(200_000) < 0.1
    bits = np.zeros(flips.size, np.uint8)
    for i in range(2, bits.size):
        bits[i] = bits[i - 2] ^ flips[i]
    text = bits.tobytes()
    train, held_out = text[:150_000], text[150_000:]
    entropy = -(0.9 * math.log2(0.9) + 0.1 * math.log2(0.1))
    sampling = 4 * math.log2(9) * math.sqrt(0.09 / len(held_out))  # four standard errors of the mean
    assert WittenBellNGram.fit([train], 3).bits_per_byte([held_out]) == pytest.approx(entropy, abs=sampling)
    # One byte of context says nothing about the next byte of this chain.
    assert WittenBellNGram.fit([train], 2).bits_per_byte([held_out]) == pytest.approx(1.0, abs=0.01)


def test_unseen_bytes_cost_little_more_than_the_smoothing_allows():
    # p_1(z) = T p_0 / (c + T) with c = 1000 a's and T = 1: exactly 1 / (256 * 1001).
    model = WittenBellNGram.fit([b"a" * 1000], 1)
    assert model.log2_probabilities(b"z")[0] == pytest.approx(-math.log2(256 * 1001), rel=1e-12)


def test_documents_shorter_than_the_order():
    model = WittenBellNGram.fit([b"a", b"", b"ab"], 7)
    reference = dictionary_model([b"a", b"", b"ab"], 7)
    assert model.order == 7
    assert model.log2_probabilities(b"ab")[1] == pytest.approx(math.log2(reference(ord("b"), b"a")), rel=1e-12)
    assert model.log2_probabilities(b"").shape == (0,)


@pytest.mark.parametrize("order", [0, -1, 9])
def test_order_out_of_range(order):
    with pytest.raises(ValueError, match=r"order must lie in \[1, 8\], got"):
        WittenBellNGram.fit([b"text"], order)


def test_nothing_to_count_or_score():
    with pytest.raises(ValueError, match="documents is empty"):
        WittenBellNGram.fit([b"", b""], 3)
    with pytest.raises(ValueError, match="documents is empty"):
        WittenBellNGram.fit([b"text"], 3).bits_per_byte([])
