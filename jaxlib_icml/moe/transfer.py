"""The optimizer that applies the rules of `jaxlib_icml.moe.parameterization`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxlib_icml.moe.config import BaseSpec, MoEShape
from jaxlib_icml.moe.parameterization import MATRIX_GROUPS, GroupMap, Rule, grouped_leaves, optimizer_rules
from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim import MatrixSpec, default_matrix_specs, muon_direction, scale_by_olion

Schedule = float | Array | Callable[..., Any]


def scale_by_adam_grouped(b1: float = 0.9, b2: float = 0.95, eps_tree: Any = 1e-12) -> optax.GradientTransformation:
    """Adam's direction with an ε of its own for every parameter.

    m̂ / (√v̂ + ε), with the state of `optax.scale_by_adam` and, for equal ε, the same bits.

    Args:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps_tree: One number, a tree of numbers like the parameters, or a callable from the parameters (or gradients) to
        such a tree.

    Returns:
      An Optax transformation with state `optax.ScaleByAdamState`.

    Raises:
      ValueError: A decay outside [0, 1); a negative ε, or a tree that does not fit.

    >>> tx = scale_by_adam_grouped(eps_tree={"a": 1.0, "b": 3.0})
    >>> g = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> {name: round(float(u[0]), 2) for name, u in tx.update(g, tx.init(g))[0].items()}
    {'a': 0.5, 'b': 0.25}
    """
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: must be in [0, 1), got {value}")

    def resolve(tree: Any) -> Any:
        eps = eps_tree(tree) if callable(eps_tree) else eps_tree
        if isinstance(eps, int | float):
            eps = jax.tree.map(lambda _: eps, tree)
        if len(jax.tree.leaves(eps)) != len(jax.tree.leaves(tree)):
            raise ValueError("eps_tree: must have one number for every parameter")
        for value in jax.tree.leaves(eps):
            if not 0 <= value < math.inf:
                raise ValueError(f"eps_tree: must be at least 0, got {value}")
        return jax.tree.leaves(eps)

    def init(params: Any) -> optax.ScaleByAdamState:
        resolve(params)
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        first, second = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)
        leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), resolve(updates), strict=True)
        directions = [m / (jnp.sqrt(v) + eps) for m, v, eps in leaves]
        return jax.tree.unflatten(jax.tree.structure(updates), directions), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def transfer_optimizer(
    base: BaseSpec,
    shape: MoEShape,
    inner: str | None = None,
    schedule: Schedule | None = None,
    *,
    scheme: str = "moe_mup",
    groups: GroupMap | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    hidden_exponent: float = 1.0,
    **direction: Any,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a model whose learning rate and ε were tuned on a smaller one.

    w ← w - η_t lr (u + λ wd w), where u is Adam's direction (hidden matrices: OLion's or Muon's) and lr, wd and Adam's
    ε come from `optimizer_rules`.

    Args:
      base: The tuned model.
      shape: Sizes of the model to train; its parameters are checked against them.
      inner: "adam", "adamw" (with decoupled weight decay), "olion" or "muon" (hidden matrices; Adam for the rest);
        None: the base's.
      schedule: η_t, a number or an Optax schedule at the base; None: the base's learning rate.
      scheme: As in `rules`.
      groups: As in `group_of`.
      b1: Adam's first decay.
      b2: Adam's second decay.
      hidden_exponent: As in `optimizer_rules`.
      **direction: Options of `scale_by_olion` or `muon_direction`, such as `param_shardings`.

    Returns:
      An Optax transformation; with weight decay, `update` needs the parameters.

    Raises:
      ValueError: What `optimizer_rules` refuses; weight decay with "adam"; at `init` parameters of no group, of
        several, or of another model, by path.

    >>> small = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> wide = MoEShape(width=256, num_layers=2, expert_width=512, num_experts=4, num_active=1)
    >>> params = {"router": {"kernel": jnp.ones((256, 4))}, "norm": {"scale": jnp.ones(256)}}
    >>> tx = transfer_optimizer(BaseSpec(small, learning_rate=1.0), wide)
    >>> updates, _ = tx.update(params, tx.init(params))
    >>> round(float(updates["router"]["kernel"][0, 0] * 64), 3), round(float(updates["norm"]["scale"][0]), 3)
    (-1.0, -1.0)
    """
    inner = base.optimizer if inner is None else inner
    table = optimizer_rules(base, shape, inner, scheme=scheme, hidden_exponent=hidden_exponent)
    if inner == "adam" and base.weight_decay:
        raise ValueError(f"inner: adam has no weight decay, the base has {base.weight_decay}; use adamw")
    if direction and inner not in ("olion", "muon"):
        raise ValueError(f"direction: {inner} has no options {', '.join(direction)}")

    def by_rule(tree: Any, number: Callable[[Rule], Any]) -> Any:
        """A number for every leaf."""
        leaves = [number(table[group]) for _, group in grouped_leaves(tree, shape, groups)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def is_matrix(tree: Any) -> Any:
        found = [group in MATRIX_GROUPS for _, group in grouped_leaves(tree, shape, groups)]
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    def specs(tree: Any) -> Any:
        """The matrices' axes; the last two where our names say nothing."""
        inferred = {leaf.parts: leaf.value for leaf in tree_leaves(default_matrix_specs(tree), _is_spec)}
        found = [
            (inferred[leaf.parts] or MatrixSpec(-2, -1)) if group in MATRIX_GROUPS else None
            for leaf, group in grouped_leaves(tree, shape, groups)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    def rest(tree: Any) -> Any:
        return jax.tree.map(lambda matrix: not matrix, is_matrix(tree))

    adam = scale_by_adam_grouped(b1, b2, lambda tree: by_rule(tree, lambda rule: base.eps * rule.eps_mult))
    if inner in ("adam", "adamw"):
        directions = adam
    else:
        make = scale_by_olion if inner == "olion" else muon_direction
        directions = optax.chain(make(matrix_specs=specs, **direction), optax.masked(adam, rest))

    def scale(updates: Any, params: Any) -> Any:
        if base.weight_decay:
            if params is None:
                raise ValueError("weight decay needs the parameters: call update(grads, state, params)")
            decays = by_rule(updates, lambda rule: base.weight_decay * rule.wd_mult)
            updates = jax.tree.map(lambda u, w, decay: u + decay * w if decay else u, updates, params, decays)
        return jax.tree.map(lambda u, rate: rate * u, updates, by_rule(updates, lambda rule: rule.lr_mult))

    return optax.with_extra_args_support(
        optax.chain(
            directions,
            optax.stateless(scale),
            optax.scale_by_learning_rate(base.learning_rate if schedule is None else schedule),
        )
    )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, MatrixSpec)
