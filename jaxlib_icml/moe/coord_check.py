"""Two looks at a parameterization: do activations move alike at every size, and where is the best learning rate?

Both run on any model that can be written as a `Probe`. `residual_moe_probe` is the smallest one with all the rules'
parts, a stack of residual expert layers that predicts a token from the few before it;
`jaxlib_icml.lm.parameterization.transformer_probe` is the language model.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxlib_icml.moe.config import BaseSpec, MoEShape
from jaxlib_icml.moe.layers import SparseMoE
from jaxlib_icml.moe.parameterization import GroupMap, check_routers, init_params, rules
from jaxlib_icml.moe.routing import update_expert_bias
from jaxlib_icml.moe.transfer import transfer_optimizer
from jaxlib_icml.nn import Kernel, activate, logical_axes

Batch = Any


class Probe(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: key -> (params, rest); `rest` is what optimizers do not see, such as selection biases.
      loss: (params, rest, batch) -> (loss, new rest).
      activations: (params, rest, batch) -> name -> array, what `coord_check` watches; a leading axis for layers is
        fine, the axes may differ in size between models.
    """

    init: Callable[[Key[Array, ""]], tuple[Any, Any]]
    loss: Callable[[Any, Any, Batch], tuple[Array, Any]]
    activations: Callable[[Any, Any, Batch], dict[str, Array]]


class CoordCheck(NamedTuple):
    """How far a few steps move activations, at several sizes.

    Attributes:
      sizes: The size that varies, one number for each shape.
      rms_change: Name -> root mean square change of the activation, (shapes, seeds).
      slopes: Name -> slope of the mean log change against the log size; 0 where transfer holds.
    """

    sizes: tuple[float, ...]
    rms_change: dict[str, np.ndarray]
    slopes: dict[str, float]

    def table(self) -> str:
        """One line for each activation: its change at each size, and the slope."""
        head = f"{'activation':<18}" + "".join(f"{size:>12g}" for size in self.sizes) + f"{'slope':>10}"
        lines = [
            f"{name:<18}"
            + "".join(f"{np.exp(np.log(row).mean()):>12.4g}" for row in change)
            + f"{self.slopes[name]:>+10.3f}"
            for name, change in self.rms_change.items()
        ]
        return "\n".join([head, *lines])


def coord_check(
    make_probe: Callable[[MoEShape], Probe],
    base: BaseSpec,
    shapes: Sequence[MoEShape],
    batches: Sequence[Batch],
    *,
    seeds: Sequence[int] = (0, 1),
    axis: str = "width",
    optimizer: str | None = None,
    learning_rate: float | None = None,
    scheme: str = "moe_mup",
    hidden_exponent: float = 1.0,
    groups: GroupMap | None = None,
) -> CoordCheck:
    """Train models of several sizes for a few steps and measure how far their activations move.

    Args:
      make_probe: From sizes to a model.
      base: The tuned model.
      shapes: Sizes of the models.
      batches: One for each step; the change is measured on the first.
      seeds: Of the initial values.
      axis: The field of `MoEShape` that slopes are taken against.
      optimizer: As `inner` in `transfer_optimizer`.
      learning_rate: Constant; None: the base's.
      scheme: As in `rules`; give the same to `make_probe`.
      hidden_exponent: As in `optimizer_rules`.
      groups: As in `group_of`.

    Returns:
      `CoordCheck`; its `table()` is meant to be printed.

    Raises:
      ValueError: Fewer than two sizes, no batch or no seed; routers that cannot tell experts apart; what the rules
        refuse.
    """
    sizes = tuple(float(getattr(shape, axis)) for shape in shapes)
    if len(set(sizes)) < 2:
        raise ValueError(f"shapes: need at least two sizes of {axis}, got {sizes}")
    if not batches or not seeds:
        raise ValueError("batches, seeds: must not be empty")
    change: dict[str, list[list[float]]] = {}
    for shape in shapes:
        probe = make_probe(shape)
        tx = transfer_optimizer(
            base, shape, optimizer, learning_rate, scheme=scheme, hidden_exponent=hidden_exponent, groups=groups
        )
        train = jax.jit(lambda state, batch, probe=probe, tx=tx: _step(probe, tx, state, batch)[0])
        measure = jax.jit(probe.activations)
        rows: dict[str, list[float]] = {}
        for seed in seeds:
            params, rest = probe.init(jax.random.key(seed))
            check_routers(params, rest, groups)
            before = measure(params, rest, batches[0])
            state = (params, rest, tx.init(params))
            for batch in batches:
                state = train(state, batch)
            after = measure(state[0], state[1], batches[0])
            for name, old in before.items():
                rows.setdefault(name, []).append(float(jnp.sqrt(jnp.mean((after[name] - old) ** 2))))
        for name, row in rows.items():
            change.setdefault(name, []).append(row)
    rms = {name: np.array(rows) for name, rows in change.items()}
    logs = np.log(sizes)
    slopes = {name: float(np.polyfit(logs, np.log(rows).mean(axis=1), 1)[0]) for name, rows in rms.items()}
    return CoordCheck(sizes, rms, slopes)


def _step(probe: Probe, tx: optax.GradientTransformation, state: Any, batch: Batch) -> tuple[Any, Array]:
    params, rest, opt_state = state
    (loss, rest), grads = jax.value_and_grad(probe.loss, has_aux=True)(params, rest, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), rest, opt_state), loss


def lr_sweep(
    probe: Probe,
    optimizer: Callable[[Array], optax.GradientTransformation],
    learning_rates: Sequence[float],
    batches: Batch,
    *,
    seeds: Sequence[int] = (0,),
    batched: bool | None = None,
) -> Float[Array, "rates seeds steps"]:
    """Loss curves for many learning rates and seeds, in one compiled program.

    Args:
      probe: The model.
      optimizer: From a learning rate (a traced scalar) to the optimizer; its state must not depend on the rate.
      learning_rates: The grid.
      batches: A tree of arrays with a leading axis of steps; all runs see the same.
      seeds: Of the initial values.
      batched: Train all runs at once (by vmap), or one after the other, both compiled once; None: at once, but not on
        CPUs, whose caches one run fills.

    Returns:
      Losses before each step; a run that diverges has infinities or NaNs.

    Raises:
      ValueError: An empty grid, no seed or no step.

    >>> shape = MoEShape(width=8, num_layers=1, expert_width=16, num_experts=2, num_active=1, head_dim=8, vocab_size=5)
    >>> base = BaseSpec(shape)
    >>> tokens = jnp.zeros((3, 4, 9), jnp.int32)
    >>> probe = residual_moe_probe(base, shape)
    >>> lr_sweep(probe, lambda lr: transfer_optimizer(base, shape, schedule=lr), (0.1, 0.2), tokens).shape
    (2, 1, 3)
    """
    if not len(learning_rates) or not len(seeds) or not all(len(x) for x in jax.tree.leaves(batches)):
        raise ValueError("learning_rates, seeds, batches: must not be empty")
    if not all(rate > 0 and math.isfinite(rate) for rate in learning_rates):
        raise ValueError(f"learning_rates: must be positive, got {tuple(learning_rates)}")
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])

    def run(rate: Array, key: Array) -> Array:
        tx = optimizer(rate)
        params, rest = probe.init(key)
        return jax.lax.scan(
            lambda state, batch: _step(probe, tx, state, batch), (params, rest, tx.init(params)), batches
        )[1]

    rates = jnp.asarray(learning_rates, jnp.float32)
    if jax.default_backend() != "cpu" if batched is None else batched:
        return jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(rates, keys)
    return jax.jit(lambda: jax.lax.map(lambda rate: jax.lax.map(lambda key: run(rate, key), keys), rates))()


def moe_activations(layer: SparseMoE, x: Float[Array, "tokens width"]) -> dict[str, Array]:
    """What the rules speak of inside one layer, for all experts, chosen or not.

    Args:
      layer: The layer.
      x: Normalised tokens.

    Returns:
      "router_logits" (tokens, experts), "pre_activations" (experts, tokens, expert width) and "expert_outputs"
      (experts, tokens, width).
    """
    inputs, down = layer.experts.kernels()
    pre = tuple(jnp.einsum("tn,enm->etm", x, kernel) for kernel in inputs)
    return {
        "router_logits": layer.route(x).logits,
        "pre_activations": pre[-1],
        "expert_outputs": jnp.einsum("etm,emn->etn", activate(pre), down),
    }


class _ResidualMoE(nnx.Module):
    """h = Σ_p embed[p, token_p], then h ← h + f MoE(norm h) per layer, then logits of norm h."""

    def __init__(self, shape: MoEShape, positions: int, branch: float, logit_scale: float, rngs: nnx.Rngs):
        self.branch, self.logit_scale, self.vocab_size = branch, logit_scale, shape.vocab_size
        norm = lambda: nnx.LayerNorm(shape.width, use_fast_variance=False, rngs=rngs)  # noqa: E731
        self.embed = nnx.Embed(
            positions * shape.vocab_size, shape.width, embedding_metadata=logical_axes("vocab", "embed"), rngs=rngs
        )
        self.norms = nnx.List([norm() for _ in range(shape.num_layers)])
        self.layers = nnx.List(
            [
                SparseMoE(
                    shape.width,
                    shape.expert_width,
                    shape.num_experts,
                    shape.num_active,
                    gate="sigmoid",
                    activation="gelu",
                    path="dense",
                    rngs=rngs,
                )
                for _ in range(shape.num_layers)
            ]
        )
        self.final_norm = norm()
        self.head = Kernel(jnp.zeros((shape.width, shape.vocab_size)), "embed", "vocab")

    def __call__(self, tokens: Array) -> tuple[Array, list[Array], dict[str, list[Array]]]:
        positions = tokens.shape[1]
        x = jnp.sum(self.embed(tokens + self.vocab_size * jnp.arange(positions)), axis=1)
        loads: list[Array] = []
        seen: dict[str, list[Array]] = {}
        for norm, layer in zip(self.norms, self.layers, strict=True):
            normed = norm(x)
            added, stats = layer(normed)
            for name, value in moe_activations(layer, normed).items():
                seen.setdefault(name, []).append(value)
            x = x + self.branch * added
            loads.append(stats.load)
        seen["stream"] = [x]
        logits = self.logit_scale * (self.final_norm(x) @ self.head.kernel[...])
        return logits, loads, seen


def residual_moe_probe(
    base: BaseSpec, shape: MoEShape, *, scheme: str = "moe_mup", positions: int = 8, bias_rate: float = 0.01
) -> Probe:
    """The reduced model: residual expert layers that predict a token from the `positions` before it.

    Args:
      base: The tuned model.
      shape: Sizes.
      scheme: As in `rules`.
      positions: Tokens of context.
      bias_rate: Step of the selection biases.

    Returns:
      A probe whose batches are (rows, positions + 1) int32 tokens, the last one the target.
    """
    table = rules(base, shape, scheme)
    branch, logit_scale = table["expert_down"].fwd_mult, table["unembedding"].fwd_mult

    def make(rngs: nnx.Rngs) -> _ResidualMoE:
        return _ResidualMoE(shape, positions, branch, logit_scale, rngs)

    parts: Any = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    graphdef, abstract, abstract_rest = parts

    def init(key: Array) -> tuple[Any, Any]:
        rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_rest)
        return init_params(abstract, key, base, shape, scheme=scheme), rest

    def loss(params: Any, rest: Any, batch: Array) -> tuple[Array, Any]:
        logits, loads, _ = nnx.merge(graphdef, params, rest)(batch[:, :-1])
        biases, treedef = jax.tree.flatten(rest)
        moved = [
            update_expert_bias(bias, jax.lax.stop_gradient(load), shape.kappa, bias_rate)
            for bias, load in zip(biases, loads, strict=True)
        ]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1])
        return jnp.mean(nats), jax.tree.unflatten(treedef, moved)

    def activations(params: Any, rest: Any, batch: Array) -> dict[str, Array]:
        logits, _, seen = nnx.merge(graphdef, params, rest)(batch[:, :-1])
        return {name: jnp.stack(values) for name, values in seen.items()} | {"logits": logits}

    return Probe(init, loss, activations)
