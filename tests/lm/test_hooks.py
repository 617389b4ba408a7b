"""Captured activations against their definitions, edits against edited weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import HOOK_POINTS, Edit, LMConfig, Transformer, init_cache

CONFIG = LMConfig(vocab_size=50, context_length=32, width=32, num_layers=3, num_heads=4, num_kv_heads=2, qk_norm=True)
MOE = dataclasses.replace(CONFIG, num_experts=4, expert_width=24)
EVERYTHING = tuple(name for name in HOOK_POINTS if name != "routing_probability")  # which is L2A's
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 12)), jnp.int32)


def build(config, seed=1):
    graphdef, state = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))

    @partial(jax.jit, static_argnames=("capture", "prefill"))
    def run(state, tokens, **options):
        return nnx.merge(graphdef, state)(tokens, **options)

    return run, state


def near(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "config", [CONFIG, MOE, dataclasses.replace(MOE, scan_layers=True), dataclasses.replace(CONFIG, remat="full")]
)
def test_captured_activations_make_up_the_residual_stream(config):
    run, state = build(config)
    plain = run(state, TOKENS).hidden
    out = run(state, TOKENS, capture=EVERYTHING)
    near(out.hidden, plain)
    seen = out.activations
    assert {name: x.shape for name, x in seen.items()} == {
        "residual": (3, 2, 12, 32),
        "attention_pattern": (3, 2, 4, 12, 12),
        "head_output": (3, 2, 12, 4, 8),
        "attention_output": (3, 2, 12, 32),
        "mlp_output": (3, 2, 12, 32),
    }
    stream = seen["residual"] + seen["attention_output"] + seen["mlp_output"]
    near(stream[:-1], seen["residual"][1:])
    last = stream[-1] / np.sqrt(np.mean(stream[-1] ** 2, -1, keepdims=True) + config.norm_epsilon)
    near(out.hidden, last)  # the final scale is one before training
    pattern = np.asarray(seen["attention_pattern"])
    near(pattern.sum(-1), np.ones(pattern.shape[:-1]))
    assert np.all(pattern[..., ~np.tri(12, dtype=bool)] == 0)


def test_patterns_mix_the_values_into_the_heads_outputs():
    run, state = build(CONFIG)
    seen = run(state, TOKENS, capture=("residual", "attention_pattern", "head_output", "attention_output")).activations
    attention = state["layers"][1]["attention"]
    x = np.asarray(seen["residual"][1], np.float64)
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + CONFIG.norm_epsilon)
    values = np.einsum("btd,dgh->btgh", x, np.asarray(attention["value"]["kernel"][...]))
    heads = np.einsum("bhts,bshd->bthd", seen["attention_pattern"][1], np.repeat(values, 2, axis=2))
    near(seen["head_output"][1], heads)
    near(seen["attention_output"][1], np.einsum("bthd,hdw->btw", heads, np.asarray(attention["out"]["kernel"][...])))


def test_without_hooks_the_program_is_the_same():
    run, state = build(MOE)
    plain = run.lower(state, TOKENS).as_text()
    assert run.lower(state, TOKENS, capture=(), edits={}).as_text() == plain
    assert run.lower(state, TOKENS, edits={"mlp_output": Edit()}).as_text() != plain


@pytest.mark.parametrize("scan", [False, True])
def test_silencing_a_head_equals_removing_its_output_weights(scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan)
    run, state = build(config)
    keep = jnp.ones((3, 4, 1)).at[1, 2].set(0.0)
    edited = run(state, TOKENS, edits={"head_output": Edit(keep=keep)}).hidden
    if scan:
        kernel = state["layers"]["attention"]["out"]["kernel"]
        kernel[...] = kernel[...].at[1, 2].set(0.0)
    else:
        kernel = state["layers"][1]["attention"]["out"]["kernel"]
        kernel[...] = kernel[...].at[2].set(0.0)
    near(edited, run(state, TOKENS).hidden)


def test_a_patched_residual_stream_continues_the_other_run():
    run, state = build(CONFIG)
    other = (TOKENS + 7) % 50
    source = run(state, other, capture=("residual",))
    last_only = jnp.ones((3, 1, 1, 1)).at[2].set(0.0)
    patch = jnp.zeros_like(source.activations["residual"]).at[2].set(source.activations["residual"][2])
    patched = run(state, TOKENS, capture=("residual",), edits={"residual": Edit(last_only, patch)})
    near(patched.hidden, source.hidden)
    near(patched.activations["residual"][2], source.activations["residual"][2])  # as edited
    assert np.abs(patched.activations["residual"][1] - source.activations["residual"][1]).max() > 1e-2


def test_a_sweep_over_edits_compiles_once_and_may_be_batched():
    run, state = build(CONFIG)
    traces = 0

    @jax.jit
    def steered(state, tokens, add):
        nonlocal traces
        traces += 1
        return run(state, tokens, edits={"residual": Edit(add=add)}).hidden

    adds = jax.random.normal(jax.random.key(0), (4, 3, 32))
    one_by_one = [steered(state, TOKENS, add) for add in adds]
    assert traces == 1
    together = jax.vmap(lambda add: run(state, TOKENS, edits={"residual": Edit(add=add)}).hidden)(adds)
    near(together, jnp.stack(one_by_one))


@pytest.mark.parametrize("scan", [False, True])
def test_hooks_see_decoding_too(scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan, sliding_window=5)
    run, state = build(config)
    options = {"capture": EVERYTHING, "edits": {"attention_output": Edit(keep=0.5)}}
    whole = run(state, TOKENS, **options)
    first = run(state, TOKENS[:, :9], cache=init_cache(config, 2, 12), prefill=True, **options)
    rest = run(state, TOKENS[:, 9:], cache=first.cache, **options)
    near(jnp.concatenate([first.hidden, rest.hidden], axis=1), whole.hidden)
    near(rest.activations["attention_pattern"], whole.activations["attention_pattern"][:, :, :, 9:])
    near(rest.activations["mlp_output"], whole.activations["mlp_output"][:, :, 9:])


def test_gradients_pass_through_edits():
    run, state = build(CONFIG)

    def score(keep):
        return jnp.sum(run(state, TOKENS, edits={"attention_pattern": Edit(keep=keep)}).hidden ** 3)

    keep = jnp.ones((3, 4, 1, 1))
    gradient = jax.jit(jax.grad(score))(keep)
    direction = jax.random.normal(jax.random.key(1), keep.shape)
    step = 1e-2
    slope = (score(keep + step * direction) - score(keep - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(gradient, direction), slope, rtol=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture": ("resid",)}, "capture: unknown activation 'resid'; there are residual"),
        ({"edits": {"mlp": Edit()}}, "edits: unknown activation 'mlp'"),
        ({"edits": {"mlp_output": Edit(add=jnp.zeros((3, 5, 2, 1, 1)))}}, "the edit makes it"),
        (
            {"edits": {"residual": Edit(keep=jnp.ones(2))}},
            r"keep of residual must .* have 3 layers .* got shape \(2,\)",
        ),
    ],
)
def test_misuse_is_named(options, message):
    run, state = build(CONFIG)
    with pytest.raises(ValueError, match=message):
        run(state, TOKENS, **options)
