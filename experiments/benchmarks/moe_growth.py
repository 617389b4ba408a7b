"""Growing a mixture of experts, twice as deep with twice as many experts, against the same surgery on PyTorch modules.

A model of 100 million parameters, float32. PyTorch: `copy.deepcopy` of layers and of experts, noise added in place. The
training step is that of a small model, grown against newly made, at one architecture.
"""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.benchmarks.peers import import_torch
from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import paired_times
from experiments.context import Context
from experiments.protocol import at_least, at_most
from jaxlib_icml.lm import LMConfig, Transformer, split_model
from jaxlib_icml.lm.growth import grow

NOISE = 0.01
SMALL = LMConfig(
    context_length=256, width=64, num_layers=2, num_heads=2, num_experts=4, num_active_experts=2, expert_width=128
)


def _torch_layers(config: LMConfig) -> Any:
    nn = import_torch().nn
    width, hidden = config.width, config.resolved_expert_width

    def linear(inputs: int, outputs: int) -> Any:
        return nn.Linear(inputs, outputs, bias=False)

    def expert() -> Any:
        return nn.ModuleList([linear(width, hidden), linear(width, hidden), linear(hidden, width)])

    def layer() -> Any:
        return nn.ModuleDict(
            {
                "attention": nn.ModuleList(linear(width, width) for _ in range(4)),
                "router": linear(width, config.num_experts),
                "experts": nn.ModuleList(expert() for _ in range(config.num_experts)),
            }
        )

    return nn.ModuleList(layer() for _ in range(config.num_layers))


def _torch_grow(layers: Any) -> Any:
    torch = import_torch()

    def perturbed(weight: Any) -> Any:
        return weight + NOISE * weight.std() * torch.randn_like(weight)

    with torch.no_grad():
        grown = torch.nn.ModuleList(copy.deepcopy(layer) for layer in layers for _ in range(2))
        for layer in grown:
            clones = copy.deepcopy(layer["experts"])
            for parameter in clones.parameters():
                parameter.copy_(perturbed(parameter))
            layer["experts"].extend(clones)
            rows = layer["router"].weight
            layer["router"].weight = torch.nn.Parameter(torch.cat([rows, torch.stack([perturbed(r) for r in rows])]))
    return grown


def _step(config: LMConfig) -> Any:
    graphdef, _, rest = split_model(Transformer(config, rngs=nnx.Rngs(0)))
    tx = optax.adam(1e-3)

    @jax.jit
    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graphdef, params, rest)
            logits = model.logits(model(tokens).hidden)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))

        return optax.apply_updates(params, tx.update(jax.grad(loss)(params), tx.init(params), params)[0])

    return step


def run(context: Context) -> BenchmarkOutcome:
    repeats = context.pick(smoke=1, laptop=7, full=11)
    width, layers = context.pick(smoke=(32, 1), laptop=(512, 8), full=(512, 8))
    config = LMConfig(
        width=width, num_layers=layers, num_heads=4, num_experts=8, num_active_experts=2, expert_width=2 * width
    )
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(state))
    modules = _torch_layers(config)
    ours = functools.partial(grow, state, config, key=jax.random.key(0), noise=NOISE)
    with context.progress("growth", total=repeats) as bar:
        times = {
            "growth": paired_times(
                {"ours": lambda: jax.tree.leaves(ours()[0]), "torch": lambda: _torch_grow(modules)},
                repeats=repeats,
                on_round=lambda _: bar.advance(),
            )
        }
    small = nnx.state(Transformer(SMALL, rngs=nnx.Rngs(0)))
    grown, larger = grow(small, SMALL, key=jax.random.key(0))
    params = {
        "grown": nnx.split_state(grown, nnx.Param, ...)[0],
        "new": split_model(Transformer(larger, rngs=nnx.Rngs(1)))[1],
    }
    step, tokens = _step(larger), jax.random.randint(jax.random.key(1), (8, 256), 0, 257)
    with context.progress("training step", total=3 * repeats) as bar:
        times["step"] = paired_times(
            {name: functools.partial(step, tree, tokens) for name, tree in params.items()},
            repeats=3 * repeats,
            on_round=lambda _: bar.advance(),
        )
    ratios = {
        "torch": times["growth"].speedup("ours", over="torch"),
        "step": times["step"].speedup("new", over="grown"),
    }
    return BenchmarkOutcome(ratios, times, {"parameters": parameters, "width": width, "layers": layers})


BENCHMARK = Benchmark(
    name="moe_growth",
    title="Growing a mixture of experts against deep copies of PyTorch modules",
    targets=(
        Target("torch", "100 million parameters, depth 2 and width 2: speed over PyTorch", at_least(2.0)),
        Target("step", "training step: time with grown weights over new ones", at_most(1.03)),
    ),
    run=run,
)
