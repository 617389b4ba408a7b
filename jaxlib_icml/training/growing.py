"""A run whose model is a deeper and wider copy of another run's."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlib_icml.lm import abstract_transformer
from jaxlib_icml.lm.growth import cliff_index, grow, grown_config, norm_profile
from jaxlib_icml.moe.growth import grow_opt_state
from jaxlib_icml.training.checkpoints import Checkpointer
from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.optimizers import make_optimizer
from jaxlib_icml.training.runs import LoadedRun, load_run, new_folder, read_config, save_model, write_run
from jaxlib_icml.training.samples import sample_loss, sample_rows
from jaxlib_icml.training.step import TrainState, make_train_program, restore_state, save_state
from jaxlib_icml.training.transfer import BASE_FILE, Transfer, base_text, transferred

POLICIES = ("reset", "copy", "scale")


class GrowthReport(NamedTuple):
    """What a growth did to the function and to the weights.

    Attributes:
      largest_difference: Largest difference of a logit on the sample.
      loss: Nats per token of the sample before and after.
      cliff: Largest `cliff_index` (`jaxlib_icml.lm.growth`) of all matrices before and after; NaN for one layer.
      continues: Whether the new run goes on where the old one was in its data, or starts its data anew.
    """

    largest_difference: float
    loss: tuple[float, float]
    cliff: tuple[float, float]
    continues: bool


def grow_run(
    path: str | Path,
    out: str | Path,
    *,
    depth: int = 2,
    width: int = 2,
    noise: float = 0.01,
    method: str = "interpose",
    seed: int = 0,
    policy: str = "reset",
    steps: int | None = None,
) -> tuple[LoadedRun, GrowthReport]:
    """Write a run with a grown model (`jaxlib_icml.lm.growth.grow`), as the checkpoint of step 0.

    The new run goes on (`icml train --resume`) at the old one's place in its data and with its peak learning rate; its
    steps count from 0.

    Args:
      path: The folder of a run; it stays as it is.
      out: A new folder.
      depth: Copies of a layer, itself included.
      width: How many experts stand where one was, in all and active; 1 for dense models.
      noise: Relative noise of new experts.
      method: "interpose", "stack" or "interpose_zero".
      seed: Of the noise.
      policy: What becomes of the optimizer's state: "reset", "copy" or "scale", as in
        `jaxlib_icml.moe.growth.grow_opt_state`.
      steps: Steps of the training to come, the first hundredth of them warm-up; None: as the old run has it.

    Returns:
      The grown model, and what changed on a sample of the text that the run held out (trained on, if it held none out).

    Raises:
      ValueError: No run there, a model that cannot grow so, an optimizer's state to copy where there is none, or a
        folder that is in use.
    """
    out, path = new_folder(out, "out"), Path(path)
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    run, config = load_run(path), read_config(path)
    state, model = grow(
        run.state, run.config, key=jax.random.key(seed), depth=depth, width=width, noise=noise, method=method
    )
    grown = LoadedRun(model, run.tokenizer, nnx.split(abstract_transformer(model))[0], state, 0)
    # Old and new run hold the base model of their rules themselves.
    config = dataclasses.replace(config, base=None)
    new = dataclasses.replace(config, model=model, init_from=str(path), run_dir=str(out))
    if steps is not None:
        schedule = dataclasses.replace(config.optimizer, warmup_steps=max(1, steps // 100))
        new = dataclasses.replace(new, steps=steps, minutes=None, optimizer=schedule)
    transfer = transferred(config, path)[1]
    files = {} if transfer is None else {BASE_FILE: base_text(transfer.base)}

    with Checkpointer(path / "checkpoints") as checkpoints:
        continues = checkpoints.can_continue(run.step)
        if not continues and policy != "reset":
            raise ValueError(f"policy: {path} holds no state of an optimizer to {policy}")
        old = _restored(checkpoints, run, config, transfer) if continues else None
    report = _report(run, grown, config, continues)
    if old is None:
        write_run(out, new, run.tokenizer, lambda checkpointer: save_model(checkpointer, grown), files)
        return grown, report

    before, meta = old
    growth = grown_config(run.config, depth=depth, width=width, method=method)[1]
    params, rest = nnx.split_state(state, nnx.Param, ...)
    opt_state = grow_opt_state(before.opt_state, before.params, growth, policy)
    zero = jnp.zeros((), jnp.int32)
    start = TrainState(zero, params, rest, opt_state, zero, before.routing_control)
    meta = {**meta, "elapsed": 0.0}
    write_run(out, new, run.tokenizer, lambda checkpointer: save_state(checkpointer, start, meta), files)
    return grown, report


def _restored(
    checkpoints: Checkpointer, run: LoadedRun, config: TrainConfig, transfer: Transfer | None
) -> tuple[TrainState, dict[str, Any]]:
    """All that the old run carries from step to step."""
    mesh = make_mesh(config.mesh)
    program = make_train_program(run.config, make_optimizer(config.optimizer, mesh, transfer), mesh)
    return restore_state(checkpoints, run.step, program)


def _report(run: LoadedRun, grown: LoadedRun, config: TrainConfig, continues: bool) -> GrowthReport:
    """Both models on a sample of text."""
    rows = sample_rows(run, config, 8)
    (before, logits), (after, new) = sample_loss(run, rows), sample_loss(grown, rows)
    base, profile = norm_profile(run.state), norm_profile(grown.state)
    cliff = (float("nan"),) * 2
    if run.config.num_layers > 1:
        cliff = max(cliff_index(base, base).values()), max(cliff_index(profile, base).values())
    return GrowthReport(float(jnp.max(jnp.abs(new - logits))), (before, after), cliff, continues)
