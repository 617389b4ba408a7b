"""Is a small trained mixture of experts a better start for a larger one than nothing?

A byte model of two layers and four experts is trained at a constant learning rate, with a decay at the end. At
several points of that training it is grown to four layers and eight experts, twice as many active, and trained on for
the same number of steps over the text that follows. Beside it: the large model from scratch for as many operations, the
small one going on, other ways to add layers and experts, and other noise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from scipy import stats

from experiments.context import Context
from experiments.optim.byte_lm import draw_batches, even_windows, source_text
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.lm import LMConfig, Transformer, split_model
from jaxlib_icml.lm.growth import cliff_index, flops_per_token, grow, grown_config, norm_profile
from jaxlib_icml.lm.loss import loss_fn
from jaxlib_icml.moe.growth import EXPERT_AXES
from jaxlib_icml.nn import tree_leaves

TUNING_SEED = 1000
DECAY = 0.2  # of a training, at its end
SEGMENT = 20  # steps of one compiled call


class _Budget(NamedTuple):
    """Steps of the base and after it; rows of a batch, their length; learning rates to try; where the base is grown."""

    base_steps: int
    extra_steps: int
    batch: int
    context: int
    grid: tuple[float, ...]
    fractions: tuple[float, ...]
    held_out: int


class _Program(NamedTuple):
    """A model, and functions of its state: `train(carry, batches, rates)` and `validate(state, windows)`."""

    config: LMConfig
    train: Any
    validate: Any

    def init(self, seed: int) -> nnx.State:
        return nnx.state(Transformer(self.config, rngs=nnx.Rngs(seed)))


def _program(config: LMConfig) -> _Program:
    graphdef, _, rest = split_model(Transformer(config, rngs=nnx.Rngs(0)))

    def optimizer(rate: Any) -> optax.GradientTransformation:
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)

    def losses(params: Any, windows: Any) -> Any:
        tokens = windows.astype(jnp.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        loss, aux = loss_fn(graphdef, nnx.merge_state(params, rest), batch)
        return loss, aux.nll_sum / aux.weight_sum

    @jax.jit
    def train(carry: Any, batches: Any, rates: Any) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, opt_state = carry
            windows, rate = inputs
            grads, nats = jax.grad(losses, has_aux=True)(params, windows)
            updates, opt_state = optimizer(rate).update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), nats

        return lax.scan(step, carry, (batches, rates))

    @jax.jit
    def validate(params: Any, windows: Any) -> Any:
        return jnp.mean(lax.map(lambda rows: losses(params, rows)[1], windows))

    return _Program(config, train, validate)


def _fresh(params: Any) -> Any:
    """Parameters with the state of an optimizer that has seen nothing."""
    return params, optax.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1).init(params)


def _rates(peak: float, steps: int, warmup: int) -> np.ndarray:
    """Warm-up, constant, then linear to a tenth over the last fifth."""
    at = np.arange(steps)
    decay = np.clip((steps - at) / (DECAY * steps), 0.1, 1.0)
    return peak * np.minimum((at + 1) / warmup, 1.0) * decay


def _train(
    program: _Program, carry: Any, batches: np.ndarray, rates: np.ndarray, keep: Sequence[int] = ()
) -> tuple[Any, np.ndarray, dict[int, Any]]:
    """The carry after all steps, the losses, and the parameters after the steps `keep`."""
    losses, kept = [], {0: carry[0]} if 0 in keep else {}
    for start in range(0, len(rates), SEGMENT):
        stop = min(start + SEGMENT, len(rates))
        carry, found = program.train(carry, batches[start:stop], jnp.asarray(rates[start:stop], jnp.float32))
        losses.append(np.asarray(found))
        if stop in keep:
            kept[stop] = carry[0]
    return carry, np.concatenate(losses), kept


def _random_experts(state: Any, fresh: Any) -> Any:
    """Copied experts (the second half) replaced by new ones."""

    def choose(parts: tuple[str, ...], old: Any, new: Any) -> Any:
        axis = next((axis for end, axis in EXPERT_AXES.items() if parts[-len(end) :] == end), None)
        if axis is None or parts[-1] == "expert_bias":
            return old
        half = old.shape[axis] // 2
        return jnp.concatenate([jnp.split(old, [half], axis)[0], jnp.split(new, [half], axis)[1]], axis)

    pairs = zip(tree_leaves(state), tree_leaves(fresh), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(state), [choose(old.parts, old.value, new.value) for old, new in pairs]
    )


def _starts(small: LMConfig, key: Any, params: Any, fresh: Any, rest: Any) -> dict[str, Any]:
    """The ways to grow the base that are compared at one point of its training, all of the same architecture."""
    state = nnx.merge_state(params, rest)
    ways: dict[str, dict[str, Any]] = {
        "ours": {},
        "stacking": {"method": "stack"},
        "zero copies": {"method": "interpose_zero"},
        "noise 0": {"noise": 0.0},
        "noise 0.1": {"noise": 0.1},
        "noise 0.5": {"noise": 0.5},
    }
    grown = {name: grow(state, small, key=key, **options)[0] for name, options in ways.items()}
    grown["random experts"] = _random_experts(grown["noise 0"], fresh)
    return {name: nnx.split_state(new, nnx.Param, ...)[0] for name, new in grown.items()}


def _order_difference(state: Any, small: LMConfig, key: Any) -> float:
    """Largest difference of a parameter between the two orders of growth."""
    one, other = (grow(state, small, key=key, order=order)[0] for order in ("depth_first", "width_first"))
    gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), one, other)
    return float(max(jax.tree.leaves(gaps)))


def run(context: Context) -> Outcome:
    """All starts for all seeds."""
    budget = context.pick(
        smoke=_Budget(50, 20, 2, 16, (3e-3,), (0.0, 0.5), 4),
        laptop=_Budget(800, 320, 16, 64, (1.5e-3, 3e-3, 6e-3, 1.2e-2), (0.0, 0.1, 0.3, 0.6, 0.9), 256),
        full=_Budget(40_000, 10_000, 64, 512, (5e-4, 1e-3, 2e-3, 4e-3), (0.0, 0.1, 0.3, 0.6, 0.9), 2048),
    )
    text = source_text(context)
    small = LMConfig(
        vocab_size=256,
        context_length=budget.context,
        width=64,
        num_layers=2,
        num_heads=4,
        num_experts=4,
        num_active_experts=1,
        expert_width=128,
        moe_gate="softmax",
        activation="gelu",
    )
    large = grown_config(small)[0]
    programs = {"small": _program(small), "large": _program(large)}
    costs = {name: flops_per_token(program.config, backward=True) for name, program in programs.items()}
    windows = even_windows(text.held_out, budget.held_out, budget.context)
    held_out = jnp.asarray(windows.reshape(-1, min(64, len(windows)), budget.context + 1))

    constant = int((1 - DECAY) * budget.base_steps)
    points = {f: SEGMENT * round(f * constant / SEGMENT) for f in budget.fractions}
    annealed = SEGMENT * round((constant + 0.6 * (budget.base_steps - constant)) / SEGMENT)
    # As many operations in all as the base and the steps after its growth.
    whole = budget.extra_steps + round(points[max(points)] * costs["small"] / costs["large"])
    longer = round(budget.extra_steps * costs["large"] / costs["small"])

    def stream(seed: int, start: int, steps: int) -> np.ndarray:
        """Batches of a part of a seed's text; every training of the seed sees the same at the same place."""
        total = budget.base_steps + max(whole, longer)
        return draw_batches(text.train, seed, total, budget.batch, budget.context)[start : start + steps]

    rates: dict[str, float] = {}
    tuning: dict[str, list[float]] = {}
    trials = {"small": budget.base_steps, "large": budget.extra_steps}
    with context.progress("learning rates", len(budget.grid) * len(trials)) as bar:
        for name, steps in trials.items():
            row = []
            for peak in budget.grid:
                program = programs[name]
                start = _fresh(nnx.split_state(program.init(TUNING_SEED), nnx.Param, ...)[0])
                batches = stream(TUNING_SEED, 0, steps)
                carry = _train(program, start, batches, _rates(peak, steps, max(1, steps // 20)))[0]
                row.append(float(program.validate(carry[0], held_out)))
                bar.advance(loss=row[-1])
            tuning[name] = row
            rates[name] = budget.grid[int(np.argmin(np.where(np.isfinite(row), row, np.inf)))]
    context.log(f"learning rates {rates}")

    finals: dict[str, list[float]] = {}
    jumps: dict[str, list[float]] = {}
    curves: dict[str, np.ndarray] = {}
    measured: dict[str, list[float]] = {}
    profiles: dict[str, Any] = {}

    def finish(seed: int, name: str, params: Any, at: int, steps: int, peak: float, size: str = "large") -> None:
        """Train from a start to the end of its steps, re-warmed over a hundredth of them."""
        program = programs[size]
        warmup = max(1, steps // (20 if at == 0 and "scratch" in name else 100))
        jumps.setdefault(name, []).append(float(program.validate(params, held_out)))
        carry, losses, _ = _train(program, _fresh(params), stream(seed, at, steps), _rates(peak, steps, warmup))
        finals.setdefault(name, []).append(float(program.validate(carry[0], held_out)))
        curves.setdefault(name, losses)

    names = [f"{f:.0%}" for f in points]
    variants = 6
    with context.progress("runs", len(context.seeds) * (len(points) + variants + 5)) as bar:
        for seed in context.seeds:
            program = programs["small"]
            first, rest = nnx.split_state(program.init(seed), nnx.Param, ...)
            keep = {*points.values(), annealed, budget.base_steps}
            schedule = _rates(rates["small"], budget.base_steps, max(1, budget.base_steps // 20))
            _, losses, kept = _train(program, _fresh(first), stream(seed, 0, budget.base_steps), schedule, tuple(keep))
            curves.setdefault("base", losses)
            key = jax.random.fold_in(jax.random.key(7), seed)
            bar.advance(loss=float(program.validate(kept[budget.base_steps], held_out)))
            fresh = programs["large"].init(seed + 1)
            fresh_params = nnx.split_state(fresh, nnx.Param, ...)[0]
            extra, peak = budget.extra_steps, rates["small"]
            for name, at in (*zip(names, points.values(), strict=True), ("annealing", annealed)):
                start = grow(nnx.merge_state(kept[at], rest), small, key=key)[0]
                finish(seed, name, nnx.split_state(start, nnx.Param, ...)[0], at, extra, peak)
                bar.advance(loss=finals[name][-1])
            last = max(points.values())
            before = float(program.validate(kept[last], held_out))
            jumps.setdefault("before", []).append(before)
            starts = _starts(small, key, kept[last], fresh, rest)
            for name, params in starts.items():
                if name != "ours":
                    finish(seed, name, params, last, extra, peak)
                    bar.advance(loss=finals[name][-1])
            finish(seed, "from scratch", fresh_params, 0, extra, rates["large"])
            bar.advance(loss=finals["from scratch"][-1])
            finish(seed, "from scratch, all operations", fresh_params, 0, whole, rates["large"])
            bar.advance(loss=finals["from scratch, all operations"][-1])
            finish(seed, "small, as many operations", kept[last], last, longer, peak, "small")
            bar.advance(loss=finals["small, as many operations"][-1])

            state = nnx.merge_state(kept[last], rest)
            measured.setdefault("order", []).append(_order_difference(state, small, key))
            base_profile = norm_profile(state)
            deeper = {
                way: norm_profile(grow(state, small, key=key, width=1, method=way)[0]) for way in ("interpose", "stack")
            }
            cliffs = {way: max(cliff_index(profile, base_profile).values()) for way, profile in deeper.items()}
            measured.setdefault("cliff", []).append(cliffs["interpose"] - cliffs["stack"])
            profiles = {
                "base": {k: v.tolist() for k, v in base_profile.items()},
                "interposition": {k: v.tolist() for k, v in deeper["interpose"].items()},
                "stacking": {k: v.tolist() for k, v in deeper["stack"].items()},
            }

    latest = names[-1]
    sunk = [points[f] * costs["small"] * budget.batch * budget.context for f in budget.fractions]
    for i, ours in enumerate(finals[latest]):
        of_seed = [finals[name][i] for name in names]
        measured.setdefault("sunk", []).append(float(stats.spearmanr(sunk, of_seed).statistic))
        measured.setdefault("scratch", []).append(ours - finals["from scratch"][i])
        measured.setdefault("noise", []).append(finals["noise 0.5"][i] - ours)
        measured.setdefault("random", []).append(finals["random experts"][i] - ours)
        measured.setdefault("all", []).append(ours - finals["from scratch, all operations"][i])
        measured.setdefault("small", []).append(ours - finals["small, as many operations"][i])
        measured.setdefault("jump", []).append(jumps[latest][i] - jumps["before"][i])
        measured.setdefault("annealing", []).append(finals["annealing"][i] - ours)
    return Outcome(
        measured=measured,
        data={
            "budget": budget._asdict(),
            "learning_rates": rates,
            "tuning": tuning,
            "sunk": sunk,
            "points": list(points.values()),
            "names": names,
            "steps": {"whole": whole, "longer": longer, "annealed": annealed},
            "costs": costs,
            "finals": finals,
            "jumps": jumps,
            "curves": {name: curve.tolist() for name, curve in curves.items()},
            "profiles": profiles,
        },
        notes=(
            f"Learning rates {rates['small']:g} (base and all that grows from it) and {rates['large']:g} (from "
            f"scratch), the best of {', '.join(f'{rate:g}' for rate in budget.grid)} on another seed.",
            "Optimizer states begin anew after a growth; every training decays over its last fifth.",
            "With two layers, stacking's seam is a step of the base backwards: the two ways cannot differ in norms.",
            "All variants of growth start from the base at "
            f"{latest} of its constant phase; immediate losses are in the data (`jumps`).",
        ),
    )


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """Final loss against sunk operations; all starts; training curves; norms of layers."""
    axes = figure.subplots(2, 2)
    finals = data["finals"]
    sunk = np.array(data["sunk"]) / 1e12
    for i in range(len(finals[data["names"][0]])):
        axes[0, 0].plot(sunk, [finals[name][i] for name in data["names"]], "o-", ms=4, lw=1, color="tab:blue")
    scratch = np.mean(finals["from scratch"])
    axes[0, 0].axhline(scratch, color="tab:red", lw=1, label="from scratch, as many steps")
    axes[0, 0].axhline(np.mean(finals["from scratch, all operations"]), color="tab:red", lw=1, ls=":", label="in all")
    axes[0, 0].axhline(np.mean(finals["small, as many operations"]), color="0.4", lw=1, ls="--", label="small goes on")
    axes[0, 0].set(xlabel="sunk operations (10^12)", ylabel="nats per byte", title="final loss of the grown model")
    axes[0, 0].legend(frameon=False, fontsize=7)
    order = sorted(finals, key=lambda name: np.mean(finals[name]))
    for y, name in enumerate(order):
        axes[0, 1].plot(finals[name], [y] * len(finals[name]), "o", ms=4, color="tab:blue")
        jump = data["jumps"].get(name, [np.nan])
        axes[0, 1].plot(jump, [y] * len(jump), "x", ms=4, color="0.6")
    axes[0, 1].set_yticks(range(len(order)), order, fontsize=7)
    low = min(map(min, finals.values()))
    axes[0, 1].set(xlim=(low - 0.05, low + 1.2), xlabel="nats per byte", title="all starts (grey: before training on)")
    kernel = np.ones(10) / 10
    for name in ("from scratch", data["names"][1], data["names"][-1], "random experts", "noise 0.5"):
        if name in data["curves"] and len(data["curves"][name]) >= 10:
            axes[1, 0].plot(np.convolve(data["curves"][name], kernel, "valid"), lw=1, label=name)
    axes[1, 0].set(xlabel="step after the growth", ylabel="training loss", title="training curves of one seed")
    axes[1, 0].set_ylim(low - 0.05, low + 1.2)
    axes[1, 0].legend(frameon=False, fontsize=7)
    family = "moe.experts.up.kernel"
    for name, profile in data["profiles"].items():
        axes[1, 1].plot(profile[family], "o-", ms=4, lw=1, label=name)
    axes[1, 1].set(xlabel="layer", ylabel="root mean square", title=family)
    axes[1, 1].legend(frameon=False, fontsize=7)
    for ax in axes.flat:
        ax.title.set_fontsize(9)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)


EXPERIMENT = Experiment(
    name="moe/growth",
    title="Orthogonal growth of a mixture of experts against training from scratch, and other ways to grow",
    paper="Beyond Sunk Costs: Boosting LLM Pre-training Efficiency via Orthogonal Growth (arXiv 2510.08008)",
    claims=(
        Claim(
            "sunk",
            "The later the growth before annealing, the lower the final loss (Spearman correlation)",
            "38.79 (start 0k) to 48.99 (88k) mean accuracy",
            at_most(-0.9),
        ),
        Claim(
            "scratch",
            "Grown late, the model ends below one from scratch with as many further operations",
            "64.17 against 57.99 mean accuracy",
            at_most(-0.1, "nats"),
        ),
        Claim("noise", "Noise of 0.5 in copied experts ends higher than 0.01", "", at_least(0.03, "nats")),
        Claim("random", "New random experts end higher than copies", "", at_least(0.03, "nats")),
        Claim(
            "order",
            "The order of depth and width does not matter (largest difference of a parameter)",
            "no difference in quality",
            at_most(0.0),
        ),
        Claim("cliff", "Interposition's largest step of norms is at most stacking's (difference)", "", at_most(0.0)),
        Claim("jump", "Growth itself costs less than 0.5 nats before training goes on", "", at_most(0.5, "nats")),
        Claim("all", "It ends below a model from scratch with as many operations in all", "", at_most(0.0, "nats")),
        Claim("small", "and below the small model going on for as many operations", "", at_most(0.0, "nats")),
        Claim(
            "annealing",
            "Growing within the decay ends higher than shortly before it",
            "48.52 after 48.99 mean accuracy",
            at_least(0.0, "nats"),
        ),
    ),
    run=run,
    plot=plot,
    seeds=3,
    accepts_data=True,
)
