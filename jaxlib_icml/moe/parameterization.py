"""Rules by which a tuned small mixture-of-experts transformer lends its hyper-parameters to larger ones.

The rules are pure functions of sizes: nothing is attached to arrays, so they survive sharding, stacking and
checkpoints. With rn, rL, rm the ratios of width, depth and expert width to the base model, Adam's table is

| group | initial std | learning rate | eps | decay |
|---|---|---|---|---|
| embedding | σ_e | 1 | 1/rn | 1 |
| norm | (ones) | 1 | 1/rn | 0 |
| query_key, value, attention_out | n^-1/2 | 1/rn | 1/(rn rL) | rn |
| router | n^-γ | 1/rn | 1/(rn rL) | rn |
| expert_up, shared_up | n^-1/2 | 1/rn | 1/(rm rL) | rn |
| expert_down, shared_down | √n/m | 1/rm | rn/(rm² rL) | rm |
| bias | (zeros) | 1 | 1/rL | 0 |
| unembedding | σ_e | 1 | 1/rn | 1 |

and the forward pass multiplies both branches of a block by 1/L, attention's logits by 1/d_h instead of its root, and
the output logits by 1/rn. The numbers of experts, in all and active, appear nowhere: their ratio κ must stay.

From "Hyperparameter Transfer with Mixture-of-Experts Layers" (arXiv:2601.20205), which builds on CompleteP
(arXiv:2505.01618). The rows of shared experts, and the exponents of OLion and Muon (`transfer_optimizer`), are ours.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxlib_icml.moe.config import OPTIMIZERS, UNIT_CONSTANTS, BaseSpec, MoEShape
from jaxlib_icml.nn import TreeLeaf, tree_leaves

SCHEMES = ("moe_mup", "completep", "mup", "sp")
GROUPS = (
    "embedding",
    "norm",
    "query_key",
    "value",
    "attention_out",
    "router",
    "expert_up",
    "expert_down",
    "shared_up",
    "shared_down",
    "bias",
    "unembedding",
)
MATRIX_GROUPS = frozenset(GROUPS) - {"embedding", "norm", "bias", "unembedding"}
"""Groups of hidden matrices, which OLion and Muon treat as such."""

GroupMap = Mapping[str, str] | Callable[[str, Any], str | None]
"""The user's own groups: from path (or the end of one) to group, or a function of path and leaf; None: our names."""


class Rule(NamedTuple):
    """How one group of parameters is made and trained.

    Attributes:
      init_std: Standard deviation of the initial values; 1 for norm scales, which start at 1, 0 for zeros.
      lr_mult: Factor on the base learning rate η, the base model's constants included.
      eps_mult: Factor on ε₀.
      wd_mult: Factor on the decoupled decay λ (which the learning rate then multiplies).
      fwd_mult: Factor on what the group's product adds in the forward pass.
    """

    init_std: float
    lr_mult: float
    eps_mult: float
    wd_mult: float
    fwd_mult: float


def rules(base: BaseSpec, shape: MoEShape, scheme: str = "moe_mup") -> dict[str, Rule]:
    """The rule of every group for a model of these sizes.

    Args:
      base: The tuned model.
      shape: Sizes of the model to train.
      scheme: "moe_mup" (the table above); "completep" (the same with experts' last matrices at fan-in, m^-1/2, the
        paper's ablation); "mup" (width only: completep without any depth factor); "sp" (standard parameterization:
        fan-in everywhere, one learning rate, no factors).

    Returns:
      Group -> `Rule`, in the order of `GROUPS`.

    Raises:
      ValueError: An unknown scheme; κ or the head size differ from the base's (both are outside the theory); a shared
        expert in only one of the two models.

    >>> small = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> large = MoEShape(width=256, num_layers=4, expert_width=1024, num_experts=16, num_active=4)
    >>> rule = rules(BaseSpec(small), large)["expert_down"]
    >>> rule.lr_mult * 16, rule.eps_mult, rule.fwd_mult
    (0.125, 0.03125, 0.25)
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    old = base.shape
    if shape.num_active * old.num_experts != old.num_active * shape.num_experts:
        raise ValueError(
            f"shape: κ = {shape.num_active}/{shape.num_experts}, but the base model has "
            f"{old.num_active}/{old.num_experts}; transfer holds at fixed κ only"
        )
    if shape.head_dim != old.head_dim:
        raise ValueError(f"shape: head_dim {shape.head_dim} differs from the base's {old.head_dim}; scale num_heads")
    if bool(shape.shared_expert_width) != bool(old.shared_expert_width):
        raise ValueError("shape: shared_expert_width must be 0 in both models or in none")

    standard = scheme == "sp"
    n, depth = shape.width, shape.num_layers
    rn = 1.0 if standard else n / old.width
    rl = 1.0 if scheme in ("sp", "mup") else depth / old.num_layers
    constants = UNIT_CONSTANTS if standard else base.constants
    branch = 1.0 if scheme in ("sp", "mup") else 1 / depth
    wide = n**-0.5

    def feed_forward(m: int, m0: int) -> tuple[Rule, Rule]:
        rm = 1.0 if standard or not m else m / m0
        fan_in = max(m, 1)
        down_std = math.sqrt(n) / fan_in if scheme == "moe_mup" else fan_in**-0.5
        up = Rule(wide, 1 / rn, 1 / (rm * rl), rn, 1.0)
        down = Rule(constants.down_std * down_std, constants.down_rate / rm, rn / (rm**2 * rl), rm, branch)
        return up, down

    def attention(std: float, rate: float, fwd: float) -> Rule:
        return Rule(std * wide, rate / rn, 1 / (rn * rl), rn, fwd)

    expert_up, expert_down = feed_forward(shape.expert_width, old.expert_width)
    shared_up, shared_down = feed_forward(shape.shared_expert_width, old.shared_expert_width)
    router_std = wide if standard else n**-base.router_exponent
    found = {
        "embedding": Rule(base.embedding_std, 1.0, 1 / rn, 1.0, 1.0),
        "norm": Rule(1.0, 1.0, 1 / rn, 0.0, 1.0),
        "query_key": attention(1.0, constants.qkv_rate, 1.0),
        "value": attention(constants.value_std, constants.qkv_rate, 1.0),
        "attention_out": attention(1.0, 1.0, branch),
        "router": Rule(router_std, constants.router_rate / rn, 1 / (rn * rl), rn, 1.0),
        "expert_up": expert_up,
        "expert_down": expert_down,
        "shared_up": shared_up,
        "shared_down": shared_down,
        "bias": Rule(0.0, 1.0, 1 / rl, 0.0, 1.0),
        "unembedding": Rule(wide if standard else base.embedding_std, 1.0, 1 / rn, 1.0, 1 / rn),
    }
    return {group: found[group] for group in GROUPS}


def optimizer_rules(
    base: BaseSpec,
    shape: MoEShape,
    optimizer: str | None = None,
    *,
    scheme: str = "moe_mup",
    hidden_exponent: float = 1.0,
) -> dict[str, Rule]:
    """`rules` for an optimizer other than Adam.

    OLion's updates of hidden matrices have fixed entries as Adam's have; for coherent gradients Adam's exponents hold
    as they are. Orthogonalization flattens the spectrum, though, so that with full-rank gradients features change less
    and less with width; `hidden_exponent` = 1/2 is the other end, and a sweep decides. Muon's updates have spectral
    norm 0.2 √max(rows, columns): rn^-1/2 for attention and the experts' first matrices, √rn/rm for their last, and
    1/rn for the router, whose few columns are coherent already. Decay times learning rate stays what it is at the base.

    Args:
      base: The tuned model.
      shape: Sizes of the model to train.
      optimizer: "adam", "adamw", "olion" or "muon"; None: the base's.
      scheme: As in `rules`.
      hidden_exponent: For "olion": the learning rates of hidden matrices fall with the ratio to this power.

    Returns:
      Group -> `Rule`.

    Raises:
      ValueError: What `rules` refuses; an unknown optimizer; an exponent outside [0, 1].

    >>> small = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> wide = MoEShape(width=256, num_layers=2, expert_width=512, num_experts=4, num_active=1)
    >>> optimizer_rules(BaseSpec(small), wide, "muon")["attention_out"].lr_mult
    0.5
    """
    optimizer = base.optimizer if optimizer is None else optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not 0 <= hidden_exponent <= 1:
        raise ValueError(f"hidden_exponent: must be in [0, 1], got {hidden_exponent}")
    table, at_base = rules(base, shape, scheme), rules(base, base.shape, scheme)
    if optimizer in ("adam", "adamw"):
        return table
    width_ratio = at_base["query_key"].lr_mult / table["query_key"].lr_mult
    for group in MATRIX_GROUPS:
        rule, constant = table[group], at_base[group].lr_mult
        ratio = rule.lr_mult / constant
        if optimizer == "olion":
            ratio = ratio**hidden_exponent
        elif group in ("expert_down", "shared_down"):
            ratio *= math.sqrt(width_ratio)
        elif group != "router":
            ratio = math.sqrt(ratio)
        table[group] = rule._replace(lr_mult=constant * ratio, wd_mult=1 / ratio)
    return table


_OURS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("embedding",), "embedding"),
    (("scale",), "norm"),
    (("bias",), "bias"),
    (("head", "kernel"), "unembedding"),
    (("attention", "query", "kernel"), "query_key"),
    (("attention", "key", "kernel"), "query_key"),
    (("attention", "value", "kernel"), "value"),
    (("attention", "out", "kernel"), "attention_out"),
    (("router", "kernel"), "router"),
    *(((module, name, "kernel"), "expert_up") for module in ("experts", "mlp") for name in ("gate", "up")),
    *(((module, "down", "kernel"), "expert_down") for module in ("experts", "mlp")),
    *((("shared", name, "kernel"), "shared_up") for name in ("gate", "up")),
    (("shared", "down", "kernel"), "shared_down"),
)


def group_of(path: str, leaf: Any = None, groups: GroupMap | None = None) -> str:
    """The group of one parameter.

    Args:
      path: Names joined by slashes, "layers/0/moe/router/kernel".
      leaf: The parameter; only handed to a callable `groups`.
      groups: The user's own groups, which go before the names of our models.

    Returns:
      One of `GROUPS`.

    Raises:
      ValueError: No name fits, or several do; a group that does not exist. The message names the path.

    >>> group_of("layers/3/moe/experts/up/kernel"), group_of("mlp/w1", groups={"w1": "expert_up"})
    ('expert_up', 'expert_up')
    """
    parts = tuple(path.split("/"))
    if callable(groups):
        own = groups(path, leaf)
        found = set() if own is None else {own}
    else:
        found = {group for end, group in (groups or {}).items() if _ends(parts, tuple(end.split("/")))}
    if not found:
        found = {group for end, group in _OURS if _ends(parts, end)}
        if found == {"router"} and "attention" in parts:
            found = set()  # L2A's router, which no rule is known for
    if len(found) > 1:
        raise ValueError(f"groups: {path} is matched as {' and as '.join(sorted(found))}")
    if not found:
        raise ValueError(f"groups: {path} belongs to no group; name it in groups, one of {', '.join(GROUPS)}")
    group = found.pop()
    if group not in GROUPS:
        raise ValueError(f"groups: {path} is in {group!r}, which is none of {', '.join(GROUPS)}")
    return group


def _ends(parts: tuple[str, ...], end: tuple[str, ...]) -> bool:
    return parts[len(parts) - len(end) :] == end


def grouped_leaves(
    params: Any, shape: MoEShape | None = None, groups: GroupMap | None = None
) -> list[tuple[TreeLeaf, str]]:
    """All parameters with their groups, checked against the sizes of the model.

    Args:
      params: Arrays or anything with shapes; nnx states, modules' parameters and nested mappings.
      shape: Sizes that the arrays must have; None: unchecked.
      groups: As in `group_of`.

    Returns:
      In the order of `jax.tree.leaves(params)`.

    Raises:
      ValueError: What `group_of` refuses, or an array of another model; the message names the path.
    """
    leaves = [(leaf, group_of(leaf.path, leaf.value, groups)) for leaf in tree_leaves(params)]
    if shape is not None:
        for leaf, group in leaves:
            _check_shape(leaf, group, shape)
    return leaves


def _check_shape(leaf: TreeLeaf, group: str, shape: MoEShape) -> None:
    """The axes that tell a model from one of another size; axes in front (layers, experts) are free."""
    n, m, shared = shape.width, shape.expert_width, shape.shared_expert_width
    ends = {
        "embedding": (n,),
        "attention_out": (n,),
        "router": (n, shape.num_experts),
        "expert_up": (n, m),
        "expert_down": (m, n),
        "shared_up": (n, shared),
        "shared_down": (shared, n),
    }
    given = jnp.shape(leaf.value)
    wanted = ends.get(group, ())
    if given[len(given) - len(wanted) :] != wanted:
        raise ValueError(f"shape: {leaf.path} of shape {given} should end in {wanted}; it belongs to another model")
    if group in ("query_key", "value", "unembedding") and n not in given:
        raise ValueError(f"shape: {leaf.path} of shape {given} has no axis of width {n}; it belongs to another model")


def init_params(
    params: Any,
    key: Key[Array, ""],
    base: BaseSpec,
    shape: MoEShape,
    *,
    scheme: str = "moe_mup",
    groups: GroupMap | None = None,
) -> Any:
    """Initial parameters by the rules: normal, ones for norm scales, zeros for biases.

    Args:
      params: A tree of arrays, or of `jax.ShapeDtypeStruct`s, that says what there is.
      key: A JAX random key; every path has its own draw, whatever else is in the tree.
      base: The tuned model.
      shape: Sizes of this model.
      scheme: As in `rules`.
      groups: As in `group_of`.

    Returns:
      A tree like `params` with new values in the same dtypes.

    Raises:
      ValueError: What `rules` and `grouped_leaves` refuse.

    >>> shape = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> up = {"up": {"kernel": jnp.zeros((4, 64, 128))}}
    >>> made = init_params({"experts": up}, jax.random.key(0), BaseSpec(shape), shape)["experts"]
    >>> round(float(made["up"]["kernel"].std()) * 8, 2)
    1.0
    """
    table = rules(base, shape, scheme)
    values = []
    for leaf, group in grouped_leaves(params, shape, groups):
        given, dtype = jnp.shape(leaf.value), leaf.value.dtype
        if group in ("norm", "bias"):
            values.append(jnp.full(given, table[group].init_std, dtype))
            continue
        own = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()))
        wide = jnp.promote_types(dtype, jnp.float32)
        values.append((table[group].init_std * jax.random.normal(own, given, wide)).astype(dtype))
    return jax.tree.unflatten(jax.tree.structure(params), values)


def check_routers(params: Any, biases: Any = (), groups: GroupMap | None = None) -> None:
    """Refuse routers that cannot tell experts apart.

    With equal columns and equal selection biases all scores tie, the lowest indices always win, and the loss still
    falls, so that nothing else would show it.

    Args:
      params: Concrete parameters.
      biases: The experts' selection biases, any tree of arrays (*layers, experts).
      groups: As in `group_of`.

    Raises:
      ValueError: A router whose columns are all equal while no selection bias differs.

    >>> check_routers({"router": {"kernel": jnp.eye(3)}})
    """
    if any(bool(jnp.any(bias != bias[..., :1])) for bias in jax.tree.leaves(biases)):
        return
    for leaf, group in grouped_leaves(params, None, groups):
        if group == "router" and leaf.value.shape[-1] > 1 and bool(jnp.all(leaf.value == leaf.value[..., :1])):
            raise ValueError(f"params: {leaf.path} and the selection biases give all experts the same score")


def rule_table(
    params: Any,
    base: BaseSpec,
    shape: MoEShape,
    *,
    optimizer: str | None = None,
    scheme: str = "moe_mup",
    hidden_exponent: float = 1.0,
    groups: GroupMap | None = None,
) -> str:
    """A printable table of every parameter and its rule, to look at before training.

    Args:
      params: Arrays or anything with shapes.
      base: The tuned model.
      shape: Sizes of this model.
      optimizer: As in `optimizer_rules`.
      scheme: As in `rules`.
      hidden_exponent: As in `optimizer_rules`.
      groups: As in `group_of`.

    Returns:
      Lines of text: path, shape, group, initial standard deviation, learning rate, eps and decay (as they are used,
      not as factors). Layers with the same rules share a line.

    Raises:
      ValueError: What `optimizer_rules` and `grouped_leaves` refuse.

    >>> shape = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
    >>> print(rule_table({"router": {"kernel": jnp.zeros((64, 4))}}, BaseSpec(shape), shape))
    parameter      shape    group   std       rate      eps    decay
    router/kernel  (64, 4)  router  0.015625  0.000977  1e-12  0
    """
    table = optimizer_rules(base, shape, optimizer, scheme=scheme, hidden_exponent=hidden_exponent)
    rows: list[tuple[str, ...]] = [("parameter", "shape", "group", "std", "rate", "eps", "decay")]
    count: dict[tuple[str, ...], int] = {}
    for leaf, group in grouped_leaves(params, shape, groups):
        rule = table[group]
        numbers = (
            rule.init_std,
            base.learning_rate * rule.lr_mult,
            base.eps * rule.eps_mult,
            base.weight_decay * rule.wd_mult,
        )
        name = "/".join("*" if part.isdigit() else part for part in leaf.parts)
        cells = [f"{x:.3g}" if x < 0.01 else f"{x:.5g}" for x in numbers]
        row = (name, str(tuple(jnp.shape(leaf.value))), group, *cells)
        count[row] = count.get(row, 0) + 1
    rows += [(f"{row[0]} ({times} x)" if times > 1 else row[0], *row[1:]) for row, times in count.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
