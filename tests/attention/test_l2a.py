"""Values, gradients, causality and memory of the functions of `l2a`."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.attention import L2AConfig, Routing, capacity_for, l2a_attention, route
from tests.attention import oracle
from tests.attention.oracle import dense, random_inputs, visible

STATICS = ("window", "capacity", "combine", "estimator", "overflow", "train", "sinks", "implementation")
CASES = [
    pytest.param(*case, marks=() if case in {("replace", "st", True), ("add", "soft", False)} else pytest.mark.slow)
    for case in itertools.product(("replace", "add"), ("st", "soft"), (True, False))
]


@functools.partial(jax.jit, static_argnames=STATICS)
def attend(q, k, v, mask, logits, **options):
    """For a given mask; the probabilities are those of the logits."""
    return l2a_attention(q, k, v, Routing(mask, jax.nn.sigmoid(logits)), **options)


@functools.partial(jax.jit, static_argnames=STATICS)
def attend_and_pull(q, k, v, mask, logits, cotangent, **options):
    """Output, statistics, and (dq, dk, dv, dlogits)."""
    run = lambda q, k, v, logits: attend(q, k, v, mask, logits, **options)  # noqa: E731
    out, pull, aux = jax.vjp(run, q, k, v, logits, has_aux=True)
    return out, aux, pull(cotangent)


def mask_of(batch, seq, rate=0.3, seed=7):
    return jax.random.bernoulli(jax.random.key(seed), rate, (batch, seq))


def logits_of(batch, seq, seed=8):
    return jax.random.normal(jax.random.key(seed), (batch, seq))


# --- values


@pytest.mark.parametrize("kv_heads", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_routed_is_causal_attention(kv_heads):
    # Check 1.
    q, k, v = random_inputs(2, 96, 4, kv_heads, 16)
    out, aux = attend(q, k, v, jnp.ones((2, 96), bool), logits_of(2, 96), window=8, capacity=96)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=2e-6)
    assert aux.n_routed.tolist() == [96, 96]
    assert aux.rate == 1


@pytest.mark.parametrize(
    ("seq", "window"),
    [(77, 16), (40, 64), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((96, 16), (40, 40), (33, 1)))],
)
def test_nothing_routed_is_sliding_window_attention(seq, window):
    # Check 2.
    q, k, v = random_inputs(1, seq, 2, 2, 16)
    out, aux = attend(q, k, v, jnp.zeros((1, seq), bool), logits_of(1, seq), window=window, capacity=8)
    local = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0))
    np.testing.assert_allclose(out, local, atol=2e-6)
    assert aux.n_routed.tolist() == aux.n_overflow.tolist() == [0]
    assert aux.rate == 0


def test_a_random_mask_gives_values_and_gradients_of_a_dense_softmax():
    # Check 3.
    q, k, v = random_inputs(1, 1024, 2, 1, 16)
    mask, cotangent = mask_of(1, 1024, 0.2), jax.random.normal(jax.random.key(2), q.shape)
    out, _, grads = attend_and_pull(q, k, v, mask, logits_of(1, 1024), cotangent, window=128)
    expected, pull = dense(q, k, v, visible(mask, 128))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    for grad, wanted in zip(grads[:3], pull(cotangent), strict=True):
        np.testing.assert_allclose(grad, wanted, atol=1e-5 * np.abs(wanted).max())


SEGMENTS = jnp.array([[3] * 20 + [1] * 17 + [2] * 3 + [0] * 8, [0] * 5 + [4] * 43])


@pytest.mark.parametrize(("combine", "estimator", "segmented"), CASES)
def test_options_give_values_and_gradients_of_the_formulas(combine, estimator, segmented):
    q, k, v = random_inputs(2, 48, 4, 2, 8)
    mask, logits, cotangent = mask_of(2, 48), logits_of(2, 48), jax.random.normal(jax.random.key(2), q.shape)
    options = {"window": 5, "combine": combine, "estimator": estimator}
    options |= {"segment_ids": SEGMENTS, "sinks": 2} if segmented else {}
    out, aux, grads = attend_and_pull(q, k, v, mask, logits, cotangent, **options)
    expected, pull = oracle.l2a(q, k, v, mask, logits, **options)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for grad, wanted in zip(grads, pull(cotangent), strict=True):
        np.testing.assert_allclose(grad, wanted, atol=2e-5)
    counted = np.asarray(SEGMENTS if segmented else jnp.ones_like(SEGMENTS)) != 0
    assert aux.n_routed.tolist() == (np.asarray(mask) & counted).sum(1).tolist()
    assert float(aux.rate) == pytest.approx((np.asarray(mask) & counted).sum() / counted.sum())
    probs = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    assert float(aux.prob_mean) == pytest.approx(probs[counted].mean())
    if segmented:
        assert not np.asarray(out)[~counted].any()


def test_batches_of_nothing_but_padding_have_no_nan():
    q, k, v = random_inputs(1, 48, 2, 2, 8)
    out, aux, grads = attend_and_pull(
        q, k, v, jnp.ones((1, 48), bool), logits_of(1, 48), q, window=5, segment_ids=jnp.zeros((1, 48), int)
    )
    chex.assert_trees_all_equal((out, aux, grads), jax.tree.map(jnp.zeros_like, (out, aux, grads)))


def test_bfloat16_rounds_the_float32_result():
    q, k, v = random_inputs(2, 48, 4, 2, 8, dtype=jnp.bfloat16)
    mask, logits, cotangent = mask_of(2, 48), logits_of(2, 48), jax.random.normal(jax.random.key(2), q.shape)
    out, _, grads = attend_and_pull(q, k, v, mask, logits, cotangent.astype(q.dtype), window=5, estimator="soft")
    expected, pull = oracle.l2a(q, k, v, mask, logits, window=5, estimator="soft")
    assert [x.dtype for x in (out, *grads)] == [jnp.bfloat16] * 4 + [jnp.float32]
    np.testing.assert_allclose(out.astype("float32"), expected, atol=0.02)
    for grad, wanted in zip(grads, pull(cotangent), strict=True):
        np.testing.assert_allclose(grad.astype("float32"), wanted, atol=0.02 * np.abs(wanted).max())


# --- the router's gradient


@pytest.mark.parametrize("combine", ["replace", pytest.param("add", marks=pytest.mark.slow)])
def test_router_gradient_is_that_of_the_kept_tokens_only(combine):
    # Check 4: routed tokens beyond capacity and unrouted ones get exactly 0.
    q, k, v = random_inputs(2, 64, 2, 1, 8)
    mask, logits, cotangent = mask_of(2, 64, 0.5), logits_of(2, 64), jax.random.normal(jax.random.key(2), q.shape)
    options = {"window": 6, "combine": combine}
    out, aux, grads = attend_and_pull(q, k, v, mask, logits, cotangent, capacity=12, **options)
    kept = np.asarray(mask) & (np.cumsum(mask, axis=1) <= 12)
    expected, pull = oracle.l2a(q, k, v, kept, logits, **options)
    wanted = pull(cotangent)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(grads[3], wanted[3], atol=1e-5)
    assert not np.asarray(grads[3])[~kept].any()
    # In the first window both attentions are the same, up to rounding.
    assert np.asarray(grads[3])[:, 6:][kept[:, 6:]].all()
    for grad, want in zip(grads[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(grad, want, atol=1e-5)
    assert aux.n_routed.tolist() == [12, 12]
    assert (aux.n_routed + aux.n_overflow).tolist() == np.sum(mask, axis=1).tolist()
    assert float(aux.rate) == pytest.approx(np.mean(mask))  # before dropping


def test_straight_through_values_are_the_global_attention_itself():
    q, k, v = random_inputs(1, 64, 2, 1, 8, dtype=jnp.bfloat16)
    mask = mask_of(1, 64)
    outs = [attend(q, k, v, mask, z, window=6)[0] for z in (logits_of(1, 64), 30 * logits_of(1, 64, 3))]
    everything = attend(q, k, v, jnp.ones((1, 64), bool), logits_of(1, 64), window=6)[0]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0][mask], everything[mask])


# --- causality


@pytest.mark.parametrize(
    ("dtype", "segmented"),
    [("float32", False), ("bfloat16", True), pytest.param("float32", True, marks=pytest.mark.slow)],
)
def test_a_token_changes_nothing_before_it(dtype, segmented):
    # Check 5, bit for bit, with more routed tokens than there is capacity for.
    seq = 150
    inputs = (*random_inputs(2, seq, 2, 1, 8, dtype=dtype), logits_of(2, seq))
    segment_ids = jnp.array([[1] * 60 + [2] * 80 + [0] * 10, [1] * 150]) if segmented else None

    @jax.jit
    def run(q, k, v, logits):
        return l2a_attention(q, k, v, route(logits), window=7, capacity=60, sinks=1, segment_ids=segment_ids)

    before, aux = run(*inputs)
    assert aux.n_overflow.min() > 0
    for j in (0, 1, 31, 64, 127, 128, 149):
        flipped = -jnp.sign(inputs[3][:, j])  # routes what was not, and the reverse
        changed = (*(x.at[:, j].add(3) for x in inputs[:3]), inputs[3].at[:, j].set(flipped))
        after, _ = run(*changed)
        np.testing.assert_array_equal(before[:, :j], after[:, :j])
        assert (before[:, j] != after[:, j]).any()


def test_topk_is_refused_outside_of_training():
    # Check 5.
    q, k, v = random_inputs(1, 16, 1, 1, 8)
    with pytest.raises(ValueError, match="causality"):
        l2a_attention(q, k, v, route(logits_of(1, 16)), window=4, overflow="topk")


def test_topk_keeps_the_most_probable_tokens():
    q, k, v = random_inputs(2, 64, 2, 1, 8)
    mask, logits = mask_of(2, 64, 0.5), logits_of(2, 64)
    out, aux = attend(q, k, v, mask, logits, window=6, capacity=12, overflow="topk", train=True)
    kept = np.zeros((2, 64), bool)
    for row, z, m in zip(kept, np.asarray(logits), np.asarray(mask), strict=True):
        row[np.argsort(np.where(m, -z, np.inf))[:12]] = True
    np.testing.assert_allclose(out, oracle.l2a(q, k, v, kept, logits, window=6)[0], atol=2e-6)
    assert aux.n_routed.tolist() == [12, 12]
    assert (aux.n_routed + aux.n_overflow).tolist() == np.sum(mask, axis=1).tolist()


# --- transformations


@pytest.mark.slow
def test_vmap_is_a_loop():
    inputs = [jnp.stack(x) for x in zip(*(random_inputs(2, 40, 2, 1, 8, seed) for seed in range(3)), strict=True)]
    masks, logits = mask_of(3, 80).reshape(3, 2, 40), logits_of(3, 80).reshape(3, 2, 40)
    run = functools.partial(attend_and_pull, window=5, capacity=20)
    arrays = (*inputs, masks, logits, inputs[0])
    together = jax.jit(jax.vmap(run))(*arrays)
    for i in range(3):
        one = run(*(x[i] for x in arrays))
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], together), one, atol=1e-6)


@pytest.mark.slow
def test_implementations_agree():
    q, k, v = random_inputs(2, 48, 4, 2, 8)
    results = [
        attend_and_pull(q, k, v, mask_of(2, 48), logits_of(2, 48), q, window=5, segment_ids=SEGMENTS, implementation=i)
        for i in ("reference", "xla")
    ]
    chex.assert_trees_all_close(*results, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [8192, 1664])
def test_memory_stays_far_below_a_square(capacity):
    # Check 9.
    seq, heads, dim = 8192, 4, 64
    shape = jax.ShapeDtypeStruct((1, seq, heads, dim), jnp.float32)
    mask, logits = jax.ShapeDtypeStruct((1, seq), bool), jax.ShapeDtypeStruct((1, seq), jnp.float32)
    square = heads * seq * seq * 4
    args = (shape, shape, shape, mask, logits)
    for lowered in (
        attend.lower(*args, window=256, capacity=capacity),
        attend_and_pull.lower(*args, shape, window=256, capacity=capacity),
    ):
        assert lowered.compile().memory_analysis().temp_size_in_bytes < 0.25 * square


# --- capacity


@pytest.mark.parametrize(
    ("seq", "rate", "factor", "expected"),
    [
        *((1024, 1.0, 1.25, 1024), (1024, 0.25, 1.25, 384), (1024, 0.2, 1.25, 256), (100, 0.2, 1.25, 100)),
        *((8192, 0.35, 1.25, 3584), (8192, 0.7, 1.0, 5760), (1, 0.01, 0.5, 1), (10_000, 0.001, 1.0, 128)),
    ],
)
def test_capacity_is_a_multiple_of_the_block_with_room_for_the_rate(seq, rate, factor, expected):
    assert capacity_for(seq, L2AConfig(window=64, capacity_rate=rate, capacity_factor=factor)) == expected


# --- errors


def _call(change=None, **options):
    q, k, v = random_inputs(1, 16, 4, 2, 8)
    mask, prob = route(logits_of(1, 16))
    arrays = {"q": q, "k": k, "v": v, "mask": mask, "prob": prob} | (change or {})
    routing = Routing(arrays["mask"], arrays["prob"])
    return l2a_attention(arrays["q"], arrays["k"], arrays["v"], routing, **({"window": 4} | options))


THREE_HEADS = jnp.ones((1, 16, 3, 8))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        # Check 10.
        (lambda: _call(window=0), "window"),
        (lambda: _call(capacity=0), "capacity"),
        (lambda: _call({"mask": jnp.ones((1, 15), bool)}), "mask"),
        (lambda: _call({"mask": jnp.ones((1, 16))}), "mask"),
        (lambda: _call({"k": THREE_HEADS, "v": THREE_HEADS}), "key"),
        (lambda: _call(combine="mean"), "combine"),
        (lambda: _call(estimator="reinforce"), "estimator"),
        (lambda: _call(overflow="drop_early"), "overflow"),
        (lambda: _call({"prob": jnp.ones((1, 15))}), "prob"),
        (lambda: _call({"prob": jnp.ones((1, 16), int)}), "prob"),
        (lambda: _call(sinks=-1), "sinks"),
        (lambda: _call(overflow="topk"), "train=True"),
        (lambda: L2AConfig(window=0), "window"),
        (lambda: L2AConfig(window=4, target_rate=0.0), "target_rate"),
        (lambda: L2AConfig(window=4, capacity_rate=1.5), "capacity_rate"),
        (lambda: L2AConfig(window=4, capacity_factor=0.0), "capacity_factor"),
        (lambda: L2AConfig(window=4, init_rate=1.0), "init_rate"),
        (lambda: L2AConfig(window=4, threshold=float("nan")), "threshold"),
        (lambda: L2AConfig(window=4, sinks=-1), "sinks"),
        (lambda: L2AConfig(window=4, combine="mean"), "combine"),
        (lambda: L2AConfig(window=4, estimator="reinforce"), "estimator"),
        (lambda: L2AConfig(window=4, overflow="none"), "overflow"),
        (lambda: L2AConfig(window=4, router="attention"), "router"),
        (lambda: capacity_for(0, L2AConfig(window=4)), "seq"),
        (lambda: capacity_for(8, L2AConfig(window=4), block=0), "block"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()
