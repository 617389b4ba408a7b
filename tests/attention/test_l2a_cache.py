"""Decoding against the same tokens in one long forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.attention import Routing, cache_slots, decode_attention, fill_cache, init_cache
from tests.attention import oracle
from tests.attention.oracle import random_inputs

SEQ, HEADS, KV_HEADS, DIM = 40, 4, 2, 8

decode = jax.jit(decode_attention, static_argnames=("window", "sinks", "combine", "estimator"))
fill = jax.jit(fill_cache, static_argnames="sinks")


def setting(seed=0):
    q, k, v = random_inputs(2, SEQ, HEADS, KV_HEADS, DIM, seed)
    logits = 2 * jax.random.normal(jax.random.key(seed + 9), (2, SEQ))
    return q, k, v, logits


def rows(x, lengths, first, number):
    """The tokens `first` to `first + number` behind each row's prompt."""
    return jnp.stack([row[n + first : n + first + number] for row, n in zip(x, lengths, strict=True)])


def decoded(lengths, *, pruned, window, sinks=0, chunks=(1,) * 8, slots=None, **options):
    """Outputs of the tokens behind prompts of the given lengths, and what one pass says they are."""
    q, k, v, logits = setting()
    mask = (logits > 0) & (not pruned)
    slots = cache_slots(SEQ, window, pruned=pruned, sinks=sinks) if slots is None else slots
    # Prompts stand on the left of one array, padded with whatever follows.
    longest = max(lengths)
    cache = fill(init_cache(2, slots, KV_HEADS, DIM), k[:, :longest], v[:, :longest], jnp.array(lengths), sinks=sinks)
    outs, first = [], 0
    for number in chunks:
        cut = functools.partial(rows, lengths=lengths, first=first, number=number)
        routing = None if pruned else Routing(cut(mask), jax.nn.sigmoid(cut(logits)))
        out, cache = decode(cut(q), cut(k), cut(v), cache, routing, window=window, sinks=sinks, **options)
        outs.append(out)
        first += number
    assert cache.lengths.tolist() == [n + first for n in lengths]
    expected = oracle.l2a(q, k, v, mask, logits, window=window, sinks=sinks, **options)[0]
    return jnp.concatenate(outs, axis=1), rows(expected, lengths, 0, first)


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize(
    ("window", "sinks"),
    [(6, 3), (64, 0), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((6, 0), (1, 0)))],
)
def test_steps_equal_one_pass_for_prompts_of_different_lengths(pruned, window, sinks):
    np.testing.assert_allclose(*decoded((17, 5), pruned=pruned, window=window, sinks=sinks), atol=2e-6)


@pytest.mark.parametrize("pruned", [True, False])
def test_sequences_may_begin_with_nothing(pruned):
    np.testing.assert_allclose(*decoded((0, 9), pruned=pruned, window=4, sinks=2, chunks=(1,) * 12), atol=2e-6)


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("chunks", [(3, 1, 5), (20,)])
def test_several_tokens_at_once_are_single_steps(pruned, chunks):
    # 20 tokens overrun the ring of 6 + 2 slots within one call.
    np.testing.assert_allclose(*decoded((11, 3), pruned=pruned, window=6, sinks=2, chunks=chunks), atol=2e-6)


@pytest.mark.parametrize(
    ("combine", "estimator"),
    [
        ("add", "soft"),
        *(pytest.param(*names, marks=pytest.mark.slow) for names in (("replace", "soft"), ("add", "st"))),
    ],
)
def test_gates_are_those_of_training(combine, estimator):
    np.testing.assert_allclose(
        *decoded((17, 5), pruned=False, window=6, combine=combine, estimator=estimator), atol=2e-6
    )


def test_a_ring_larger_than_needed_changes_nothing():
    np.testing.assert_allclose(*decoded((17, 5), pruned=True, window=6, sinks=2, slots=13), atol=2e-6)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([(1, 0), (5, 0), (5, 3), (1, 4), (12, 4)]))
def test_a_filled_ring_holds_sinks_and_the_last_tokens(first, second, sizes):
    ring, sinks = sizes
    lengths = np.array([first, second])
    x = jnp.broadcast_to(jnp.arange(30.0)[None, :, None, None], (2, 30, 1, 1))
    cache = fill(init_cache(2, sinks + ring, 1, 1), x, x, lengths, sinks=sinks)
    for held, n in zip(np.asarray(cache.keys)[:, :, 0, 0], lengths, strict=True):
        for position in {*range(min(sinks, n)), *range(max(n - ring, min(sinks, n)), n)}:
            assert held[position if position < sinks else sinks + (position - sinks) % ring] == position


def test_tokens_can_be_taken_back():
    # Four guesses are written, three of them refused: the ring has room for that.
    q, k, v, logits = setting()
    window, extra, n = 6, 3, 15
    cache = fill(init_cache(2, cache_slots(SEQ, window, pruned=True, extra=extra), KV_HEADS, DIM), k[:, :n], v[:, :n])
    guesses = [x[:, n : n + 1 + extra].at[:, 1:].set(7.0) for x in (q, k, v)]
    _, cache = decode(*guesses, cache, None, window=window)
    cache = cache._replace(lengths=cache.lengths - extra)
    expected = oracle.l2a(q, k, v, np.zeros((2, SEQ), bool), logits, window=window)[0]
    for t in range(n + 1, n + 9):
        out, cache = decode(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], cache, None, window=window)
        np.testing.assert_allclose(out[:, 0], expected[:, t], atol=2e-6)


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_step_without_routed_tokens_reads_window_and_sinks_only(sinks):
    q, k, v, _ = setting()
    window, n = 6, 20
    far = (jnp.arange(SEQ) >= sinks) & ((jnp.arange(SEQ) <= n - window) | (jnp.arange(SEQ) >= n))
    poisoned = [jnp.where(far[:, None, None], jnp.nan, x)[:, :SEQ] for x in (k, v)]
    cache = fill(init_cache(2, SEQ, KV_HEADS, DIM), *poisoned, jnp.array([n, n]), sinks=sinks)
    cut = [x[:, n : n + 1] for x in (q, k, v)]
    run = functools.partial(decode, *cut, cache, window=window, sinks=sinks)
    nobody, one = jnp.zeros((2, 1), bool), jnp.array([[True], [False]])
    prob = jnp.full((2, 1), 0.5)
    clean, _ = run(Routing(nobody, prob))
    assert jnp.isfinite(clean).all()
    poisoned_out, _ = run(Routing(one, prob))  # the negative control: now everything is read
    assert jnp.isnan(poisoned_out[0]).all()
    np.testing.assert_array_equal(poisoned_out[1], clean[1])


def test_half_precision_caches_hold_what_was_rounded():
    q, k, v, logits = setting()
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    n, window = 20, 6
    cache = fill(init_cache(2, SEQ, KV_HEADS, DIM, jnp.bfloat16), half[1][:, :n], half[2][:, :n])
    mask = jnp.ones((2, 1), bool)
    out, cache = decode(*(x[:, n : n + 1] for x in half), cache, Routing(mask, mask.astype(float)), window=window)
    assert out.dtype == cache.keys.dtype == jnp.bfloat16
    expected = oracle.l2a(*half, np.ones((2, SEQ), bool), logits, window=window)[0][:, n : n + 1]
    np.testing.assert_allclose(out.astype("float32"), expected, atol=0.02)


def test_vmap_over_batches_is_a_loop():
    q, k, v, logits = setting()
    routing = Routing(logits[:, :1] > 0, jax.nn.sigmoid(logits[:, :1]))
    one = jax.tree.map(lambda x: x[:, None], (q[:, :1], k[:, :1], v[:, :1], routing))
    caches = fill(init_cache(2, SEQ, KV_HEADS, DIM), k[:, 5:20], v[:, 5:20])
    together, _ = jax.vmap(lambda a, c: decode(*a[:3], c, a[3], window=6))(
        one, jax.tree.map(lambda x: x[:, None], caches)
    )
    single, _ = decode(q[:, :1], k[:, :1], v[:, :1], caches, routing, window=6)
    np.testing.assert_allclose(together[:, 0], single, atol=1e-6)


def _step(new=1, slots=8, length=3, mask=(1, 1), kv_heads=2, **options):
    x = jnp.ones((1, new, 4, 8))
    cache = init_cache(1, slots, 2, 8)._replace(lengths=jnp.array([length]))
    routing = Routing(jnp.ones(mask, bool), jnp.ones(mask))
    return decode_attention(x, x[:, :, :kv_heads], x[:, :, :kv_heads], cache, routing, **({"window": 4} | options))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: _step(length=8), "8 slots"),
        (lambda: _step(window=0), "window"),
        (lambda: _step(mask=(1, 2)), "mask"),
        (lambda: _step(kv_heads=1), "keys"),
        (lambda: init_cache(1, 0, 2, 8), "slots"),
        (lambda: fill_cache(init_cache(1, 4, 2, 8), jnp.ones((1, 3, 1, 8)), jnp.ones((1, 3, 1, 8))), "keys"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
