"""A run whose dense feed-forward blocks have become experts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlib_icml.lm import abstract_transformer
from jaxlib_icml.lm.conversion import convert_to_moe, trajectory_of
from jaxlib_icml.moe.prism_convert import LayerReport
from jaxlib_icml.moe.prism_moe import PrismConfig
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.runs import LoadedRun, load_run, new_folder, read_config, write_run
from jaxlib_icml.training.samples import sample_loss, sample_rows
from jaxlib_icml.training.step import TrainState, save_state


class ConversionReport(NamedTuple):
    """What a conversion did.

    Attributes:
      layers: Of each layer.
      largest_difference: Largest difference of a logit on a sample of text.
      loss: Nats per token of the sample, before and after.
      exact_difference: The largest difference with all experts active; rounding only, unless there was a repair.
    """

    layers: tuple[LayerReport, ...]
    largest_difference: float
    loss: tuple[float, float]
    exact_difference: float


def convert_run(
    path: str | Path,
    out: str | Path,
    prism: PrismConfig,
    *,
    tokens: int = 32768,
    own_text: bool = True,
    compensate: bool = True,
    router_delta: int = 0,
    learning_rate: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    on_layer: Callable[[int, LayerReport], None] | None = None,
) -> tuple[LoadedRun, ConversionReport]:
    """Write a run whose dense model has become a mixture of experts, as the checkpoint of step 0.

    The new run trains on (`icml train --resume`) with a fresh state of its optimizer.

    Args:
      path: The folder of a run with a dense model; it stays as it is.
      out: A new folder.
      prism: How blocks are cut.
      tokens: Tokens to calibrate on, of the text that the run was trained on.
      own_text: Measure activity on what the model itself makes of the first halves, instead of on the text.
      compensate: Whether to repair.
      router_delta: Hidden width of a learned correction of the routers; 0 for none.
      learning_rate: Peak of the training to come; None: a tenth of the old run's.
      steps: Steps of the training to come; None: as the old run has it.
      seed: Of the model's own text.
      on_layer: Called with every layer's number and report.

    Returns:
      The new model, and what changed.

    Raises:
      ValueError: No run there, a model that cannot be converted, numbers out of range, or a folder that is in use.
    """
    out, path = new_folder(out, "out"), Path(path)
    if tokens < 1:
        raise ValueError(f"tokens: must be at least 1, got {tokens}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps: must be at least 1, got {steps}")
    run, config = load_run(path), read_config(path)
    if config.parameterization != "none":
        raise ValueError(f"run: no rule is known for the cosine gate, and {path} has {config.parameterization}")
    key = jax.random.key(seed)
    length = min(run.config.context_length, 512)
    rows = jnp.asarray(sample_rows(run, config, -(-tokens // length), trained_on=True))
    trajectory = rows
    if own_text:
        half = max(1, rows.shape[1] // 2)
        trajectory = trajectory_of(run.graphdef, run.state, rows[:, :half], key, rows.shape[1])
    state, model, layers = convert_to_moe(
        run.state,
        run.config,
        rows,
        prism,
        trajectory=trajectory,
        router_delta=router_delta,
        compensate=compensate,
        key=jax.random.fold_in(key, 1),
        on_layer=on_layer,
    )
    converted = LoadedRun(model, run.tokenizer, nnx.split(abstract_transformer(model))[0], state, 0)
    everything = dataclasses.replace(model, num_active_experts=model.num_experts)
    exact = converted._replace(config=everything, graphdef=nnx.split(abstract_transformer(everything))[0])
    sample = sample_rows(run, config, 8)
    (before, logits), (after, new), (_, whole) = (sample_loss(which, sample) for which in (run, converted, exact))
    report = ConversionReport(
        layers,
        float(jnp.max(jnp.abs(new - logits))),
        (before, after),
        float(jnp.max(jnp.abs(whole - logits))),
    )

    rate = config.optimizer.learning_rate / 10 if learning_rate is None else learning_rate
    new_config = dataclasses.replace(
        config,
        model=model,
        init_from=str(path),
        run_dir=str(out),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
    )
    if steps is not None:
        new_config = dataclasses.replace(new_config, steps=steps, minutes=None)
    params, rest = nnx.split_state(state, nnx.Param, ...)
    optimizer = make_optimizer(new_config.optimizer, make_mesh(new_config.mesh))(0.0)
    zero = jnp.zeros((), jnp.int32)
    start = TrainState(zero, params, rest, optimizer.init(params), zero)
    write_run(out, new_config, run.tokenizer, lambda checkpointer: save_state(checkpointer, start, {}))
    return converted, report
