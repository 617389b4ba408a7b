"""L2A against full attention, windows, a static hybrid, random and top-k routing, when a context is extended.

A small byte-level decoder learns Python's standard library with full attention over 256 bytes. Every method then gets
the same number of steps at 1024 bytes from these weights, with three seeds. Half of all sequences hold key-value
records (`experiments.attention.recall`) that only reading far back can answer. Attention that copies is learned late
from these alone, so stage 1 begins with long records in short sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.attention.recall import KEY, Batch, Text, load_text, make_batch, make_questions
from experiments.context import Context
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most
from jaxlib_icml.attention import L2AConfig, rate_controller, routing_temperature, sparsity_loss
from jaxlib_icml.attention.l2a_pruning import prune_layers
from jaxlib_icml.lm import (
    Edit,
    Exploration,
    LMConfig,
    Transformer,
    abstract_transformer,
    cache_bytes,
    cross_entropy_sum,
)
from jaxlib_icml.training.config import OptimizerConfig
from jaxlib_icml.training.optimizers import learning_rate_at, make_optimizer

TUNING_SEED = 1000
RATE = 0.2  # of tokens with global attention
_EPS = (0.0, 0.01, 0.02, 0.05)


class _Budget(NamedTuple):
    """Sizes of a run: layers and lengths, batches and steps of both stages, learning rates (of stage 1, and those tried
    for stage 2), evaluation."""

    width: int
    layers: int
    short: int
    long: int
    window: int
    short_batch: int
    long_batch: int
    short_steps: int
    long_steps: int
    learning_rate: float
    grid: tuple[float, ...]
    questions: int
    bytes: int | None


class _Phase(NamedTuple):
    """A part of a training: steps, length of the sequences and of the longest values, the fraction of planted rows."""

    steps: int
    batch: int
    seq: int
    longest: int = KEY
    planted: float = 0.5

    @property
    def pairs(self) -> int:
        return max(1, self.seq // 64) if self.longest == KEY else 1


class _Arm(NamedTuple):
    """A method: its model, and what its routers are told (edits of their probabilities), if anything."""

    config: LMConfig
    routing: str = "none"  # none, learned, random, all, topk


def _arms(base: LMConfig, window: int) -> dict[str, _Arm]:
    l2a = L2AConfig(window=window, target_rate=RATE)
    routed = replace(base, attention="l2a", l2a=l2a)
    top = replace(l2a, overflow="topk", estimator="soft", capacity_rate=RATE, capacity_factor=1.0, threshold=1e-6)
    others = tuple(i for i in range(base.num_layers) if i % 4 != 3) if base.num_layers >= 4 else (0,)
    return {
        "full attention": _Arm(base),
        "window": _Arm(replace(base, sliding_window=window)),
        "static hybrid": _Arm(replace(routed, pruned_layers=others), "all"),
        "random routing": _Arm(routed, "random"),
        "top-k routing": _Arm(replace(base, attention="l2a", l2a=top), "topk"),
        "L2A": _Arm(routed, "learned"),
    }


def _edits(arm: _Arm, key: jax.Array, shape: tuple[int, ...]) -> dict[str, Edit] | None:
    """What replaces the routers' probabilities; those from one half on are routed."""
    if arm.routing == "random":
        chosen = jax.random.bernoulli(key, RATE, (arm.config.num_layers, *shape))
        return {"routing_probability": Edit(keep=0.0, add=chosen.astype(jnp.float32))}
    if arm.routing == "all":
        return {"routing_probability": Edit(keep=0.0, add=1.0)}
    return None


class _Program(NamedTuple):
    graphdef: Any
    step: Any
    evaluate: Any


def _program(arm: _Arm, optimizer: OptimizerConfig) -> _Program:
    """The jitted training step and evaluation of a method."""
    config = arm.config
    graphdef = nnx.split(abstract_transformer(config))[0]
    make = make_optimizer(optimizer)
    control = rate_controller(RATE, config.l2a.price_step, damping=config.l2a.price_damping)

    def loss(params, batch, key, temperature, price):
        model = nnx.merge(graphdef, params)
        noise, draw = jax.random.split(key)
        explore = Exploration(noise, temperature) if arm.routing in ("learned", "topk") else None
        out = model(batch.tokens, exploration=explore, edits=_edits(arm, draw, batch.tokens.shape))
        count = batch.tokens.size
        weights = 1.0 - batch.random.reshape(-1)
        total = cross_entropy_sum(
            out.hidden.reshape(count, -1), model.output_kernel(), batch.targets.reshape(-1), weights
        )
        nats = total / jnp.sum(weights)
        if arm.routing != "learned" or out.l2a is None:
            return nats, (nats, jnp.zeros(()))
        return nats + sparsity_loss(out.l2a.prob_mean, price, RATE), (nats, out.l2a.rate)

    @jax.jit
    def step(params, state, routing, batch, key, rate, temperature):
        gradients, (nats, routed) = jax.grad(loss, has_aux=True)(params, batch, key, temperature, routing.price)
        updates, state = make(rate).update(gradients, state, params)
        price, routing = control.update(routed, routing)
        return optax.apply_updates(params, updates), state, routing, (nats, jnp.mean(routed), price)

    @jax.jit
    def evaluate(params, batch, key):
        """Nats of every byte, whether every answer of a row is right, and (layers, batch, seq) who was routed."""
        model = nnx.merge(graphdef, params)
        # Top-k routing is not causal: it is evaluated with the choice it was trained with.
        explore = Exploration(key, jnp.zeros(())) if arm.routing == "topk" else None
        capture = ("routing_probability",) if config.attention == "l2a" else ()
        out = model(batch.tokens, exploration=explore, edits=_edits(arm, key, batch.tokens.shape), capture=capture)
        logits = model.logits(out.hidden)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        right = (jnp.argmax(logits, axis=-1) == batch.targets) | ~batch.answers
        prob = out.activations.get("routing_probability", jnp.zeros((0, *batch.tokens.shape)))
        return nats, jnp.all(right, axis=1), prob

    return _Program(graphdef, step, evaluate)


def _arrays(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def _phases(budget: _Budget) -> tuple[_Phase, ...]:
    """Stage 1: long records in sequences that grow, then short ones in half of the rows."""
    batch, seq, steps = budget.short_batch, budget.short, budget.short_steps
    growing = [
        _Phase(max(1, steps * percent // 100), batch * cut, seq // cut, longest=seq // cut // 2 - 1 - KEY, planted=1.0)
        for percent, cut in ((38, 4), (12, 2), (12, 1))
    ]
    return (*growing, _Phase(steps - sum(phase.steps for phase in growing), batch, seq))


def _train(
    arm: _Arm,
    params: nnx.State,
    text: Text,
    optimizer: OptimizerConfig,
    seed: int,
    phases: Sequence[_Phase],
    bar: Any,
) -> tuple[nnx.State, _Program, list[tuple[float, ...]]]:
    """Returns the parameters, the program, and (nats, rate, price) of every step."""
    program, steps = _program(arm, optimizer), sum(phase.steps for phase in phases)
    state = make_optimizer(optimizer)(0.0).init(params)
    routing, curve, exploration = rate_controller(RATE).init(), [], routing_temperature(steps)
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    for i, phase in enumerate(one for one in phases for _ in range(one.steps)):
        planted = int(phase.planted * phase.batch)
        drawn = make_batch(
            rng, text.train, phase.batch, phase.seq, pairs=phase.pairs, planted=planted, longest=phase.longest
        )
        temperature = exploration(i) if arm.routing == "learned" else 0.0
        rate = learning_rate_at(optimizer, i, i / steps)
        params, state, routing, figures = program.step(
            params, state, routing, _arrays(drawn), jax.random.fold_in(key, i), rate, temperature
        )
        curve.append(tuple(map(float, figures)))
        bar.advance(loss=curve[-1][0])
    return params, program, curve


def _evaluate(program: _Program, params: nnx.State, text: Text, budget: _Budget, arm: _Arm) -> dict[str, Any]:
    """Byte loss on plain text, recall of records further back than the window, and who was routed."""
    rng, key = np.random.default_rng(0), jax.random.key(0)
    nats, right, far, routed, answers = [], [], [], [], []
    for i in range(budget.questions // budget.long_batch):
        key = jax.random.fold_in(key, i)
        plain = make_batch(rng, text.held_out, budget.long_batch, budget.long, pairs=1, planted=0)
        nats.append(np.asarray(program.evaluate(params, _arrays(plain), key)[0]).mean())
        asked, distance = make_questions(rng, text.held_out, budget.long_batch, budget.long)
        _, correct, prob = program.evaluate(params, _arrays(asked), key)
        right.append(np.asarray(correct))
        far.append(distance > budget.window)
        routed.append(np.asarray(prob) >= arm.config.l2a.threshold)
        answers.append(asked.answers)
    correct, distant = np.concatenate(right), np.concatenate(far)
    result: dict[str, Any] = {
        "nats": float(np.mean(nats)),
        "recall": float(correct.mean()),
        "recall far back": float(correct[distant].mean()) if distant.any() else float("nan"),
    }
    if arm.config.attention == "l2a" and arm.routing != "topk":  # whose tokens all ask, and a fixed share is taken
        mask, asked_for = np.concatenate(routed, axis=1), np.concatenate(answers)
        mask[list(arm.config.pruned_layers)] = False  # whatever is asked there, a window is all they have
        result |= {
            "rate": float(mask.mean()),
            "usage": mask.mean(axis=(1, 2)),
            "rate of answers": float(mask[:, asked_for].mean()),
            "rate of others": float(mask[:, ~asked_for].mean()),
        }
    return result


def _pruned(params: nnx.State, text: Text, budget: _Budget, arm: _Arm, usage: np.ndarray) -> list[dict[str, Any]]:
    """Loss, recall and bytes of the cache when the layers of little use lose their global attention."""
    results: list[dict[str, Any]] = []
    for eps in _EPS:
        layers = tuple(i for i, drop in enumerate(prune_layers(usage, eps)) if drop)
        config = replace(arm.config, pruned_layers=layers)
        known = next((r for r in results if r["layers"] == layers), None)
        if known is None:
            smaller = arm._replace(config=config)
            known = _evaluate(_program(smaller, OptimizerConfig()), params, text, budget, smaller)
        held, everything = cache_bytes(config, budget.long)
        kept = {name: known[name] for name in ("nats", "recall")}
        results.append({"eps": eps, "layers": layers, "bytes": held / everything, **kept})
    return results


def run(context: Context) -> Outcome:
    """Stage 1 once, then stage 2 for every seed and method."""
    budget = context.pick(
        smoke=_Budget(16, 2, 128, 256, 8, 4, 4, 8, 2, 0.02, (0.01, 0.02), 4, 100_000),
        laptop=_Budget(128, 4, 256, 1024, 64, 16, 4, 1000, 200, 0.02, (0.0025, 0.005, 0.01), 128, None),
        full=_Budget(512, 8, 1024, 8192, 256, 64, 32, 20_000, 4000, 0.02, (0.0025, 0.005, 0.01), 1024, None),
    )
    text, description = load_text(context.data, budget.bytes)
    context.log(f"corpus: {description}")
    base = LMConfig(
        vocab_size=256,
        width=budget.width,
        num_layers=budget.layers,
        num_heads=4,
        context_length=budget.long,
        rope_theta=1e4,
    )
    arms = _arms(base, budget.window)
    first, second = _phases(budget), (_Phase(budget.long_steps, budget.long_batch, budget.long),)

    def fresh(config: LMConfig, seed: int) -> nnx.State:
        return nnx.state(Transformer(config, rngs=nnx.Rngs(seed)))

    def start(arm: _Arm, params: nnx.State, seed: int) -> nnx.State:
        """The weights of stage 1, with the routers that a method needs."""
        if arm.config.attention == "full":
            return params
        flat = dict(nnx.to_flat_state(fresh(arm.config, seed))) | dict(nnx.to_flat_state(params))
        return nnx.from_flat_state(list(flat.items()))

    full = arms["full attention"]

    tuning: list[float] = []
    with context.progress("stage 1 and tuning", budget.short_steps + len(budget.grid) * budget.long_steps) as bar:
        optimizer = OptimizerConfig(learning_rate=budget.learning_rate)
        params = _train(full, fresh(base, TUNING_SEED), text, optimizer, TUNING_SEED, first, bar)[0]
        for rate in budget.grid:
            curve = _train(full, params, text, OptimizerConfig(learning_rate=rate), TUNING_SEED + 1, second, bar)[2]
            tuning.append(float(np.mean([nats for nats, *_ in curve[-budget.long_steps // 5 :]])))
    optimizer = OptimizerConfig(learning_rate=budget.grid[int(np.nanargmin(tuning))])
    context.log(f"learning rate {optimizer.learning_rate:g} of {dict(zip(budget.grid, tuning, strict=True))}")

    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    documents: list[dict[str, Any]] = []
    steps = len(context.seeds) * len(arms) * budget.long_steps
    with context.progress("stage 2", steps) as bar:
        for seed in context.seeds:
            for name, arm in arms.items():
                trained, program, curve = _train(arm, start(arm, params, seed), text, optimizer, seed + 1, second, bar)
                result = _evaluate(program, trained, text, budget, arm)
                if name == "L2A":
                    result["curve"] = curve
                    result["pruned"] = _pruned(trained, text, budget, arm, result["usage"])
                    documents.append(_document(program, trained, text, budget))
                results[name].append(result)
                context.log(f"seed {seed}, {name}: loss {result['nats']:.4f}, recall {result['recall']:.3f}")
    return Outcome(
        measured=_measured(results),
        data={
            "budget": budget._asdict(),
            "grid": budget.grid,
            "tuning": tuning,
            "learning_rate": optimizer.learning_rate,
            "results": results,
            "document": documents[0],
        },
        notes=(
            f"One learning rate for all methods in stage 2, {optimizer.learning_rate:g}, chosen for full attention on "
            f"another seed among {', '.join(map(str, budget.grid))}; {budget.learning_rate:g} in stage 1.",
            "All seeds extend the same model, as the paper does: seeds are those of stage 2 (data, routers, noise).",
            "Top-k routing is not causal; it is evaluated with the choice among all tokens that it was trained with.",
        ),
    )


def _document(program: _Program, params: nnx.State, text: Text, budget: _Budget) -> dict[str, Any]:
    """Who is routed in one document that ends with a question."""
    asked, distance = make_questions(np.random.default_rng(7), text.held_out, budget.long_batch, budget.long)
    prob = np.asarray(program.evaluate(params, _arrays(asked), jax.random.key(0))[2])
    return {"routed": (prob[:, 0] >= 0.5).astype(int), "distance": int(distance[0])}


def _measured(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    def differences(name: str, ours: str, theirs: str) -> list[float]:
        return [a[name] - b[name] for a, b in zip(results[ours], results[theirs], strict=True)]

    full = results["full attention"]
    pairs = list(zip(results["L2A"], full, strict=True))
    return {
        "routed": [r["rate"] for r in results["L2A"]],
        "loss": [a["nats"] / b["nats"] - 1 for a, b in pairs],
        "recall": [100 * x for x in differences("recall", "L2A", "full attention")],
        "window_recall": [100 * x for x in differences("recall", "window", "full attention")],
        "random_recall": [100 * x for x in differences("recall", "random routing", "L2A")],
        "answers": [r["rate of answers"] / max(r["rate of others"], 1e-9) for r in results["L2A"]],
        "pruned_bytes": [r["pruned"][2]["bytes"] for r in results["L2A"]],
        "pruned_loss": [r["pruned"][2]["nats"] / r["nats"] - 1 for r in results["L2A"]],
        "pruned_recall": [100 * (r["pruned"][2]["recall"] - r["recall"]) for r in results["L2A"]],
    }


_COLOURS = {
    "full attention": "0.2",
    "window": "tab:red",
    "static hybrid": "tab:purple",
    "random routing": "tab:orange",
    "top-k routing": "tab:green",
    "L2A": "tab:blue",
}


def plot(figure: Any, data: Mapping[str, Any]) -> None:
    """Loss and recall against the routed fraction, one document, usage per layer, the pruning curve, the rate."""
    axes = figure.subplots(2, 3)
    rates = {"full attention": 1.0, "window": 0.0, "top-k routing": RATE}
    for i, (field, label) in enumerate((("nats", "nats per byte"), ("recall", "recall of records"))):
        for name, results in data["results"].items():
            x = [r.get("rate", rates.get(name)) for r in results]
            axes[0, i].plot(x, [r[field] for r in results], "o", ms=5, color=_COLOURS[name], label=name)
        axes[0, i].set(xlabel="fraction with global attention", ylabel=label)
    axes[0, 1].legend(frameon=False, loc="center right")
    routed = np.asarray(data["document"]["routed"])
    axes[0, 2].imshow(routed, aspect="auto", cmap="Blues", interpolation="nearest")
    axes[0, 2].set(xlabel="byte (line: the record asked for)", ylabel="layer", title="routed in a document")
    axes[0, 2].set_yticks(range(len(routed)))
    axes[0, 2].axvline(routed.shape[1] - data["document"]["distance"], color="tab:red", lw=1)
    ours = data["results"]["L2A"]
    usage = np.array([r["usage"] for r in ours])
    axes[1, 0].bar(np.arange(usage.shape[1]), usage.mean(0), color="tab:blue", alpha=0.6)
    for row in usage:
        axes[1, 0].plot(np.arange(len(row)), row, "k.", ms=4)
    axes[1, 0].axhline(0.02, color="0.5", lw=1, ls=":")
    axes[1, 0].set(xlabel="layer", ylabel="fraction routed", title="usage (dotted: ε = 0.02)")
    recall = axes[1, 1].twinx()
    for result in ours:
        size = [p["bytes"] for p in result["pruned"]]
        axes[1, 1].plot(size, [p["nats"] for p in result["pruned"]], "o-", ms=4, color="tab:blue")
        recall.plot(size, [p["recall"] for p in result["pruned"]], "s--", ms=4, color="tab:red")
    axes[1, 1].set(xlabel="bytes of the cache / full", ylabel="nats per byte (solid)", title="pruning, ε = 0 to 0.05")
    recall.set_ylabel("recall (dashed)")
    for result in ours:
        axes[1, 2].plot([rate for _, rate, _ in result["curve"]], color="tab:blue", lw=1)
    axes[1, 2].axhline(RATE, color="0.5", lw=1, ls=":")
    axes[1, 2].set(xlabel="step of stage 2", ylabel="fraction routed", title="rate in training")
    for ax in (*axes.flat, recall):
        ax.title.set_fontsize(9)
        ax.xaxis.label.set_fontsize(8)
        ax.yaxis.label.set_fontsize(8)
        ax.tick_params(labelsize=7)
    for text in axes[0, 1].get_legend().get_texts():
        text.set_fontsize(7)
    for ax in axes.flat:
        ax.spines["top"].set_visible(False)


EXPERIMENT = Experiment(
    name="attention/l2a",
    title="L2A against full, windowed, static, random and top-k attention when a context is extended",
    paper="Learning When to Attend: Conditional Memory Access for Long-Context LLMs (arXiv 2603.17484)",
    claims=(
        Claim("routed", "L2A routes at most a quarter of the tokens", "about 20 %", at_most(0.25)),
        Claim("loss", "Its loss is within 3 % of full attention's (relative difference)", "≤ 3 %", at_most(0.03)),
        Claim(
            "recall",
            "Its recall is within 3 points of full attention's (difference)",
            "≤ 3 % gap on long-context benchmarks",
            at_least(-3.0, "points"),
        ),
        Claim(
            "window_recall",
            "A window alone recalls at least 20 points less than full attention (difference)",
            "",
            at_most(-20.0, "points"),
        ),
        Claim(
            "random_recall",
            "Random routing at the same rate recalls at least 10 points less than L2A (difference)",
            "",
            at_most(-10.0, "points"),
        ),
        Claim(
            "answers",
            "Bytes of an answer are routed at least three times as often as others (ratio)",
            "",
            at_least(3.0),
        ),
        Claim(
            "pruned_bytes",
            "Pruning layers used by at most 2 % of the tokens shrinks the cache (bytes left over bytes of all)",
            "up to 50 % less",
            at_most(0.8),
        ),
        Claim("pruned_loss", "and costs less than 1 % of loss (relative)", "", at_most(0.01)),
        Claim("pruned_recall", "and less than 3 points of recall (difference)", "", at_least(-3.0, "points")),
    ),
    run=run,
    plot=plot,
    seeds=3,
    accepts_data=True,
)
