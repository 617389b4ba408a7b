"""Does the best learning rate of a small mixture of experts stay the best when width, depth or experts grow?

Part A trains the reduced model (residual expert layers that predict a byte from the eight before it) over a grid of
learning rates at a base size and at larger ones, each larger in one dial, under four parameterizations. Part B does the
same with the language model, for width. Part C compares the first losses of all sizes at the transferred rate, part D
the initial scale of the experts' last matrices, and a coordinate check shows what moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.context import Context
from experiments.optim.byte_lm import draw_batches, source_text
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.lm import LMConfig
from jaxlib_icml.lm.parameterization import moe_shape, transformer_probe
from jaxlib_icml.moe import UNIT_CONSTANTS, BaseSpec, MoEShape, transfer_optimizer
from jaxlib_icml.moe.coord_check import Probe, coord_check, lr_sweep, residual_moe_probe

POSITIONS = 8
TUNING_SEED = 1000
SCHEMES = ("moe_mup", "completep", "mup", "sp")
CHECKS = {
    "Adam": ("moe_mup", "adam"),
    "OLion": ("moe_mup", "olion"),
    "Muon": ("moe_mup", "muon"),
    "Adam, sp": ("sp", "adam"),
}
EARLY = 50  # steps over which losses should collapse
LAST = 20  # steps whose mean is a run's loss; every batch is new, so they are losses on unseen text


class _Budget(NamedTuple):
    """Steps, rows and grid of parts A and D; sizes of the dials; steps, rows, grid and widths of part B."""

    steps: int
    rows: int
    grid: tuple[float, ...]
    dials: tuple[str, ...]
    alphas: tuple[int, ...]
    lm_steps: int
    lm_rows: int
    lm_grid: tuple[float, ...]
    lm_widths: tuple[int, int]
    lm_embeddings: tuple[float, ...]
    check_widths: tuple[int, ...]
    schemes: tuple[str, ...] = SCHEMES
    checks: tuple[str, ...] = tuple(CHECKS)


def _octaves(first: int, last: int) -> tuple[float, ...]:
    return tuple(2.0**k for k in range(first, last + 1))


BASE_SHAPE = MoEShape(
    width=32, num_layers=2, expert_width=64, num_experts=4, num_active=1, head_dim=8, vocab_size=256, context=POSITIONS
)
DIALS: dict[str, MoEShape] = {
    "base": BASE_SHAPE,
    "width 96": replace(BASE_SHAPE, width=96, expert_width=192),
    "width 192": replace(BASE_SHAPE, width=192, expert_width=384),
    "8 layers": replace(BASE_SHAPE, num_layers=8),
    "16 experts": replace(BASE_SHAPE, num_experts=16, num_active=4),
    "expert width 256": replace(BASE_SHAPE, expert_width=256),
}


def _sweep(
    probe: Probe,
    base: BaseSpec,
    shape: MoEShape,
    scheme: str,
    grid: Sequence[float],
    batches: Any,
    steps: int,
    seeds: Sequence[int],
) -> np.ndarray:
    """Loss curves (rates, seeds, steps), half of the steps warm-up and the rest constant, as in the paper."""

    def optimizer(rate: Any) -> Any:
        warm = lambda count: rate * jnp.minimum(1.0, (count + 1) / max(1, steps // 2))  # noqa: E731
        return transfer_optimizer(base, shape, schedule=warm, scheme=scheme)

    return np.asarray(lr_sweep(probe, optimizer, grid, batches, seeds=seeds), np.float64)


def _final(curves: np.ndarray) -> np.ndarray:
    """Mean loss of the last steps over seeds, by rate; a run that diverged counts as infinite."""
    last = curves[..., -min(LAST, curves.shape[-1]) :].mean(axis=(-1, -2))
    return np.where(np.isfinite(last), last, np.inf)


def _regret(losses: Mapping[str, np.ndarray], dial: str, base: str = "base") -> float:
    """What the base's best rate costs at another size, in nats."""
    return float(losses[dial][int(np.argmin(losses[base]))] - losses[dial].min())


def _octaves_off(losses: Mapping[str, np.ndarray], dial: str, base: str = "base") -> int:
    return abs(int(np.argmin(losses[dial])) - int(np.argmin(losses[base])))


def _collapse(curves: Mapping[str, np.ndarray], rate: int) -> float:
    """Largest distance of two sizes' early losses at one rate, relative to the drop at the base."""
    early = {name: curve[rate].mean(axis=0)[:EARLY] for name, curve in curves.items()}
    drop = early["base"][0] - early["base"][-1]
    return float(max(np.abs(curve - early["base"]).max() for curve in early.values()) / drop)


def run(context: Context) -> Outcome:
    """All parts."""
    budget = context.pick(
        smoke=_Budget(
            steps=4,
            rows=16,
            grid=(0.01, 0.02),
            dials=("width 96",),
            alphas=(1,),
            lm_steps=3,
            lm_rows=2,
            lm_grid=(0.01, 0.02),
            lm_widths=(32, 48),
            lm_embeddings=(0.02,),
            check_widths=(16, 32),
            schemes=("moe_mup", "sp"),
            checks=("Adam",),
        ),
        laptop=_Budget(
            200,
            256,
            _octaves(-9, -2),
            tuple(DIALS)[1:],
            (1, 2, 4, 8, 16, 32),
            120,
            8,
            _octaves(-11, -4),
            (64, 256),
            (0.02, 0.1, 0.3, 1.0),
            (32, 64, 128, 256),
        ),
        full=_Budget(
            2000,
            4096,
            _octaves(-11, -1),
            tuple(DIALS)[1:],
            (1, 2, 4, 8, 16, 32, 64),
            2000,
            64,
            _octaves(-11, -3),
            (128, 1024),
            (0.02, 0.1, 0.3, 1.0),
            (32, 64, 128, 256, 512, 1024),
        ),
    )
    text = source_text(context).train
    batches = jnp.asarray(draw_batches(text, 1, budget.steps, budget.rows, POSITIONS), jnp.int32)
    base = BaseSpec(BASE_SHAPE, constants=UNIT_CONSTANTS)

    curves: dict[str, dict[str, np.ndarray]] = {scheme: {} for scheme in budget.schemes}
    dials = ("base", *budget.dials)
    with context.progress("A: rates", len(budget.schemes) * len(dials)) as bar:
        for scheme in budget.schemes:
            for dial in dials:
                shape = DIALS[dial]
                probe = residual_moe_probe(base, shape, scheme=scheme, positions=POSITIONS)
                found = _sweep(probe, base, shape, scheme, budget.grid, batches, budget.steps, context.seeds)
                curves[scheme][dial] = found
                bar.advance(best=float(_final(found).min()))
    losses = {scheme: {dial: _final(found) for dial, found in of.items()} for scheme, of in curves.items()}
    best = int(np.argmin(losses["moe_mup"]["base"]))
    collapse = _collapse(curves["moe_mup"], best)

    language, embeddings = _language_model(context, budget, text)
    down = _down_init(context, budget, base, batches, budget.grid[best])

    checks: dict[str, Any] = {}
    with context.progress("coordinate check", len(budget.checks)) as bar:
        shapes = [replace(BASE_SHAPE, width=n, expert_width=2 * n) for n in budget.check_widths]
        for name in budget.checks:
            scheme, optimizer = CHECKS[name]
            check = coord_check(
                partial(residual_moe_probe, base, scheme=scheme, positions=POSITIONS),
                base,
                shapes,
                list(batches[:5]),
                seeds=context.seeds,
                scheme=scheme,
                optimizer=optimizer,
                learning_rate=2**-6,
            )
            checks[name] = {"slopes": check.slopes, "rms": {k: v.tolist() for k, v in check.rms_change.items()}}
            bar.advance()

    ours, standard = losses["moe_mup"], losses["sp"]
    wide = [dial for dial in budget.dials if dial.startswith("width")]
    deep = [dial for dial in budget.dials if "layers" in dial]
    lm_ours, lm_standard = (_regret(language[scheme], "wide") for scheme in ("moe_mup", "sp"))
    measured = {
        "regret": max(_regret(ours, dial) for dial in budget.dials),
        "octaves": float(max(_octaves_off(ours, dial) for dial in budget.dials)),
        "sp_regret": max(_regret(standard, dial) for dial in wide),
        "better": max(float(ours[dial].min() - standard[dial].min()) for dial in (*wide, *deep)),
        "collapse": collapse,
        "down": max(down["completep"]) - max(down["moe_mup"]),
        "lm_regret": lm_ours,
        "lm_sp_regret": lm_standard,
        "lm_better": float(language["moe_mup"]["wide"].min() - language["sp"]["wide"].min()),
        "coordinates": max(abs(slope) for slope in checks["Adam"]["slopes"].values()),
    }
    return Outcome(
        measured=measured,
        data={
            "budget": budget._asdict(),
            "losses": {scheme: {dial: list(row) for dial, row in of.items()} for scheme, of in losses.items()},
            "regrets": {scheme: {dial: _regret(of, dial) for dial in budget.dials} for scheme, of in losses.items()},
            "early": {dial: found[best].mean(axis=0)[:EARLY] for dial, found in curves["moe_mup"].items()},
            "language model": {scheme: {k: list(v) for k, v in of.items()} for scheme, of in language.items()},
            "embeddings": embeddings,
            "down": down,
            "checks": checks,
        },
        notes=(
            f"Losses are means of the last {LAST} steps (new text in every step) and over seeds; learning rates are "
            "octaves. Regrets of means over seeds, so that they have one value.",
            f"Part B's embeddings start with the standard deviation that was best at the base on another seed: "
            f"{embeddings['moe_mup']:g} for ours, {embeddings['sp']:g} for the standard parameterization.",
            "The reduced model and part B have unit constants; the text is the standard library's source (the paper "
            "used FineWeb and C4).",
        ),
    )


def _language_model(
    context: Context, budget: _Budget, text: np.ndarray
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:
    """Part B: losses by rate of the language model at two widths, and the scale of embeddings that its base wants."""
    length = context.pick(smoke=16, laptop=128, full=1024)

    def batches(seed: int) -> dict[str, Any]:
        drawn = draw_batches(text, seed, budget.lm_steps, budget.lm_rows, length).astype(np.int32)
        return {"tokens": jnp.asarray(drawn[..., :-1]), "targets": jnp.asarray(drawn[..., 1:])}

    narrow, wide = (
        LMConfig(
            vocab_size=256,
            context_length=length,
            width=width,
            num_layers=2,
            num_heads=width // 16,
            num_experts=4,
            num_active_experts=1,
            expert_width=2 * width,
            activation="gelu",
            scan_layers=True,
        )
        for width in budget.lm_widths
    )

    def sweep(config: LMConfig, base: BaseSpec, scheme: str, batches: Any, seed: int) -> np.ndarray:
        probe, shape = transformer_probe(config, base, scheme), moe_shape(config)
        return _final(_sweep(probe, base, shape, scheme, budget.lm_grid, batches, budget.lm_steps, (seed,)))

    found: dict[str, dict[str, np.ndarray]] = {}
    chosen: dict[str, float] = {}
    with context.progress("B: language model", 2 * (2 + len(budget.lm_embeddings))) as bar:
        for scheme in ("moe_mup", "sp"):
            trials = {}
            for std in budget.lm_embeddings:
                base = BaseSpec(moe_shape(narrow), constants=UNIT_CONSTANTS, embedding_std=std)
                trials[std] = float(sweep(narrow, base, scheme, batches(TUNING_SEED), TUNING_SEED).min())
                bar.advance(loss=trials[std])
            chosen[scheme] = min(trials, key=lambda std: trials[std])
            base = BaseSpec(moe_shape(narrow), constants=UNIT_CONSTANTS, embedding_std=chosen[scheme])
            found[scheme] = {}
            for name, config in (("base", narrow), ("wide", wide)):
                found[scheme][name] = sweep(config, base, scheme, batches(2), context.seeds[0])
                bar.advance(best=float(found[scheme][name].min()))
    return found, chosen


def _down_init(context: Context, budget: _Budget, base: BaseSpec, batches: Any, rate: float) -> dict[str, list[float]]:
    """Part D: loss at one rate against relative expert width, above the least over widths, for both initial scales."""
    found: dict[str, list[float]] = {}
    with context.progress("D: initial scale", 2 * len(budget.alphas)) as bar:
        for scheme in ("moe_mup", "completep"):
            row = []
            for alpha in budget.alphas:
                shape = replace(BASE_SHAPE, expert_width=alpha * BASE_SHAPE.width)
                probe = residual_moe_probe(base, shape, scheme=scheme, positions=POSITIONS)
                curves = _sweep(probe, base, shape, scheme, (rate,), batches, budget.steps, context.seeds)
                row.append(float(_final(curves)[0]))
                bar.advance(loss=row[-1])
            found[scheme] = row
    lowest = min(min(row) for row in found.values())
    return {scheme: [loss - lowest for loss in row] for scheme, row in found.items()}


_COLOURS = {"moe_mup": "tab:blue", "completep": "tab:green", "mup": "tab:orange", "sp": "tab:red"}


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """Loss against learning rate for every dial; the collapse; the initial scale; the coordinate check."""
    axes = figure.subplots(3, 3).flat
    budget = data["budget"]
    dials = ["base", *budget["dials"]]
    for ax, dial in zip(axes, dials, strict=False):
        for scheme, losses in data["losses"].items():
            rates, values = np.log2(budget["grid"]), np.array(losses[dial], float)
            ax.plot(rates, values, "o-", ms=3, lw=1, color=_COLOURS[scheme], label=scheme)
            start = rates[int(np.nanargmin(np.array(losses["base"], float)))]
            ax.axvline(start, color=_COLOURS[scheme], lw=0.6, ls=":")
        ax.set_title(dial)
        finite = [v for losses in data["losses"].values() for v in losses[dial] if np.isfinite(v)]
        ax.set_ylim(min(finite) - 0.02, min(finite) + 0.5)
        ax.set_xlabel("log2 rate (dotted: best at base)")
    axes = list(figure.axes)
    axes[0].legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("nats per byte")
    for dial, curve in data["early"].items():
        axes[6].plot(curve, lw=1, label=dial)
    axes[6].set(title="first steps, transferred rate", xlabel="step")
    axes[6].legend(frameon=False, fontsize=6)
    for scheme, rows in data["language model"].items():
        for name, style in (("base", ":"), ("wide", "-")):
            axes[7].plot(np.log2(budget["lm_grid"]), rows[name], style, color=_COLOURS[scheme], marker="o", ms=3, lw=1)
    axes[7].set(
        title="language model, {} (dotted) and {}".format(*budget["lm_widths"]), xlabel="log2 of the learning rate"
    )
    for scheme, row in data["down"].items():
        axes[8].plot(budget["alphas"], row, "o-", ms=3, lw=1, color=_COLOURS[scheme], label=scheme)
    axes[8].set(title="loss by expert width", xlabel="alpha = m / n", xscale="log")
    for ax in axes:
        ax.title.set_fontsize(8)
        ax.xaxis.label.set_fontsize(7)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)


EXPERIMENT = Experiment(
    name="moe/parameterization",
    title="Learning rates carried over width, depth, experts and expert width: our rules, muP and the standard",
    paper="Hyperparameter Transfer with Mixture-of-Experts Layers (arXiv 2601.20205)",
    claims=(
        Claim(
            "regret",
            "The base's best rate costs at most 0.02 nats at every other size",
            "best rates coincide from 38M to 2B parameters",
            at_most(0.02, "nats"),
        ),
        Claim("octaves", "The best rates differ by at most one octave", "", at_most(1.0, "octaves")),
        Claim(
            "sp_regret",
            "Under the standard parameterization the base's best rate costs at least 0.1 nats at some width",
            "",
            at_least(0.1, "nats"),
        ),
        Claim(
            "better",
            "Its best loss is above ours for width and depth (ours - theirs, worst case)",
            "",
            at_most(0.0, "nats"),
        ),
        Claim(
            "collapse",
            "The first 50 losses of all sizes agree within 2 % of their drop at the transferred rate",
            "curves collapse",
            at_most(0.02),
        ),
        Claim(
            "down",
            "Over relative expert widths 1 to 32 the worst loss at one rate is higher with fan-in initial scale",
            "",
            at_least(0.0, "nats"),
        ),
        Claim("lm_regret", "Language model, four times as wide: regret of our rules", "", at_most(0.02, "nats")),
        Claim("lm_sp_regret", "and of the standard parameterization", "", at_least(0.1, "nats")),
        Claim("lm_better", "and our best loss is the lower one (ours - theirs)", "", at_most(0.0, "nats")),
        Claim(
            "coordinates",
            "Five Adam steps move all activations alike at every width (largest slope of log change)",
            "",
            at_most(0.15),
        ),
    ),
    run=run,
    plot=plot,
    seeds=3,
    accepts_data=True,
)
