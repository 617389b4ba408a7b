"""Deeper and wider language models from trained ones (`jaxlib_icml.moe.growth`), and what their tokens cost."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.transformer import abstract_transformer
from jaxlib_icml.moe.growth import Growth, apply_growth, grow_depth, grow_width, layer_sources, perturb_clones

__all__ = [
    "active_parameters",
    "chinchilla_boundary",
    "cliff_index",
    "flops_per_token",
    "grow",
    "grown_config",
    "growth_plan",
    "norm_profile",
]


def grown_config(
    config: LMConfig, *, depth: int | Sequence[int] = 2, width: int = 2, method: str = "interpose"
) -> tuple[LMConfig, Growth]:
    """The architecture that `grow` makes.

    Args:
      config: The old architecture.
      depth: Copies of a layer, itself included; one number, or one for every layer.
      width: How many experts stand where one was, in all and active; 1 for dense models.
      method: As for `jaxlib_icml.moe.growth.grow_depth`.

    Returns:
      The new architecture, and what becomes of layers and experts.

    Raises:
      ValueError: Factors that are not positive integers, a width above 1 for a dense model or the cosine gate.

    >>> config, growth = grown_config(LMConfig(num_layers=2, num_experts=4))
    >>> config.num_layers, config.num_experts, config.num_active_experts, growth.sources
    (4, 8, 4, (0, 0, 1, 1))
    """
    if any(isinstance(one, bool) or one < 1 for one in ([depth] if isinstance(depth, int) else depth)):
        raise ValueError(f"depth must be a positive integer, or one for every layer, got {depth!r}")
    sources = layer_sources(config.num_layers, depth, method)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be a positive integer, got {width!r}")
    pruned = tuple(i for i, source in enumerate(sources) if source in config.pruned_layers)
    new = dataclasses.replace(config, num_layers=len(sources), pruned_layers=pruned)
    if width > 1:
        if not config.num_experts:
            raise ValueError("width must be 1 for a model without experts")
        if config.moe_gate == "cosine":
            raise ValueError("width must be 1 for the cosine gate: experts of weight 1 would double the output")
        new = dataclasses.replace(
            new,
            num_experts=width * config.num_experts,
            num_active_experts=width * config.num_active_experts,
            expert_width=config.resolved_expert_width,
        )
    return new, Growth(sources, width)


def grow(
    state: nnx.State,
    config: LMConfig,
    *,
    key: Array,
    depth: int | Sequence[int] = 2,
    width: int = 2,
    noise: float = 0.01,
    method: str = "interpose",
    order: str = "depth_first",
) -> tuple[nnx.State, LMConfig]:
    """A deeper model with more experts, of which more are active, from a trained one.

    Layers and experts are copied first, then all new experts get their noise: both orders give the same bits.

    Args:
      state: All variables of the model, selection biases included.
      config: Its architecture.
      key: A random key, for the noise.
      depth: Copies of a layer, itself included; one number, or one for every layer.
      width: How many experts stand where one was, in all and active.
      noise: Relative noise of new experts (`jaxlib_icml.moe.growth.grow_width`).
      method: As for `jaxlib_icml.moe.growth.grow_depth`.
      order: What is copied first.

    Returns:
      The new variables, and their architecture.

    Raises:
      ValueError: `state` is not a model of this architecture, what `grown_config` refuses, or an unknown order.
    """
    new, growth = grown_config(config, depth=depth, width=width, method=method)
    if order not in ("depth_first", "width_first"):
        raise ValueError(f"order must be 'depth_first' or 'width_first', got {order!r}")
    _check(state, config)

    if order == "depth_first":
        silent = method == "interpose_zero"
        return apply_growth(state, growth, key, noise=noise, gate=config.moe_gate, silent=silent), new
    wide = grow_width(state, key, width, noise=0.0, gate=config.moe_gate) if width > 1 else state
    return perturb_clones(grow_depth(wide, depth, method), key, width, noise), new


def _check(state: nnx.State, config: LMConfig) -> None:
    wanted = {path: x.shape for path, x in nnx.to_flat_state(nnx.state(abstract_transformer(config)))}
    given = {path: x.shape for path, x in nnx.to_flat_state(state)}
    different = sorted(".".join(map(str, path)) for path, _ in set(wanted.items()) ^ set(given.items()))
    if different:
        raise ValueError(f"state: not a model of this config; they differ in {', '.join(different[:3])}")


def active_parameters(config: LMConfig) -> int:
    """Parameters that one token meets: all but the embeddings of other tokens and the experts it does not choose."""
    inactive = 0
    total = 0
    for path, x in nnx.to_flat_state(nnx.state(abstract_transformer(config), nnx.Param)):
        total += x.size
        if "experts" in path:
            inactive += x.size * (config.num_experts - config.num_active_experts) // config.num_experts
        elif path[0] == "embed" and not config.tie_embeddings:
            inactive += x.size - config.width
    return total - inactive


def flops_per_token(config: LMConfig, *, context: int | None = None, backward: bool = False) -> int:
    """Multiplications and additions of one token, attention over half of the context included.

    Args:
      config: The architecture.
      context: Tokens of a sequence; None: the architecture's.
      backward: Those of a training step, three times as many.

    Returns:
      2 per weight of a matrix that the token meets, and 4 per feature of every query head and token it attends to.
      L2A counts as full attention: what it routes is not known beforehand.
    """
    matrices = 0
    for path, x in nnx.to_flat_state(nnx.state(abstract_transformer(config), nnx.Param)):
        if "experts" in path:
            matrices += x.size * config.num_active_experts // config.num_experts
        elif path[-1] == "kernel" or (path[0] == "embed" and config.tie_embeddings):
            matrices += x.size
    length = config.context_length if context is None else context
    seen = (length + 1) / 2
    if config.sliding_window is not None:
        seen = min(seen, config.sliding_window)
    attention = config.num_layers * 4 * config.num_heads * config.resolved_head_dim * seen
    return int((2 * matrices + attention) * (3 if backward else 1))


def chinchilla_boundary(active: int) -> float:
    """F_c = 6 N (20 N), the compute-optimal training of N active parameters, in operations."""
    if active < 1:
        raise ValueError(f"active must be at least 1, got {active}")
    return 6.0 * active * 20.0 * active


def growth_plan(flops_spent: float | int, active: int) -> Literal["interpose", "stack"]:
    """How to grow a model in depth: interposition once it has used more than `chinchilla_boundary`.

    Args:
      flops_spent: Operations of its training so far.
      active: Its active parameters.

    Raises:
      ValueError: Negative or infinite operations, no parameters.

    >>> growth_plan(1e15, 1_000_000), growth_plan(1e13, 1_000_000)
    ('interpose', 'stack')
    """
    if not 0 <= flops_spent < math.inf:
        raise ValueError(f"flops_spent must be at least 0 and finite, got {flops_spent}")
    return "interpose" if flops_spent > chinchilla_boundary(active) else "stack"


def norm_profile(state: Any) -> dict[str, np.ndarray]:
    """Root mean square of the matrices of every layer.

    Args:
      state: Variables of a model.

    Returns:
      By family ("attention.query.kernel"), (layers,) float64.
    """
    by_family: dict[str, dict[int, float]] = {}
    for path, x in nnx.to_flat_state(state):
        if path[0] != "layers" or path[-1] != "kernel":
            continue
        value = jnp.asarray(x[...], jnp.float32)
        stacked = not isinstance(path[1], int)
        squares = jnp.mean(value**2, axis=tuple(range(1 if stacked else 0, value.ndim)))
        family = by_family.setdefault(".".join(map(str, path[1:] if stacked else path[2:])), {})
        for i, one in enumerate(np.atleast_1d(np.asarray(squares, np.float64))):
            family[i if stacked else int(str(path[1]))] = float(one) ** 0.5
    return {name: np.array([layers[i] for i in sorted(layers)]) for name, layers in by_family.items()}


def cliff_index(profile: Mapping[str, np.ndarray], base_profile: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest step between neighbouring layers, over the mean step of the model before its growth.

    Args:
      profile: `norm_profile` of a model.
      base_profile: That of the model it was grown from, of at least two layers.

    Returns:
      By family; infinite where only the base has no steps at all.

    Raises:
      ValueError: Other families, or fewer than two layers.

    >>> rising = {"up": np.array([1.0, 2.0, 3.0])}
    >>> cliff_index({"up": np.tile(rising["up"], 2)}, rising)
    {'up': 2.0}
    """
    if profile.keys() != base_profile.keys():
        raise ValueError("profile and base_profile must have the same families")
    found = {}
    for name, base in base_profile.items():
        if len(base) < 2:
            raise ValueError(f"base_profile: {name} has fewer than two layers")
        largest, mean = np.max(np.abs(np.diff(profile[name]))), np.mean(np.abs(np.diff(base)))
        found[name] = float(largest / mean) if mean else (math.inf if largest else 0.0)
    return found
