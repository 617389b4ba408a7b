"""A run whose model is a deeper and wider copy of another run's."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlib_icml.lm import abstract_transformer
from jaxlib_icml.lm.growth import cliff_index, grow, norm_profile
from jaxlib_icml.training.corpus import load_corpus
from jaxlib_icml.training.runs import LoadedRun, load_run, new_folder, read_config, write_run


class GrowthReport(NamedTuple):
    """What a growth did to the function and to the weights.

    Attributes:
      largest_difference: Largest difference of a logit on the sample.
      loss: Nats per token of the sample before and after.
      cliff: Largest `cliff_index` (`jaxlib_icml.lm.growth`) of all matrices before and after; NaN for one layer.
    """

    largest_difference: float
    loss: tuple[float, float]
    cliff: tuple[float, float]


def grow_run(
    path: str | Path,
    out: str | Path,
    *,
    depth: int = 2,
    width: int = 2,
    noise: float = 0.01,
    method: str = "interpose",
    seed: int = 0,
) -> tuple[LoadedRun, GrowthReport]:
    """Write a run with a grown model (`jaxlib_icml.lm.growth.grow`), as the checkpoint of step 0.

    Args:
      path: The folder of a run; it stays as it is.
      out: A new folder.
      depth: Copies of a layer, itself included.
      width: How many experts stand where one was, in all and active; 1 for dense models.
      noise: Relative noise of new experts.
      method: "interpose", "stack" or "interpose_zero".
      seed: Of the noise.

    Returns:
      The grown model, and what changed on a sample of the text that the run held out (trained on, if it held none out).

    Raises:
      ValueError: No run there, a model that cannot grow so, or a folder that is in use.
    """
    out = new_folder(out, "out")
    run, config = load_run(path), read_config(Path(path))
    state, model = grow(
        run.state, run.config, key=jax.random.key(seed), depth=depth, width=width, noise=noise, method=method
    )
    grown = LoadedRun(model, run.tokenizer, nnx.split(abstract_transformer(model))[0], state, 0)
    corpus = load_corpus(config.data, held_out_fraction=config.held_out_fraction, text_field=config.text_field)
    text = "".join(document.text for document in (corpus.held_out or corpus.train))[: 64 * run.config.context_length]
    length = min(run.config.context_length, 512)
    ids = np.concatenate([[run.tokenizer.start_id], *run.tokenizer.encode_batch([text])])[: 8 * length]
    rows = ids[: max(1, len(ids) // length) * length].reshape(-1, min(length, len(ids))).astype(np.int32)
    (before, logits), (after, new) = _loss(run, rows), _loss(grown, rows)
    base, profile = norm_profile(run.state), norm_profile(state)
    several = run.config.num_layers > 1
    report = GrowthReport(
        float(jnp.max(jnp.abs(new - logits))),
        (before, after),
        (max(cliff_index(base, base).values()), max(cliff_index(profile, base).values()))
        if several
        else (float("nan"),) * 2,
    )
    write_run(out, dataclasses.replace(config, model=model, init_from=str(path)), grown)
    return grown, report


def _loss(run: LoadedRun, rows: np.ndarray) -> tuple[float, jax.Array]:
    """Nats per token and logits."""

    @jax.jit
    def apply(state, rows):
        model = nnx.merge(run.graphdef, state)
        return model.logits(model(rows).hidden).astype(jnp.float32)

    logits = apply(run.state, rows)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], jnp.asarray(rows[:, 1:]))
    return float(jnp.mean(nats)), logits
