"""A sample of a run's text, and what a model makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.corpus import load_corpus
from jaxlib_icml.training.runs import LoadedRun


def sample_rows(
    run: LoadedRun, config: TrainConfig, count: int, *, trained_on: bool = False
) -> Int32[np.ndarray, "rows seq"]:
    """Rows of tokens from the text of a run.

    Args:
      run: The model, for its tokenizer and context.
      config: The run, for its text.
      count: Rows at most; fewer, shorter or both where the text is short.
      trained_on: Text that the run was trained on, instead of what it held out (if it held anything out).

    Returns:
      Rows of the model's context, at most 512 tokens.

    Raises:
      ValueError: The text is not there, or holds no two tokens.
    """
    corpus = load_corpus(config.data, held_out_fraction=config.held_out_fraction, text_field=config.text_field)
    documents = corpus.train if trained_on else corpus.held_out or corpus.train
    length = min(run.config.context_length, 512)
    ids: list[np.ndarray] = [np.array([run.tokenizer.start_id])]
    for document in documents:
        if sum(map(len, ids)) >= count * length:
            break
        ids += run.tokenizer.encode_batch([document.text])
    tokens = np.concatenate(ids)[: count * length].astype(np.int32)
    if len(tokens) < 2:
        raise ValueError("data: the text holds no two tokens")
    rows = max(1, len(tokens) // length)
    return tokens[: rows * length].reshape(rows, -1)


def sample_loss(run: LoadedRun, rows: Int32[np.ndarray, "rows seq"]) -> tuple[float, Float[Array, "rows seq vocab"]]:
    """Nats per token of a sample, and the logits."""

    @jax.jit
    def apply(state: nnx.State, rows: Array) -> Array:
        model = nnx.merge(run.graphdef, state)
        return model.logits(model(rows).hidden).astype(jnp.float32)

    logits = apply(run.state, rows)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], jnp.asarray(rows[:, 1:]))
    return float(jnp.mean(nats)), logits
