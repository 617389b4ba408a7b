"""A trained dense byte model cut into experts: what it loses at once, and after a little fine-tuning.

Every way to choose the experts is converted by the same code, and fine-tuned for a tenth of the dense model's steps
with the same data: random units, units in the order of importance, units grouped by their weights alone, ours, ours
without repair; and a dense model pruned to the active units. Text takes the place of the paper's images here: the steps
of a trajectory are eighths of the positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from experiments.context import Context
from experiments.optim.byte_lm import draw_batches, even_windows, source_text, warmup_cosine
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer, split_model
from jaxlib_icml.lm.conversion import Conversion, convert_to_moe, trajectory_of, unit_importances
from jaxlib_icml.lm.distillation import DistillationWeights, distillation_loss, move_biases, trainable
from jaxlib_icml.lm.loss import loss_fn
from jaxlib_icml.moe.prism_convert import partition_units
from jaxlib_icml.moe.prism_losses import output_distillation
from jaxlib_icml.moe.prism_moe import DenseFFN, PrismConfig

TUNING_SEED = 1000
ACTIVE = {"37.5 %": 2, "75 %": 8}


class _Budget(NamedTuple):
    """Layers, steps of the dense model and of fine-tuning, rows, length, rates to try, further rows and a threshold."""

    layers: int
    steps: int
    tuned: int
    batch: int
    context: int
    grid: tuple[float, ...]
    fine_grid: tuple[float, ...]
    calibration: int
    held_out: int
    min_tokens: int


def _by_importance(ffn: DenseFFN, importance: Any, stats: Any, prism: PrismConfig) -> tuple[Any, Any]:
    """The most important units are shared, the others go to experts in order."""
    del stats
    shared, _ = prism.sizes(ffn.down.shape[0])
    order = jnp.argsort(-importance, stable=True)
    return jnp.sort(order[:shared]), order[shared:].reshape(prism.num_experts, -1)


def _random(seed: int) -> Callable[..., tuple[Any, Any]]:
    def partition(ffn: DenseFFN, importance: Any, stats: Any, prism: PrismConfig) -> tuple[Any, Any]:
        del importance, stats
        shared, _ = prism.sizes(ffn.down.shape[0])
        order = jnp.asarray(np.random.default_rng(seed).permutation(ffn.down.shape[0]))
        return jnp.sort(order[:shared]), order[shared:].reshape(prism.num_experts, -1)

    return partition


def _by_weights(ffn: DenseFFN, importance: Any, stats: Any, prism: PrismConfig) -> tuple[Any, Any]:
    """As ours, blind to when units are active: the most important are shared, the others grouped by what they read."""
    blind = replace(prism, profile_feature=0.0, candidate_multiplier=1.0)
    return partition_units(ffn, importance, stats, blind)


def _ways(seed: int) -> dict[str, dict[str, Any]]:
    return {
        "ours": {},
        "ours, no repair": {"compensate": False},
        "no trajectory": {"partition": _by_weights},
        "weights": {"partition": _by_weights, "compensate": False},
        "importance": {"partition": _by_importance, "compensate": False},
        "random": {"partition": _random(seed), "compensate": False},
    }


def _batch(windows: Any) -> dict[str, Any]:
    tokens = windows.astype(jnp.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _validate(config: LMConfig, state: nnx.State, windows: Any) -> float:
    """Nats per byte of held-out windows (chunks, rows, context + 1)."""
    graphdef = nnx.split(abstract_transformer(config))[0]

    @jax.jit
    def run(state: Any, windows: Any) -> Any:
        def nats(rows: Any) -> Any:
            aux = loss_fn(graphdef, state, _batch(rows))[1]
            return aux.nll_sum / aux.weight_sum

        return jnp.mean(lax.map(nats, windows))

    return float(run(state, windows))


def _train_dense(config: LMConfig, seed: int, batches: np.ndarray, rate: float) -> nnx.State:
    graphdef, params, rest = split_model(Transformer(config, rngs=nnx.Rngs(seed)))
    shape = warmup_cosine(len(batches))
    tx = optax.adamw(lambda count: rate * shape(count), b1=0.9, b2=0.95, weight_decay=0.1)

    @jax.jit
    def run(params: Any, batches: Any) -> Any:
        def step(carry: Any, windows: Any) -> Any:
            params, state = carry
            grads = jax.grad(lambda p: loss_fn(graphdef, nnx.merge_state(p, rest), _batch(windows))[0])(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), batches)[0][0]

    return nnx.merge_state(run(params, jnp.asarray(batches)), rest)


class _Tuner:
    """Fine-tunes converted models of one architecture; compiled once for each choice of weights."""

    def __init__(self, dense: LMConfig, config: LMConfig, weights: DistillationWeights, steps: int):
        teacher_graph = nnx.split(abstract_transformer(dense))[0]
        graphdef, abstract, _ = split_model(abstract_transformer(config))
        shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, max(1, steps // 10), max(2, steps), end_value=0.05)

        @jax.jit
        def run(params: Any, rest: Any, teacher: Any, batches: Any, rate: Any) -> Any:
            reference = nnx.merge(teacher_graph, teacher)
            mask = trainable(abstract)
            inner = optax.adamw(lambda count: rate * shape(count), b1=0.9, b2=0.95, weight_decay=0.05)
            clipped = optax.chain(optax.clip_by_global_norm(2.0), inner)
            tx = optax.partition({True: clipped, False: optax.set_to_zero()}, mask)

            def step(carry: Any, windows: Any) -> Any:
                params, rest, state = carry

                def loss(params: Any) -> Any:
                    return distillation_loss(nnx.merge(graphdef, params, rest), reference, _batch(windows), weights)

                grads, aux = jax.grad(loss, has_aux=True)(params)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                model = nnx.merge(graphdef, params, rest)
                move_biases(model, aux.load, rate=0.1)
                return (params, split_model(model)[2], state), aux

            (params, rest, _), aux = lax.scan(step, (params, rest, tx.init(params)), batches)
            return params, rest, aux

        self._run = run

    def __call__(self, state: nnx.State, teacher: nnx.State, batches: Any, rate: float) -> tuple[nnx.State, Any]:
        params, rest = nnx.split_state(state, nnx.Param, ...)
        params, rest, aux = self._run(params, rest, teacher, jnp.asarray(batches), rate)
        return nnx.merge_state(params, rest), aux


def _pruned(config: LMConfig, state: nnx.State, share: float, importances: list[Any]) -> tuple[LMConfig, nnx.State]:
    """The dense model with its most important units only."""
    kept = round(share * config.resolved_mlp_width)
    flat = {}
    for path, x in nnx.to_flat_state(state):
        if path[0] == "layers" and path[2] == "mlp":
            units = jnp.sort(jnp.argsort(-importances[int(str(path[1]))], stable=True)[:kept])
            x = x.replace(x[...][units] if path[3] == "down" else x[...][:, units])
        flat[path] = x
    return replace(config, mlp_width=kept), nnx.from_flat_state(list(flat.items()))


def _tune_pruned(config: LMConfig, state: Any, dense: LMConfig, teacher: Any, batches: Any, rate: float) -> Any:
    """Fine-tune the blocks of a pruned model: cross-entropy and distillation."""
    graphdef, reference = (nnx.split(abstract_transformer(which))[0] for which in (config, dense))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "mlp'" in jax.tree_util.keystr(path), params)
    steps = len(batches)
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, max(1, steps // 10), max(2, steps), end_value=0.05)
    inner = optax.adamw(lambda count: rate * shape(count), b1=0.9, b2=0.95, weight_decay=0.05)
    tx = optax.partition({True: optax.chain(optax.clip_by_global_norm(2.0), inner), False: optax.set_to_zero()}, labels)

    @jax.jit
    def run(params: Any, teacher: Any, batches: Any) -> Any:
        dense_model = nnx.merge(reference, teacher)

        def step(carry: Any, windows: Any) -> Any:
            params, opt_state = carry
            batch = _batch(windows)

            def loss(params: Any) -> Any:
                model = nnx.merge(graphdef, params, rest)
                logits = model.logits(model(batch["tokens"]).hidden)
                nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
                target = dense_model.logits(dense_model(batch["tokens"]).hidden)
                return jnp.mean(nats) + output_distillation(logits, target)

            updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        return lax.scan(step, (params, tx.init(params)), batches)[0][0]

    return nnx.merge_state(run(params, teacher, jnp.asarray(batches)), rest)


def run(context: Context) -> Outcome:
    """Convert, validate, fine-tune, validate."""
    budget = context.pick(
        smoke=_Budget(1, 4, 2, 2, 16, (3e-3,), (1e-3,), 8, 4, 8),
        laptop=_Budget(4, 1000, 100, 16, 64, (3e-3, 6e-3, 1.2e-2), (5e-4, 1e-3, 2e-3, 4e-3), 256, 256, 512),
        full=_Budget(12, 50_000, 5_000, 64, 512, (1e-3, 2e-3, 4e-3), (1e-4, 3e-4, 1e-3), 512, 1024, 4096),
    )
    text = source_text(context)
    dense = LMConfig(
        vocab_size=256,
        context_length=budget.context,
        width=64,
        num_layers=budget.layers,
        num_heads=4,
        mlp_width=256,
        activation="gelu",
    )
    windows = even_windows(text.held_out, budget.held_out, budget.context)
    held_out = jnp.asarray(windows.reshape(-1, min(64, len(windows)), budget.context + 1))
    graph = nnx.split(abstract_transformer(dense))[0]

    def batches(seed: int, steps: int) -> np.ndarray:
        return draw_batches(text.train, seed, steps, budget.batch, budget.context)

    def prism(active: int) -> PrismConfig:
        return PrismConfig(num_active=active, min_tokens=budget.min_tokens)

    def converted(seed: int, state: nnx.State, active: int, options: Mapping[str, Any]) -> Conversion:
        rows = jnp.asarray(
            draw_batches(text.train, seed + 7, 1, budget.calibration, budget.context)[0, :, :-1], jnp.int32
        )
        own = trajectory_of(graph, state, rows[:, : budget.context // 2], jax.random.key(seed), budget.context)
        return convert_to_moe(state, dense, rows, prism(active), trajectory=own, router_delta=16, **options)

    trained: dict[float, nnx.State] = {}
    with context.progress("rates", len(budget.grid) + len(budget.fine_grid)) as bar:
        losses = {}
        for rate in budget.grid:
            trained[rate] = _train_dense(dense, TUNING_SEED, batches(TUNING_SEED, budget.steps), rate)
            losses[rate] = _validate(dense, trained[rate], held_out)
            bar.advance(loss=losses[rate])
        rate = min(losses, key=lambda r: losses[r])
        few = converted(TUNING_SEED, trained[rate], ACTIVE["37.5 %"], {})
        tuners = {
            "all": _Tuner(dense, few.config, DistillationWeights(), budget.tuned),
            "no supervision": _Tuner(dense, few.config, DistillationWeights(routing=0.0), budget.tuned),
            "equal tokens": _Tuner(dense, few.config, DistillationWeights(mixing=0.0), budget.tuned),
        }
        fine = {}
        for trial in budget.fine_grid:
            tuned, _ = tuners["all"](few.state, trained[rate], batches(TUNING_SEED + 1, budget.tuned), trial)
            fine[trial] = _validate(few.config, tuned, held_out)
            bar.advance(loss=fine[trial])
        fine_rate = min(fine, key=lambda r: fine[r])
    context.log(f"rates {rate:g} and {fine_rate:g}")

    zero_shot: dict[str, dict[str, list[float]]] = {share: {} for share in ACTIVE}
    after: dict[str, list[float]] = {}
    dense_losses: list[float] = []
    entropies: list[float] = []
    dead: list[float] = []
    runs = {"ours": "all", "ours, no repair": "all", "no trajectory": "all", "weights": "all", "random": "all"}
    ablations = {"no supervision": "no supervision", "equal tokens": "equal tokens"}
    total = len(context.seeds) * (1 + 2 * len(_ways(0)) + len(runs) + len(ablations) + 1)
    with context.progress("runs", total) as bar:
        for seed in context.seeds:
            state = _train_dense(dense, seed, batches(seed, budget.steps), rate)
            dense_losses.append(_validate(dense, state, held_out))
            bar.advance(loss=dense_losses[-1])
            made: dict[str, Conversion] = {}
            for share, active in ACTIVE.items():
                for name, options in _ways(seed).items():
                    made[name] = new = converted(seed, state, active, options)
                    zero_shot[share].setdefault(name, []).append(_validate(new.config, new.state, held_out))
                    bar.advance(loss=zero_shot[share][name][-1])
                if share == "37.5 %":
                    starts = dict(made)
            data = batches(seed + 1, budget.tuned)
            for name, tuner in (runs | ablations).items():
                start = starts.get(name, starts["ours"])
                tuned, aux = tuners[tuner](start.state, state, data, fine_rate)
                after.setdefault(name, []).append(_validate(start.config, tuned, held_out))
                if name == "ours":
                    load = np.asarray(aux.load[-max(1, budget.tuned // 5) :]).mean(0)
                    share_of = load / load.sum(1, keepdims=True)
                    entropy = -np.sum(share_of * np.log(np.maximum(share_of, 1e-12)), axis=1) / np.log(load.shape[1])
                    entropies.append(float(entropy.min()))
                    dead.append(float((share_of < 1e-4).sum()))
                bar.advance(loss=after[name][-1])
            rows = jnp.asarray(batches(seed + 7, 1)[0], jnp.int32)
            importances = unit_importances(nnx.merge(graph, state), rows)
            smaller, pruned = _pruned(dense, state, 0.375, importances)
            zero_shot["37.5 %"].setdefault("pruned", []).append(_validate(smaller, pruned, held_out))
            pruned = _tune_pruned(smaller, pruned, dense, state, data, fine_rate)
            after.setdefault("pruned", []).append(_validate(smaller, pruned, held_out))
            bar.advance(loss=after["pruned"][-1])

    base = np.array(dense_losses)
    rise = {name: np.array(row) - base for name, row in zero_shot["75 %"].items()}
    others = [rise[name] for name in ("weights", "importance", "random")]
    return Outcome(
        measured={
            "zero_random": list(rise["ours"] / rise["random"]),
            "zero_best": list(rise["ours"] - np.min(others, axis=0)),
            "tuned": list(np.array(after["ours"]) / base - 1),
            "tuned_random": list(np.array(after["random"]) - np.array(after["ours"])),
            "tuned_pruned": list(np.array(after["pruned"]) - np.array(after["ours"])),
            "entropy": entropies,
            "dead": dead,
            "no_repair": list(np.array(after["ours, no repair"]) - np.array(after["ours"])),
            "no_trajectory": list(np.array(after["no trajectory"]) - np.array(after["ours"])),
            "no_supervision": list(np.array(after["no supervision"]) - np.array(after["ours"])),
            "equal_tokens": list(np.array(after["equal tokens"]) - np.array(after["ours"])),
        },
        data={
            "budget": budget._asdict(),
            "rates": {"dense": rate, "fine-tuning": fine_rate},
            "tuning": {"dense": list(losses.values()), "fine-tuning": list(fine.values())},
            "dense": dense_losses,
            "zero_shot": zero_shot,
            "after": after,
        },
        notes=(
            "Text instead of images: the image part of the reproduction is not built yet.",
            f"One rate for all fine-tuning, {fine_rate:g}, chosen for ours on another seed among "
            f"{', '.join(f'{r:g}' for r in budget.fine_grid)}.",
        ),
    )


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """Loss over the dense model's, at once and after fine-tuning."""
    axes = figure.subplots(1, 2)
    base = np.array(data["dense"])
    for share, marker in (("75 %", "o"), ("37.5 %", "s")):
        for y, row in enumerate(data["zero_shot"][share].values()):
            axes[0].plot(np.array(row) - base, [y] * len(row), marker, ms=4, color="tab:blue", alpha=0.7)
    names = list(data["zero_shot"]["37.5 %"])
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0].set(
        xlabel="nats above the dense model", title="at once (squares 37.5 %, circles 75 % active)", xscale="log"
    )
    order = sorted(data["after"], key=lambda name: np.mean(data["after"][name]))
    for y, name in enumerate(order):
        axes[1].plot(np.array(data["after"][name]) - base, [y] * len(base), "o", ms=4, color="tab:blue")
    axes[1].set_yticks(range(len(order)), order, fontsize=7)
    axes[1].set(xlabel="nats above the dense model", title="after a tenth of its steps (37.5 %)")
    for ax in axes:
        ax.title.set_fontsize(8)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)


EXPERIMENT = Experiment(
    name="moe/prism_moe",
    title="A dense byte model cut into experts: ours against other splits and pruning, at once and fine-tuned",
    paper="Prism-MoE: Efficient Dense-to-MoE Conversion for Visual Autoregressive Generation (ICML 2026)",
    claims=(
        Claim(
            "zero_random",
            "At 75 % active ours loses at most half of what random splits do (ratio)",
            "",
            at_most(0.5),
        ),
        Claim("zero_best", "and less than any other split (ours - best other)", "", at_most(0.0, "nats")),
        Claim(
            "tuned",
            "At 37.5 % active and after a tenth of the steps, the loss is within 3 % of the dense model's (relative)",
            "FID close to dense after < 10 % of the budget",
            at_most(0.03),
        ),
        Claim("tuned_random", "Random splits end at least 0.02 nats higher", "", at_least(0.02, "nats")),
        Claim("tuned_pruned", "A dense model pruned to as many units ends higher", "", at_least(0.0, "nats")),
        Claim("entropy", "Load entropy of the most unequal layer over its largest", "", at_least(0.9)),
        Claim("dead", "No expert dies", "", at_most(0.0, "experts")),
        Claim("no_repair", "Without repair the end is higher", "", at_least(0.0, "nats")),
        Claim("no_trajectory", "Without statistics of the trajectory it is higher", "", at_least(0.0, "nats")),
        Claim("no_supervision", "Without routing supervision it is higher", "", at_least(0.0, "nats")),
        Claim("equal_tokens", "With tokens weighted alike it is higher", "", at_least(0.0, "nats")),
    ),
    run=run,
    plot=plot,
    seeds=3,
    accepts_data=True,
)
