"""OLion against AdamW, Lion and Muon on a small byte model: which learns most, and over which learning rates.

All share the gradient clipping, the decay and AdamW for embeddings, head and norms; they differ in the rule for hidden
matrices. Lion is `optax.scale_by_lion` at an RMS of 0.2. Muon is `optax.contrib.muon`, whose AdamW has Nesterov
momentum, and a second time our `muon_direction` beside the AdamW of the others, so that only the rule differs.
"""

import itertools
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.context import Context
from experiments.optim import byte_lm
from experiments.optim.byte_lm import Factory, Job, Schedule, Text, Trainer
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.optim import (
    MatrixSpec,
    ScaleByOlionState,
    default_matrix_specs,
    default_weight_decay_mask,
    muon_direction,
    olion,
    olion_diagnostics,
)

GRID = (1e-3, 3e-3, 1e-2, 3e-2)
"""Judged; two more rates, one on either side, only show how wide the stable range is."""
WIDE_GRID = (3e-4, *GRID, 1e-1)
FINE_TUNING_GRID = (3e-4, 1e-3, 3e-3, 1e-2)
RMS = 0.2
WEIGHT_DECAY = 0.1
TOLERANCE = 0.2
PLAIN_MUON = "Muon with plain AdamW"
COLOURS = {"OLion": "tab:blue", "Muon": "tab:green", PLAIN_MUON: "tab:olive", "Lion": "tab:red", "AdamW": "tab:orange"}
FIRST_MLP = "first MLP matrix"


class _Budget(NamedTuple):
    steps: int
    fine_tuning_steps: int
    grid: tuple[float, ...]
    fine_tuning_grid: tuple[float, ...]
    batch_size: int
    windows: int
    segments: int


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, MatrixSpec)


def muon_dimension_numbers(params: Any) -> Any:
    """Returns Optax's spelling of `default_matrix_specs`; None for leaves that are no hidden matrices."""
    return jax.tree.map(
        lambda spec: None if spec is None else optax.contrib.MuonDimensionNumbers(spec.row_axes, spec.col_axes),
        default_matrix_specs(params),
        is_leaf=_is_spec,
    )


def optimizers(params: Any) -> dict[str, Factory]:
    """Returns the optimizers for parameters like `params`, each a function of the learning-rate schedule."""
    specs = default_matrix_specs(params)
    labels = jax.tree.map(lambda spec: "rest" if spec is None else "matrices", specs, is_leaf=_is_spec)
    flat = jax.tree_util.tree_leaves_with_path(default_weight_decay_mask(params))
    decays = {jax.tree_util.keystr(path): bool(decay) for path, decay in flat}

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: decays[jax.tree_util.keystr(path)], tree)

    def adamw(schedule: Schedule) -> optax.GradientTransformation:
        return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY, mask=mask)

    def beside_adamw(direction: optax.GradientTransformation, schedule: Schedule) -> optax.GradientTransformation:
        matrices = optax.chain(
            direction, optax.add_decayed_weights(WEIGHT_DECAY), optax.scale_by_learning_rate(schedule)
        )
        return optax.partition({"matrices": matrices, "rest": adamw(schedule)}, labels)

    def lion(schedule: Schedule) -> optax.GradientTransformation:
        signs = optax.scale_by_lion(b1=0.95, b2=0.98)  # entries ±1
        return beside_adamw(optax.chain(signs, optax.scale(RMS)), schedule)

    def plain_muon(schedule: Schedule) -> optax.GradientTransformation:
        return beside_adamw(muon_direction(beta=0.95, rms_target=RMS), schedule)

    def muon(schedule: Schedule) -> optax.GradientTransformation:
        return optax.contrib.muon(
            schedule,
            beta=0.95,
            weight_decay=WEIGHT_DECAY,
            weight_decay_mask=mask,
            adam_b2=0.95,
            adam_weight_decay=WEIGHT_DECAY,
            muon_weight_dimension_numbers=muon_dimension_numbers(params),
            consistent_rms=RMS,
        )

    def ours(schedule: Schedule) -> optax.GradientTransformation:
        return olion(schedule, weight_decay=WEIGHT_DECAY, rms_target=RMS)

    def clipped(make: Callable[[Schedule], optax.GradientTransformation]) -> Factory:
        return lambda schedule, numbers: optax.chain(optax.clip_by_global_norm(1.0), make(schedule))

    makers = {"OLion": ours, "Muon": muon, PLAIN_MUON: plain_muon, "Lion": lion, "AdamW": adamw}
    return {name: clipped(make) for name, make in makers.items()}


def _diagnose(state: Any) -> Any:
    """Isotropy e, spread, and agreement of the signs with the exact ones, for each matrix's momentum."""
    is_olion = lambda x: isinstance(x, ScaleByOlionState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_olion) if is_olion(x)]
    return [olion_diagnostics(x.mu) for x in found]


def second_text(text: Text) -> tuple[Text, str]:
    """Returns the text of the fine-tuning and its name: the King James Bible where Debian's `bible` is installed."""
    if shutil.which("bible"):
        verses = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, check=True).stdout
        name, data = "the King James Bible", np.frombuffer(verses, np.uint8)
    else:
        from pydoc_data.topics import topics

        name = "Python's language reference (pydoc topics), which the first text lacks"
        data = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), np.uint8)
    cut = int(0.9 * len(data))
    return Text(data[:cut], data[cut:]), name


def _first_mlp(params: Any) -> np.ndarray:
    return np.asarray(params["layers"][0]["mlp"]["up"]["kernel"])


def _summary(result: Mapping[str, Any], keep_matrix: bool) -> dict[str, Any]:
    matrix = _first_mlp(result["params"])
    finite = bool(np.all(np.isfinite(matrix)))
    singular = np.linalg.svd(matrix, compute_uv=False) if finite else np.full(min(matrix.shape), np.nan)
    summary: dict[str, Any] = {
        "validation": float(result["validation"]),
        "diverged": byte_lm.diverged(result),
        "largest_entry": float(np.abs(matrix).max()),
        "spectral_norm": float(singular[0]),
    }
    if keep_matrix:
        edges = np.linspace(0, 1, 41) * (np.abs(matrix).max() if finite else 1)
        summary |= {
            "singular_values": singular,
            "entries": {"edges": edges, "counts": np.histogram(np.abs(matrix), edges)[0]},
        }
    return summary


def _diagnostics(result: Mapping[str, Any]) -> dict[str, Any]:
    """Mean, least and largest over the matrices, along training."""
    (report,) = result["probe"]
    out = {}
    for quantity in ("isotropy", "sign_agreement", "spread", "sign_spectral_norm"):
        values = np.stack([np.asarray(matrix[quantity]) for matrix in report.values()])
        out[quantity] = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return out


def run(context: Context) -> Outcome:
    """Sweep the learning rate for every optimizer and seed, then fine-tune AdamW's best model with each."""
    budget = context.pick(
        smoke=_Budget(8, 8, GRID[1:3], (1e-3,), 4, 8, 2),
        laptop=_Budget(300, 100, WIDE_GRID, FINE_TUNING_GRID, 16, 512, 10),
        full=_Budget(3000, 1000, WIDE_GRID, FINE_TUNING_GRID, 64, 2048, 20),
    )
    config = context.pick(smoke=byte_lm.SMOKE_MODEL, laptop=byte_lm.MODEL, full=byte_lm.MODEL)
    model = byte_lm.byte_model(config)
    text = byte_lm.source_text(context)
    params = {seed: model.init(seed) for seed in context.seeds}
    factories = optimizers(params[context.seeds[0]])
    held_out = _held_out(text, budget, config.context_length)

    trainers = {
        name: Trainer(model, make, probe=_diagnose if name == "OLion" else (lambda state: {}), segments=budget.segments)
        for name, make in factories.items()
    }
    keys = list(itertools.product(context.seeds, budget.grid, factories))
    batches = {
        seed: byte_lm.draw_batches(text.train, seed, budget.steps, budget.batch_size, config.context_length)
        for seed in context.seeds
    }
    jobs = [Job(name, (params[seed], batches[seed], held_out, np.float32(rate), {})) for seed, rate, name in keys]
    results = dict(zip(keys, byte_lm.run_jobs(context, "sweep", trainers, jobs), strict=True))

    shown = GRID[2]
    sweep: dict[str, list[list[dict[str, Any]]]] = {
        name: [
            [
                _summary(results[seed, rate, name], keep_matrix=seed == context.seeds[0] and rate == shown)
                for seed in context.seeds
            ]
            for rate in budget.grid
        ]
        for name in factories
    }
    losses = {name: np.array([[cell["validation"] for cell in row] for row in rows]) for name, rows in sweep.items()}
    best_rate = {
        name: budget.grid[int(np.argmin(byte_lm.finite_or_inf(values.mean(1))))] for name, values in losses.items()
    }

    starts = {seed: results[seed, best_rate["AdamW"], "AdamW"]["params"] for seed in context.seeds}
    fine_tuned, second = _fine_tune(context, budget, trainers, starts, config.context_length, text)

    curves = {
        name: np.mean([results[seed, best_rate[name], name]["losses"] for seed in context.seeds], axis=0)
        for name in factories
    }
    middle = shown if shown in budget.grid else budget.grid[0]
    decades = {
        name: [byte_lm.stable_decades(budget.grid, values[:, seed], TOLERANCE) for seed in range(len(context.seeds))]
        for name, values in losses.items()
    }
    data = {
        "grid": budget.grid,
        "judged_grid": GRID,
        "steps": budget.steps,
        "tolerance": TOLERANCE,
        "initial_largest_entry": float(np.mean([np.abs(_first_mlp(start)).max() for start in params.values()])),
        "sweep": sweep,
        "best_rate": best_rate,
        "curves": curves,
        "stable_decades": decades,
        "shown_rate": middle,
        "diagnostics": _diagnostics(results[context.seeds[0], middle, "OLion"]),
        "fine_tuning": {"text": second, "grid": budget.fine_tuning_grid, "validation": fine_tuned},
    }
    return Outcome(measured=_measure(budget.grid, sweep, decades, fine_tuned), data=data, notes=_notes(data))


def _notes(data: Mapping[str, Any]) -> tuple[str, ...]:
    grid, best_rate, fine = data["grid"], data["best_rate"], data["fine_tuning"]
    edges = [name for name, rate in best_rate.items() if rate in (grid[0], grid[-1])]
    tuned = {name: np.min(byte_lm.finite_or_inf(rows).mean(1)) for name, rows in fine["validation"].items()}
    fine_edges = [
        name
        for name, rows in fine["validation"].items()
        if np.argmin(byte_lm.finite_or_inf(rows).mean(1)) in (0, len(fine["grid"]) - 1)
    ]
    each = lambda values, form: ", ".join(f"{name} {format(value, form)}" for name, value in values.items())  # noqa: E731
    return (
        "Lion is optax.scale_by_lion(0.95, 0.98) scaled to RMS 0.2; Muon is optax.contrib.muon with "
        "consistent_rms=0.2. Embeddings, head and norms are AdamW's in all of them, in optax.contrib.muon with "
        f"Nesterov momentum; '{PLAIN_MUON}' is our muon_direction beside the AdamW of the others. Gradients are "
        f"clipped at global norm 1, decay is {WEIGHT_DECAY}.",
        f"Best rates on the wide grid {', '.join(f'{rate:g}' for rate in grid)}: {each(best_rate, 'g')}; the claims "
        f"use {', '.join(f'{rate:g}' for rate in data['judged_grid'])} alone.",
        *(f"{name}'s best rate is at the edge of the wide grid: there may be a better one." for name in edges),
        f"Range of rates within {data['tolerance']} nats of an optimizer's own best, decades inside the wide grid: "
        f"{each({name: np.mean(values) for name, values in data['stable_decades'].items()}, '.2f')}.",
        f"Before training the largest entry of the {FIRST_MLP} is {data['initial_largest_entry']:.2f} (normal, "
        "deviation 1/√fan-in): at small rates it is what the ratios of largest entries compare.",
        f"Fine-tuning of AdamW's model on {fine['text']}, best mean over rates (nats per byte): {each(tuned, '.3f')}; "
        f"report only. Best rate at the edge of its grid: {', '.join(fine_edges) or 'none'}.",
    )


def _held_out(text: Text, budget: _Budget, context_length: int) -> np.ndarray:
    windows = byte_lm.even_windows(text.held_out, budget.windows, context_length)
    return windows.reshape(-1, min(16, budget.windows), context_length + 1)


def _fine_tune(
    context: Context,
    budget: _Budget,
    trainers: Mapping[str, Trainer],
    starts: Mapping[int, Any],
    context_length: int,
    text: Text,
) -> tuple[dict[str, np.ndarray], str]:
    """Returns the validation loss (rates, seeds) of each optimizer on the second text, and that text's name."""
    second, name_of_second = second_text(text)
    held_out = _held_out(second, budget, context_length)
    keys = list(itertools.product(trainers, budget.fine_tuning_grid, context.seeds))
    batches = {
        seed: byte_lm.draw_batches(second.train, seed, budget.fine_tuning_steps, budget.batch_size, context_length)
        for seed in context.seeds
    }
    jobs = [Job(name, (starts[seed], batches[seed], held_out, np.float32(rate), {})) for name, rate, seed in keys]
    results = byte_lm.run_jobs(context, "fine-tuning", trainers, jobs)
    losses = np.array([result["validation"] for result in results])
    shape = (len(trainers), len(budget.fine_tuning_grid), len(context.seeds))
    return dict(zip(trainers, losses.reshape(shape), strict=True)), name_of_second


def _measure(
    grid: Sequence[float],
    sweep: Mapping[str, list[list[dict[str, Any]]]],
    decades: Mapping[str, list[float]],
    fine_tuned: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    judged = [i for i, rate in enumerate(grid) if rate in GRID]

    def table(name: str, key: str) -> np.ndarray:
        return byte_lm.finite_or_inf([[cell[key] for cell in sweep[name][i]] for i in judged])

    loss = {name: table(name, "validation") for name in sweep}
    best = {name: values.min(0) for name, values in loss.items()}
    spread = {name: values.max(0) - values.min(0) for name, values in loss.items()}
    at = {grid[i]: k for k, i in enumerate(judged)}
    middle, top = at.get(1e-2, 0), at.get(3e-2, -1)

    def ratio(key: str, peer: str, row: int) -> np.ndarray:
        return table("OLion", key)[row] / table(peer, key)[row]

    tuned = {name: byte_lm.finite_or_inf(values).min(0) for name, values in fine_tuned.items()}
    return {
        "below_adamw": best["OLion"] - best["AdamW"],
        "below_lion": best["OLion"] - best["Lion"],
        "near_muon": best["OLion"] - best["Muon"],
        "near_plain_muon": best["OLion"] - best[PLAIN_MUON],
        "muon_at_1e-2": loss["OLion"][middle] - loss["Muon"][middle],
        "entries_at_1e-2": ratio("largest_entry", "Muon", middle),
        "entries_at_3e-2": ratio("largest_entry", "Muon", top),
        "spectral_at_1e-2": ratio("spectral_norm", "Lion", middle),
        "spectral_at_3e-2": ratio("spectral_norm", "Lion", top),
        "flatter_than_adamw": spread["OLion"] - spread["AdamW"],
        "stable_range": np.array(decades["OLion"]) - np.array(decades["AdamW"]),
        "fine_tuning": tuned["OLion"] - tuned["AdamW"],
    }


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """U-curves, learning curves, the final matrix's spectrum and entries, and OLion's assumptions along training."""
    figure.set_size_inches(12, 7.2)
    (curve, steps, fine), (singular, entries, theory) = figure.subplots(2, 3)
    grid = np.array(data["grid"], float)
    for name, rows in data["sweep"].items():
        loss = np.array([[cell["validation"] for cell in row] for row in rows], float)
        curve.plot(grid, loss.mean(1), "o-", ms=3, color=COLOURS[name], label=name)
        curve.fill_between(grid, loss.min(1), loss.max(1), color=COLOURS[name], alpha=0.2, lw=0)
        trace = np.array(data["curves"][name], float)
        width = max(1, len(trace) // 30)
        smooth = np.convolve(trace, np.ones(width) / width, "valid")
        label = f"{name}, {data['best_rate'][name]:g}"
        steps.plot(np.arange(len(smooth)) + width, smooth, color=COLOURS[name], lw=1.3, label=label)
        shown = next((cell for row in rows for cell in row if "entries" in cell), None)
        if shown is not None:
            values = np.array(shown["singular_values"], float)
            singular.plot(np.arange(1, len(values) + 1), values, color=COLOURS[name], label=name)
            edges, counts = (np.array(shown["entries"][key], float) for key in ("edges", "counts"))
            entries.stairs(
                counts / counts.sum() / (edges[1] - edges[0]), edges, color=COLOURS[name], label=name, lw=1.3
            )
        tuned = np.array(data["fine_tuning"]["validation"][name], float)
        fine.plot(data["fine_tuning"]["grid"], tuned.mean(1), "o-", ms=3, color=COLOURS[name], label=name)
    rates = data["judged_grid"]
    curve.axvspan(min(rates), max(rates), color="0.5", alpha=0.08, lw=0)
    curve.set(xscale="log", xlabel="peak learning rate (judged: shaded)", ylabel="validation loss, nats per byte")
    curve.set_title("Loss against learning rate")
    steps.set(xlabel="step", ylabel="training loss, smoothed", ylim=(None, 4))
    steps.set_title("At each optimizer's best rate")
    fine.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss, nats per byte")
    fine.set_title("Fine-tuning AdamW's model")
    singular.set(yscale="log", xlabel="index", ylabel="singular value")
    singular.set_title(f"The {FIRST_MLP} at the end, rate {data['shown_rate']:g}")
    entries.set(yscale="log", xlabel="|entry|", ylabel="density")
    entries.set_title("Its entries")
    for quantity, label, colour in (
        ("sign_agreement", "signs equal to the SVD's", "tab:purple"),
        ("isotropy", "isotropy constant e", "tab:brown"),
    ):
        series = {key: np.array(values, float) for key, values in data["diagnostics"][quantity].items()}
        at = np.arange(1, len(series["mean"]) + 1) * data["steps"] / len(series["mean"])
        theory.plot(at, series["mean"], "o-", ms=3, color=colour, label=label)
        theory.fill_between(at, series["low"], series["high"], color=colour, alpha=0.2, lw=0)
    theory.set(xlabel="step", ylim=(0, 1.05))
    theory.set_title("OLion's momentum, all matrices")
    for axes in (curve, steps, fine, singular, entries, theory):
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)


_SCALE_OF_PAPER = "lower loss than AdamW, Lion and Muon (GPT-2 124M to 770M, Llama-2-7B)"

EXPERIMENT = Experiment(
    name="optim/olion",
    title="OLion against AdamW, Lion and Muon over learning rates, on a small byte model",
    paper="OLion: Approaching the Hadamard Ideal by Intersecting Spectral and l_inf Implicit Biases (arXiv 2602.01105)",
    claims=(
        Claim(
            id="below_adamw",
            statement="Best validation loss over the grid, OLion - AdamW",
            paper=_SCALE_OF_PAPER,
            expected=at_most(-0.15, "nats"),
        ),
        Claim(
            id="below_lion",
            statement="Best validation loss over the grid, OLion - Lion",
            paper=_SCALE_OF_PAPER,
            expected=at_most(-0.15, "nats"),
        ),
        Claim(
            id="near_muon",
            statement="Best validation loss over the grid, OLion - Muon",
            paper=_SCALE_OF_PAPER,
            expected=at_most(0.02, "nats"),
        ),
        Claim(
            id="near_plain_muon",
            statement=f"Best validation loss over the grid, OLion - {PLAIN_MUON} for the rest",
            paper=_SCALE_OF_PAPER,
            expected=at_most(0.02, "nats"),
        ),
        Claim(
            id="muon_at_1e-2",
            statement="Validation loss at rate 0.01, OLion - Muon",
            paper="",
            expected=at_most(0.0, "nats"),
        ),
        *(
            Claim(
                id=f"entries_at_{rate}",
                statement=f"Largest entry of the {FIRST_MLP} at rate {float(rate):g}, OLion / Muon",
                paper="OLion keeps entries small (l_inf bias)",
                expected=at_most(0.85),
            )
            for rate in ("1e-2", "3e-2")
        ),
        *(
            Claim(
                id=f"spectral_at_{rate}",
                statement=f"Spectral norm of the {FIRST_MLP} at rate {float(rate):g}, OLion / Lion",
                paper="OLion keeps the spectrum small (spectral bias)",
                expected=at_most(0.4),
            )
            for rate in ("1e-2", "3e-2")
        ),
        Claim(
            id="flatter_than_adamw",
            statement="Worst minus best validation loss over the grid, OLion - AdamW",
            paper="",
            expected=at_most(0.0, "nats"),
        ),
        Claim(
            id="stable_range",
            statement=f"Width of the range of rates within {TOLERANCE} nats of the own best, OLion - AdamW",
            paper="",
            expected=at_least(0.0, "decades"),
        ),
        Claim(
            id="fine_tuning",
            statement="Fine-tuning AdamW's model on a second text, best loss over rates, OLion - AdamW (report only)",
            paper="GSM8K after fine-tuning: OLion 60.04, AdamW 57.99, Muon 57.24",
            expected={},
        ),
    ),
    run=run,
    plot=plot,
    accepts_data=True,
)
