"""The main job as an experiment: OLion behind GradientStabilizer against tuned AdamW, at equal tokens.

Both train the same small mixture-of-experts model on the same batches of the Python standard library. Each optimizer's
peak learning rate is chosen on the same grid, by short runs with a seed that the comparison does not use.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.context import Context
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.lm import LMConfig, preset
from jaxlib_icml.lm.ngram import WittenBellNGram
from jaxlib_icml.lm.tokenizer import BPETokenizer
from jaxlib_icml.training.config import OptimizerConfig, TrainConfig
from jaxlib_icml.training.corpus import load_corpus
from jaxlib_icml.training.data import bits_per_byte, make_loader
from jaxlib_icml.training.evaluate import total_nats
from jaxlib_icml.training.mesh import make_mesh
from jaxlib_icml.training.optimizers import learning_rate_at, make_optimizer
from jaxlib_icml.training.step import TrainProgram, TrainState, make_train_program

TUNING_SEED = 1000
GRID = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2, 9.6e-2)
ARMS = {
    "OLion": OptimizerConfig(name="olion", stabilize=True),
    # With clipping at 1, as usual for AdamW.
    "AdamW": OptimizerConfig(name="adamw", stabilize=False, clip_norm=1.0),
}


class _Budget(NamedTuple):
    steps: int
    tuning_steps: int
    grid: tuple[float, ...]
    batch_size: int
    evaluations: int
    monitor_bytes: int


class _Task(NamedTuple):
    """The data and the model, shared by every run."""

    config: LMConfig
    train: list[np.ndarray]
    held_out: list[np.ndarray]
    held_out_bytes: int
    monitor: list[np.ndarray]
    monitor_bytes: int
    eos_id: int
    ngrams: dict[int, float]


def _task(context: Context, budget: _Budget) -> _Task:
    defaults = TrainConfig()
    corpus = load_corpus(context.data, held_out_fraction=defaults.held_out_fraction)
    context.log(f"corpus: {corpus.description}")
    train, held_out = list(corpus.train), list(corpus.held_out)
    if context.scale == "smoke":
        train, held_out = train[:8], held_out[:2]
    tokenizer = BPETokenizer.train([d.text for d in train], defaults.tokenizer.vocab_size)
    config = replace(preset("tiny-moe"), vocab_size=tokenizer.vocab_size)
    if context.scale == "smoke":
        config = replace(config, width=32, num_layers=1, num_heads=2, expert_width=32, context_length=64)
    tokens = tokenizer.encode_batch([d.text for d in held_out])
    monitor = [i for i, d in enumerate(held_out) if d.num_bytes <= budget.monitor_bytes // 4][:8] or [0]
    train_bytes = [d.utf8 for d in train]
    fits = {n: WittenBellNGram.fit(train_bytes, order=n) for n in (4, 6)}
    return _Task(
        config=config,
        train=tokenizer.encode_batch([d.text for d in train]),
        held_out=tokens,
        held_out_bytes=sum(d.num_bytes for d in held_out),
        monitor=[tokens[i] for i in monitor],
        monitor_bytes=sum(held_out[i].num_bytes for i in monitor),
        eos_id=tokenizer.eos_id,
        ngrams={n: model.bits_per_byte([d.utf8 for d in held_out]) for n, model in fits.items()},
    )


def _bits(program: TrainProgram, state: TrainState, task: _Task, *, monitor: bool, batch_size: int) -> float:
    documents, size = (task.monitor, task.monitor_bytes) if monitor else (task.held_out, task.held_out_bytes)
    model = nnx.merge_state(state.params, state.rest)
    nats, _ = total_nats(program.graphdef, model, documents, eos_id=task.eos_id, batch_size=batch_size)
    return bits_per_byte(nats, size) if np.isfinite(nats) else float("nan")


def _train(
    task: _Task,
    program: TrainProgram,
    optimizer: OptimizerConfig,
    seed: int,
    steps: int,
    budget: _Budget,
    advance: Callable[..., None],
    evaluations: int = 0,
) -> dict[str, Any]:
    """One run; returns its loss curve, monitor curve and final held-out bits per byte."""
    loader = make_loader(
        task.train,
        eos_id=task.eos_id,
        seq_len=task.config.context_length,
        batch_size=budget.batch_size,
        seed=seed,
    )
    state = program.init(jax.random.key(seed))
    losses, curve = [], []
    every = steps // evaluations if evaluations else steps + 1
    for step in range(steps):
        batch = next(loader)
        batch.pop("positions")
        state, metrics = program.step(state, batch, learning_rate_at(optimizer, step, step / steps))
        losses.append(float(metrics.loss))
        advance(loss=losses[-1])
        if (step + 1) % every == 0:
            curve.append((step + 1, _bits(program, state, task, monitor=True, batch_size=budget.batch_size)))
    bits = _bits(program, state, task, monitor=False, batch_size=budget.batch_size)
    return {"losses": losses, "curve": curve, "bits_per_byte": bits}


def run(context: Context) -> Outcome:
    """Tune both optimizers, then train each over the seeds."""
    budget = context.pick(
        smoke=_Budget(4, 2, GRID[1:3], 4, 2, 20_000),
        laptop=_Budget(240, 120, GRID, 8, 8, 60_000),
        full=_Budget(5000, 1000, GRID, 64, 20, 100_000),
    )
    task = _task(context, budget)
    mesh = make_mesh()
    programs = {name: make_train_program(task.config, make_optimizer(c, mesh), mesh) for name, c in ARMS.items()}

    tuning: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    with context.progress("tuning", len(ARMS) * len(budget.grid) * budget.tuning_steps) as phase:
        for name, config in ARMS.items():
            tuning[name] = [
                _train(
                    task,
                    programs[name],
                    replace(config, learning_rate=rate),
                    TUNING_SEED,
                    budget.tuning_steps,
                    budget,
                    phase.advance,
                )["bits_per_byte"]
                for rate in budget.grid
            ]
            rates[name] = budget.grid[int(np.nanargmin(tuning[name]))]
            context.log(f"{name}: learning rate {rates[name]:g} of {dict(zip(budget.grid, tuning[name], strict=True))}")

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    with context.progress("training", len(ARMS) * len(context.seeds) * budget.steps) as phase:
        for seed in context.seeds:
            for name, config in ARMS.items():
                optimizer = replace(config, learning_rate=rates[name])
                runs[name].append(
                    _train(
                        task,
                        programs[name],
                        optimizer,
                        seed,
                        budget.steps,
                        budget,
                        phase.advance,
                        budget.evaluations,
                    )
                )

    final = {name: [r["bits_per_byte"] for r in results] for name, results in runs.items()}
    pairs = list(zip(final["OLion"], final["AdamW"], strict=True))
    return Outcome(
        measured={
            "below_adamw": [ours - theirs for ours, theirs in pairs],
            "below_4gram": [bits - task.ngrams[4] for bits in final["OLion"]],
            "fewer_tokens": [_saved(ours, theirs) for ours, theirs in zip(runs["OLion"], runs["AdamW"], strict=True)],
        },
        data={
            "tokens_per_step": budget.batch_size * task.config.context_length,
            "steps": budget.steps,
            "grid": budget.grid,
            "tuning": tuning,
            "learning_rates": rates,
            "runs": runs,
            "ngrams": {str(n): bits for n, bits in task.ngrams.items()},
        },
        notes=(
            f"Peak learning rates chosen on the grid {', '.join(f'{rate:g}' for rate in budget.grid)} with "
            f"{budget.tuning_steps}-step runs: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()) + ".",
            *(
                f"{name}'s rate is at the edge of the grid: a wider one might do better."
                for name, rate in rates.items()
                if rate in (budget.grid[0], budget.grid[-1])
            ),
        ),
    )


def _saved(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Share of AdamW's tokens that OLion does not need to come as low as AdamW ends, on the monitored files."""
    steps = np.array([step for step, _ in ours["curve"]], float)
    bits = np.minimum.accumulate([value for _, value in ours["curve"]])
    goal = theirs["curve"][-1][1]
    if bits[-1] > goal:
        return -1.0
    reached = float(np.interp(-goal, -bits, steps))
    return 1.0 - reached / float(theirs["curve"][-1][0])


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """Held-out bits per byte along training, and the learning-rate grid."""
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    colours = {"OLion": "tab:blue", "AdamW": "tab:orange"}
    for name, results in data["runs"].items():
        curves = np.array([[value for _, value in r["curve"]] for r in results])
        tokens = np.array([step for step, _ in results[0]["curve"]]) * data["tokens_per_step"] / 1e6
        label = f"{name}, peak rate {data['learning_rates'][name]:g}"
        left.plot(tokens, curves.mean(0), "o-", ms=3, color=colours[name], label=label)
        left.fill_between(tokens, curves.min(0), curves.max(0), color=colours[name], alpha=0.2, lw=0)
    for order, bits in data["ngrams"].items():
        left.axhline(bits, color="0.4", lw=1, ls="--" if order == "4" else ":")
        text = f"byte {order}-gram on all training text"
        place = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom"}
        left.annotate(text, (0.01, bits), fontsize=8, color="0.3", **place)
    left.set(xlabel="million tokens", ylabel="bits per byte, held-out files", ylim=(None, 3.4))
    left.set_title("A small mixture-of-experts model learns Python's standard library", fontsize=10)
    left.legend(frameon=False)
    for name, bits in data["tuning"].items():
        right.plot(data["grid"], bits, "o-", ms=3, color=colours[name], label=name)
    right.set(xscale="log", xlabel="peak learning rate", title="tuning runs")
    right.set_xticks(data["grid"], [f"{rate:g}" for rate in data["grid"]], rotation=60)
    right.minorticks_off()
    right.title.set_fontsize(10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)


EXPERIMENT = Experiment(
    name="lm/pretrain",
    title="OLion and GradientStabilizer against tuned AdamW at equal tokens, on a small mixture-of-experts model",
    paper="OLion (arXiv 2602.01105), GradientStabilizer (arXiv 2502.17055)",
    claims=(
        Claim(
            id="below_adamw",
            statement="At equal tokens OLion reaches a lower held-out loss than AdamW (difference, OLion - AdamW)",
            paper="lower validation loss than AdamW for GPT-2 124M to 770M and Llama-2-7B pretraining",
            expected=at_most(-0.02, "bits/byte"),
            judged_on="every seed",
        ),
        Claim(
            id="fewer_tokens",
            statement="OLion comes as low as AdamW ends with a share of the tokens to spare",
            paper="",
            expected=at_least(0.1),
        ),
        Claim(
            id="below_4gram",
            statement="The model beats a byte 4-gram fitted on all training files (difference, model - 4-gram)",
            paper="",
            expected=at_most(0.0, "bits/byte"),
            judged_on="every seed",
        ),
    ),
    run=run,
    plot=plot,
    seeds=2,
    accepts_data=True,
)
