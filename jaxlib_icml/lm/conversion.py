"""A dense language model made a mixture of experts, layer by layer (`jaxlib_icml.moe.prism_convert`)."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.generate import Sampling, generate
from jaxlib_icml.lm.loss import loss_fn
from jaxlib_icml.lm.transformer import Transformer, abstract_transformer, split_model
from jaxlib_icml.moe.prism_convert import ConvertedFFN, LayerReport, convert_ffn, partition_units
from jaxlib_icml.moe.prism_moe import (
    DenseFFN,
    PrismConfig,
    TrajectoryStats,
    accumulate_stats,
    taylor_importance,
    trajectory_stats,
)
from jaxlib_icml.nn import rotary_angles

__all__ = ["Conversion", "convert_to_moe", "converted_config", "trajectory_of", "unit_importances"]

_TOKENS_AT_ONCE = 4096

Partition = Callable[[DenseFFN, Array, TrajectoryStats, PrismConfig], tuple[Array, Array]]


class Conversion(NamedTuple):
    """A converted model.

    Attributes:
      state: All its variables.
      config: Its architecture.
      reports: What happened to each layer.
    """

    state: nnx.State
    config: LMConfig
    reports: tuple[LayerReport, ...]


def converted_config(config: LMConfig, prism: PrismConfig, *, router_delta: int = 0) -> LMConfig:
    """The architecture that `convert_to_moe` makes.

    Args:
      config: A dense architecture.
      prism: Sizes of the parts.
      router_delta: Hidden width of the learned correction of the router, which starts as nothing; 0 for none.

    Returns:
      The architecture with experts.

    Raises:
      ValueError: Experts already, biases in the feed-forward blocks, or hidden units that do not divide.

    >>> new = converted_config(LMConfig(mlp_width=512), PrismConfig())
    >>> new.num_experts, new.shared_expert_width, new.expert_width
    (12, 128, 32)
    """
    if config.num_experts:
        raise ValueError("config: the model has experts already")
    if config.mlp_bias:
        raise ValueError("config: mlp_bias, but experts have no biases")
    shared, size = prism.sizes(config.resolved_mlp_width)
    return dataclasses.replace(
        config,
        num_experts=prism.num_experts,
        num_active_experts=prism.num_active,
        expert_width=size,
        shared_expert_width=shared,
        moe_gate="cosine",
        moe_balance="bias",
        moe_router_delta=router_delta,
    )


def trajectory_of(
    graphdef: Any, state: nnx.State, prompts: Int[Array, "rows seq"], key: Key[Array, ""], length: int
) -> Int[Array, "rows total"]:
    """Prompts with what the model itself makes of them, sampled from the 900 likeliest tokens within 0.96 of the mass.

    Args:
      graphdef: The model.
      state: Its variables.
      prompts: Beginnings, all of one length.
      key: A random key.
      length: Tokens of a row.

    Returns:
      Rows of `length` tokens (of the prompts' length if that is more).
    """
    new = length - prompts.shape[1]
    if new < 1:
        return prompts
    vocab = nnx.merge(graphdef, state).config.vocab_size
    sampling = Sampling(1.0, min(900, vocab), 0.96)
    lengths = jnp.full(prompts.shape[0], prompts.shape[1], jnp.int32)
    out = generate(graphdef, state, prompts, lengths, key, max_new_tokens=new, sampling=sampling, stop_tokens=())
    return jnp.concatenate([prompts, out.tokens], axis=1)


def convert_to_moe(
    state: nnx.State,
    config: LMConfig,
    tokens: Int[Array, "rows seq"],
    prism: PrismConfig | None = None,
    *,
    trajectory: Int[Array, "rows seq"] | None = None,
    num_steps: int = 8,
    router_delta: int = 0,
    compensate: bool = True,
    partition: Partition | None = None,
    key: Key[Array, ""] | None = None,
    on_layer: Callable[[int, LayerReport], None] | None = None,
) -> Conversion:
    """Cut every dense feed-forward block into a shared part and routed experts, without training.

    Units are judged by the loss on `tokens`, and by their activity along `trajectory`, whose steps are equal parts of
    the positions. Layers are converted in order; each sees what the converted layers before it produce, and is repaired
    towards what the dense model has in its place.

    Args:
      state: All variables of the dense model.
      config: Its architecture.
      tokens: Text to calibrate on.
      prism: How blocks are cut; None: the paper's defaults.
      trajectory: Text of the model's own (`trajectory_of`); None: `tokens`.
      num_steps: Steps of the trajectory.
      router_delta: As in `converted_config`.
      compensate: Whether to repair.
      partition: Another way to choose the units of the shared part and of each expert, from the block, its units'
        importances, their statistics and `prism`; None: the paper's, `partition_units`.
      key: For the correction of the router; None: a fixed one.
      on_layer: Called with every layer's number and report.

    Returns:
      `Conversion`. With all experts active, and without repair, the model computes what the dense one did.

    Raises:
      ValueError: A model that has experts, biases or L2A; hidden units that do not divide; no tokens; statistics that
        are not finite, with the layer.
    """
    prism = PrismConfig() if prism is None else prism
    new_config = converted_config(config, prism, router_delta=router_delta)
    if config.attention != "full":
        raise ValueError(f"config: attention = {config.attention} cannot be converted")
    if tokens.size == 0:
        raise ValueError("tokens: there are none to calibrate on")
    if num_steps < 1:
        raise ValueError(f"num_steps: must be at least 1, got {num_steps}")
    trajectory = tokens if trajectory is None else trajectory
    flat_config = dataclasses.replace(config, scan_layers=False)
    dense = nnx.merge(nnx.split(abstract_transformer(flat_config))[0], _unstacked(state, config))
    importance = unit_importances(dense, tokens)

    positions = jnp.arange(trajectory.shape[1])
    steps = jnp.tile(positions * num_steps // trajectory.shape[1], trajectory.shape[0])
    teacher = student = _embedded(dense, trajectory)
    rotary = None
    if config.positions == "rotary":
        rotary = rotary_angles(positions, config.resolved_head_dim, config.rope_theta, config.resolved_rope_scaling)

    @jax.jit
    def attend(block: Any, x: Array) -> tuple[Array, Array]:
        x = x + config.residual_scale * block.attention(block.attention_norm(x), rotary)[0]
        return x, block.mlp_norm(x).reshape(-1, config.width)

    converted: list[ConvertedFFN] = []
    reports: list[LayerReport] = []
    for i, block in enumerate(dense.layers):
        ffn = DenseFFN(*block.mlp.kernels())
        (teacher, theirs), (student, ours) = attend(block, teacher), attend(block, student)
        stats = trajectory_stats(ffn.down.shape[0], num_steps)
        for part in _parts(theirs.shape[0]):
            stats = accumulate_stats(stats, ffn.hidden(theirs[part]), steps[part])
        try:
            shared, groups = (partition or partition_units)(ffn, importance[i], stats, prism)
            target = ffn(theirs)
            new, report = convert_ffn(ffn, shared, groups, ours, prism, target=target, compensate=compensate)
        except ValueError as error:
            raise ValueError(f"layer {i}: {error}") from error
        teacher = teacher + config.residual_scale * target.reshape(teacher.shape)
        student = student + config.residual_scale * new(ours, prism.num_active).reshape(student.shape)
        converted.append(new)
        reports.append(report)
        if on_layer is not None:
            on_layer(i, report)
    return Conversion(_assembled(dense, new_config, converted, key), new_config, tuple(reports))


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _TOKENS_AT_ONCE) for start in range(0, count, _TOKENS_AT_ONCE))


def _unstacked(state: nnx.State, config: LMConfig) -> nnx.State:
    """The variables with one child per layer."""
    if not config.scan_layers:
        return state
    flat: list[tuple[Any, Any]] = []
    for path, x in nnx.to_flat_state(state):
        if path[0] != "layers":
            flat.append((path, x))
            continue
        flat += [(("layers", i, *path[1:]), x.replace(x[...][i])) for i in range(config.num_layers)]
    return nnx.from_flat_state(flat)


def _embedded(model: Transformer, tokens: Array) -> Array:
    x = model.embed(tokens)
    if model.config.positions == "learned":
        x = x + model.position_embed(jnp.arange(tokens.shape[1]))
    return x


def unit_importances(model: Transformer, tokens: Int[Array, "rows seq"]) -> list[Array]:
    """`taylor_importance` of the hidden units of all layers, by the loss of predicting `tokens`.

    Args:
      model: A dense model, layers not scanned.
      tokens: Text.

    Returns:
      (hidden,) for each layer.

    Raises:
      ValueError: Importances that are not finite, with the layer.
    """
    graphdef, params, rest = split_model(model)
    batch = max(1, _TOKENS_AT_ONCE // tokens.shape[1])
    batches = [tokens[start : start + batch] for start in range(0, tokens.shape[0], batch)]

    def loss(params: Any, rows: Array) -> Array:
        data = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        return loss_fn(graphdef, nnx.merge_state(params, rest), data)[0]

    def block(tree: Any, i: int) -> DenseFFN:
        mlp = tree["layers"][i]["mlp"]
        inputs = [mlp[name]["kernel"][...] for name in ("gate", "up") if name in mlp]
        return DenseFFN(tuple(inputs), mlp["down"]["kernel"][...])

    gradient = jax.jit(jax.grad(loss))
    total: list[Any] = [0.0] * model.config.num_layers
    for rows in batches:
        grads = gradient(params, rows)
        for i in range(model.config.num_layers):
            try:
                total[i] = total[i] + taylor_importance([block(grads, i)], block(params, i))
            except ValueError as error:
                raise ValueError(f"layer {i}: {error}") from error
    return total


def _assembled(dense: Transformer, config: LMConfig, layers: list[ConvertedFFN], key: Any) -> nnx.State:
    """The new model's variables: the dense one's, and the experts."""
    flat_config = dataclasses.replace(config, scan_layers=False)
    model = Transformer(flat_config, rngs=nnx.Rngs(params=jax.random.key(0) if key is None else key))
    old = dict(nnx.to_flat_state(nnx.state(dense)))
    new = dict(nnx.to_flat_state(nnx.state(model)))
    new |= {path: x for path, x in old.items() if path in new}

    def put(path: tuple[Any, ...], value: Float[Array, "..."]) -> None:
        new[path] = new[path].replace(value.astype(new[path].dtype))

    for i, layer in enumerate(layers):
        where = ("layers", i, "moe")
        put((*where, "router", "kernel"), layer.router)
        put((*where, "expert_bias"), layer.bias)
        for name, part in (("experts", layer.split.experts), ("shared", layer.split.shared)):
            if part is None:
                continue
            names = ["gate", "up", "down"] if len(part.inputs) == 2 else ["up", "down"]
            for matrix, kernel in zip(names, (*part.inputs, part.down), strict=True):
                put((*where, name, matrix, "kernel"), kernel)
    if not config.scan_layers:
        return nnx.from_flat_state(list(new.items()))
    stacked: dict[tuple[Any, ...], list[Any]] = {}
    for path, x in new.items():
        stacked.setdefault(("layers", *path[2:]) if path[0] == "layers" else path, []).append(x)
    like = dict(nnx.to_flat_state(nnx.state(abstract_transformer(config))))
    return nnx.from_flat_state(
        [
            (path, like[path].replace(jnp.stack([x[...] for x in xs]) if path[0] == "layers" else xs[0][...]))
            for path, xs in stacked.items()
        ]
    )
