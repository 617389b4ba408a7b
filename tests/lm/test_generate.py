import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Sampling, Transformer, generate, pad_prompts, sample

CONFIG = LMConfig(vocab_size=31, context_length=24, width=32, num_layers=2, num_heads=2, num_experts=4, qk_norm=True)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(CONFIG, init_std=1.0)
    graphdef = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]
    return graphdef, jax.jit(lambda key: nnx.state(Transformer(config, rngs=nnx.Rngs(params=key))))(jax.random.key(3))


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, tokens):
    model = nnx.merge(graphdef, state)
    return model.logits(model(tokens).hidden)


def greedy_by_hand(graphdef, state, prompt, steps):
    """No cache: run the whole text again for every token."""
    text = list(prompt)
    for _ in range(steps):
        padded = jnp.array([text + [0] * (CONFIG.context_length - len(text))])
        text.append(int(jnp.argmax(forward(graphdef, state, padded)[0, len(text) - 1])))
    return text[len(prompt) :]


def test_prompts_of_different_lengths_continue_as_if_alone(model):
    prompts = [np.array([1, 2, 3, 4, 5]), np.array([7]), np.array([9, 8])]
    out = generate(*model, *pad_prompts(prompts), jax.random.key(0), max_new_tokens=6, sampling=GREEDY)
    for prompt, row in zip(prompts, out.tokens, strict=True):
        assert row.tolist() == greedy_by_hand(*model, prompt, 6)
    assert out.lengths.tolist() == [6, 6, 6]


def test_rows_end_at_their_first_stop_token(model):
    prompt = np.array([1, 2, 3, 4, 5])
    free = generate(*model, *pad_prompts([prompt]), jax.random.key(0), max_new_tokens=8, sampling=GREEDY)
    stop = int(free.tokens[0, 2])
    first = free.tokens[0].tolist().index(stop)
    out = generate(
        *model,
        *pad_prompts([prompt]),
        jax.random.key(0),
        max_new_tokens=8,
        sampling=GREEDY,
        stop_tokens=(stop,),
    )
    assert out.lengths.tolist() == [first + 1]
    assert out.tokens[0].tolist() == free.tokens[0, : first + 1].tolist() + [stop] * (7 - first)


def test_the_key_decides_the_text(model):
    def text(seed):
        prompts = pad_prompts([np.array([1])])
        return generate(
            *model, *prompts, jax.random.key(seed), max_new_tokens=12, sampling=Sampling(2.0)
        ).tokens.tolist()

    assert text(0) == text(0)
    assert text(0) != text(1)


def frequencies(sampling, logits, draws=20000):
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.jit(jax.vmap(lambda k: sample(k, logits[None], sampling)[0]))(keys)
    return np.bincount(tokens, minlength=logits.shape[0]) / draws


def test_sampling_follows_the_truncated_softmax():
    p = np.array([0.5, 0.25, 0.15, 0.1])
    logits = jnp.log(p)
    error = 4 * 0.5 / np.sqrt(20000)
    np.testing.assert_allclose(frequencies(Sampling(1.0), logits), p, atol=error)
    np.testing.assert_allclose(frequencies(Sampling(0.5), logits), p**2 / (p**2).sum(), atol=error)
    np.testing.assert_allclose(frequencies(Sampling(1.0, top_k=2), logits), [2 / 3, 1 / 3, 0, 0], atol=error)
    # 0.5 + 0.25 reach 0.7 and not 0.8: two tokens, then three.
    np.testing.assert_allclose(frequencies(Sampling(1.0, top_p=0.7), logits), [2 / 3, 1 / 3, 0, 0], atol=error)
    three = p[:3] / p[:3].sum()
    np.testing.assert_allclose(frequencies(Sampling(1.0, top_p=0.8), logits), [*three, 0], atol=error)
    np.testing.assert_allclose(frequencies(Sampling(1.0, top_p=1e-6), logits), [1, 0, 0, 0])
    np.testing.assert_allclose(frequencies(Sampling(1.0, top_k=99), logits), p, atol=error)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}],
)
def test_sampling_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_bad_requests_are_named(model):
    prompts, lengths = pad_prompts([np.array([1, 2])])
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="context_length"):
        generate(*model, prompts, lengths, key, max_new_tokens=23)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(*model, prompts, lengths, key, max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt_lengths"):
        generate(*model, prompts, np.array([3], np.int32), key, max_new_tokens=1)
    with pytest.raises(ValueError, match="stop_tokens"):
        generate(*model, prompts, lengths, key, max_new_tokens=1, stop_tokens=(31,))
    with pytest.raises(ValueError, match="prompts"):
        pad_prompts([np.array([], np.int32)])
