"""L2A, learning to attend: a router decides, token by token, which queries attend beyond a sliding window.

"Learning When to Attend: Conditional Memory Access for Long-Context LLMs" (arXiv 2603.17484): the functions of arrays.
The layer is in `l2a_layer`, decoding in `l2a_cache`, what steers training and pruning in `l2a_control`.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kernels_pallas.dispatch import Implementation
from kernels_pallas.gathered_attention import gathered_attention
from kernels_pallas.sliding_window_attention import sliding_window_attention
from kernels_pallas.token_conditional_attention.api import gathered_rows, merge_rows

__all__ = ["L2AAux", "L2AConfig", "Routing", "capacity_for", "l2a_attention", "pack_routed", "route"]

_CHOICES = {
    "combine": ("replace", "add"),
    "estimator": ("st", "soft"),
    "overflow": ("drop_late", "topk"),
    "router": ("linear", "mlp"),
}


@dataclasses.dataclass(frozen=True)
class L2AConfig:
    """How a layer routes its tokens and combines the two attentions.

    Raises:
      ValueError: a value out of range; the message names the field.

    >>> L2AConfig(window=256).target_rate
    0.2
    """

    window: int
    """Positions that every token sees, its own included."""
    target_rate: float = 0.2
    """ρ: fraction of tokens to attend globally, on average over all layers."""
    combine: str = "replace"
    """Whether a routed token's global attention takes the place of the local one ("replace") or is added ("add")."""
    estimator: str = "st"
    """Gate of a routed token: 1 with the gradient of its probability p (straight-through, "st"), or p ("soft")."""
    capacity_factor: float = 1.25
    """Room for tokens above `capacity_rate`."""
    capacity_rate: float = 1.0
    """ρ_cap: rate of the busiest layer for which static shapes have room; 1 drops nothing."""
    init_rate: float = 0.9
    """ρ_init: probability of every token before training."""
    overflow: str = "drop_late"
    """Beyond capacity "drop_late" drops the latest tokens (causal), "topk" the least probable (only in training)."""
    sinks: int = 0
    """First positions that every token sees too."""
    router: str = "linear"
    """Function of the normalised token: "linear", or "mlp", width → 64 → 1 with SiLU."""
    threshold: float = 0.5
    """θ: probability from which a token is routed."""
    price_step: float = 0.005
    """η: how fast the price of routing follows the rate in training (`rate_controller`)."""
    price_damping: float = 0.1
    """κ: how much the price gives way at once where the rate is below its target."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {self.sinks}")
        for name in ("target_rate", "capacity_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in ("init_rate", "threshold"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor must be positive and finite, got {self.capacity_factor}")
        if not 0 < self.price_step < math.inf:
            raise ValueError(f"price_step must be positive and finite, got {self.price_step}")
        if not 0 <= self.price_damping < math.inf:
            raise ValueError(f"price_damping must be at least 0 and finite, got {self.price_damping}")
        _check_choices(combine=self.combine, estimator=self.estimator, overflow=self.overflow, router=self.router)


class Routing(NamedTuple):
    """Which tokens ask for global attention.

    Attributes:
      mask: (batch, seq) m, before any is dropped for lack of capacity.
      prob: (batch, seq) p, float32.
    """

    mask: Bool[Array, "*batch seq"]
    prob: Float[Array, "*batch seq"]


class L2AAux(NamedTuple):
    """What the routing of a layer did; padding tokens are not counted.

    Attributes:
      n_routed: (batch,) tokens that attended globally.
      n_overflow: (batch,) tokens that would have, but were beyond capacity.
      rate: ρ̂_hard, the fraction of tokens that asked for it, before any was dropped.
      prob_mean: ρ̂, the mean probability. Differentiable.
    """

    n_routed: Int[Array, "*layers batch"]
    n_overflow: Int[Array, "*layers batch"]
    rate: Float[Array, "*layers"]
    prob_mean: Float[Array, "*layers"]


def route(
    logits: Float[Array, "*batch seq"],
    *,
    key: Key[Array, ""] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    threshold: float = 0.5,
) -> Routing:
    """Decide which tokens attend globally: m = 1[z + τ ℓ ≥ logit θ] with logistic noise ℓ, p = sigmoid(z).

    Args:
      logits: z, the router's logits; computed with in (at least) float32.
      key: random key of the noise.
      temperature: τ ≥ 0; 0 is the noiseless decision p ≥ θ of inference. May be traced.
      threshold: θ, between 0 and 1.

    Returns:
      Mask and probabilities. No gradient passes through the mask.

    Raises:
      ValueError: a negative temperature, a positive or traced one without a key, a threshold out of range.

    >>> route(jnp.array([[-1.0, 0.0, 2.0]])).mask.tolist()
    [[False, True, True]]
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must be between 0 and 1, got {threshold}")
    noisy = True
    if not isinstance(temperature, jax.core.Tracer):
        if not 0 <= float(temperature) < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        noisy = float(temperature) > 0
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.lax.stop_gradient(logits)
    if noisy:
        if key is None:
            raise ValueError(f"key: routing at temperature {temperature} needs a random key, got None")
        scores += temperature * jax.random.logistic(key, logits.shape, logits.dtype)
    return Routing(scores >= math.log(threshold / (1 - threshold)), jax.nn.sigmoid(logits))


def capacity_for(seq: int, config: L2AConfig, *, block: int = 128) -> int:
    """Proposes how many tokens of a sequence may attend globally: min(T, block ⌈factor ρ_cap T / block⌉).

    Args:
      seq: T, tokens of the sequence.
      config: Its `capacity_factor` and `capacity_rate` are used.
      block: Capacities are multiples of this.

    Returns:
      A capacity C between 1 and `seq`.

    Raises:
      ValueError: `seq` or `block` below 1.

    >>> capacity_for(1024, L2AConfig(window=128, capacity_rate=0.25)), capacity_for(1024, L2AConfig(window=128))
    (384, 1024)
    """
    for name, value in (("seq", seq), ("block", block)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    blocks = config.capacity_factor * config.capacity_rate * seq / block
    return min(seq, block * max(1, math.ceil(blocks - 1e-9)))  # a product that rounding put above an integer


def pack_routed(
    mask: Bool[Array, "batch seq"],
    capacity: int,
    *,
    prob: Float[Array, "batch seq"] | None = None,
    overflow: str = "drop_late",
    train: bool = False,
) -> tuple[Int[Array, "batch capacity"], Int[Array, " batch"], Int[Array, " batch"]]:
    """The positions of routed tokens, at most `capacity` per row, in an array of static shape.

    Args:
      mask: routed tokens.
      capacity: C ≥ 1.
      prob: p, needed for "topk".
      overflow: of more than C routed tokens "drop_late" keeps the first, so that a token's fate depends on earlier
        ones only; "topk" keeps those with the largest p (the earlier of equals).
      train: allow "topk".

    Returns:
      Ascending int32 positions, filled up with `seq`; the number of tokens kept and of those dropped, per row.

    Raises:
      ValueError: arguments that do not fit, or "topk" outside of training.

    >>> idx, n_routed, n_overflow = pack_routed(jnp.array([[True, False, True, True]]), 2)
    >>> idx.tolist(), n_routed.tolist(), n_overflow.tolist()
    ([[0, 2]], [2], [1])
    """
    _check_choices(overflow=overflow)
    if mask.ndim != 2 or mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be a boolean (batch, seq) array, got {mask.dtype} of shape {mask.shape}")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    seq = mask.shape[1]
    positions = jnp.where(mask, jnp.arange(seq, dtype=jnp.int32), seq)
    if overflow == "topk":
        if not train:
            raise ValueError(
                'overflow: "topk" breaks causality, since later tokens decide whether an earlier one is dropped; it is '
                'allowed only with train=True, use "drop_late"'
            )
        if prob is None or prob.shape != mask.shape:
            shape = None if prob is None else prob.shape
            raise ValueError(f'prob must have mask\'s shape {mask.shape} for overflow="topk", got {shape}')
        if capacity < seq:
            scores = jnp.where(mask, jax.lax.stop_gradient(prob), -1.0)
            positions = jnp.take_along_axis(positions, jax.lax.top_k(scores, capacity)[1], axis=1)
    idx = jnp.sort(positions, axis=1)[:, :capacity]
    idx = jnp.pad(idx, ((0, 0), (0, capacity - idx.shape[1])), constant_values=seq)
    n_routed = jnp.sum(idx < seq, axis=1, dtype=jnp.int32)
    return idx, n_routed, jnp.sum(mask, axis=1, dtype=jnp.int32) - n_routed


def l2a_attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq kv_heads dim"],
    v: Float[Array, "batch seq kv_heads dim"],
    routing: Routing,
    *,
    window: int,
    capacity: int | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    combine: str = "replace",
    estimator: str = "st",
    overflow: str = "drop_late",
    train: bool = False,
    sinks: int = 0,
    implementation: Implementation = None,
) -> tuple[Float[Array, "batch seq heads dim"], L2AAux]:
    """Sliding-window attention of all tokens, global causal attention of the routed ones.

    o = a_loc + g (a_glob - a_loc) ("replace") or a_loc + g a_glob ("add"). The gate g of a routed token is 1 with
    dg/dz = p (1 - p) ("st"), or p ("soft"); that of any other token is 0 with gradient 0, as its a_glob is not known.
    Cost is that of the window and of the routed rows, forward and backward.

    Args:
      q: queries, (batch, seq, heads, dim), rotated already.
      k: keys, (batch, seq, kv_heads, dim), rotated already; heads must be a multiple of kv_heads.
      v: values, of `k`'s shape.
      routing: (batch, seq) decisions and probabilities.
      window: w, positions that every token sees, its own included.
      capacity: C, the most tokens of a row that attend globally; None: all.
      segment_ids: (batch, seq) documents of packed rows: attention only within equal ids. 0 is padding: never routed,
        attends to nothing, output 0.
      combine: "replace" or "add".
      estimator: "st" or "soft".
      overflow: which tokens beyond `capacity` are dropped, see `pack_routed`.
      train: allow overflow="topk", which is not causal.
      sinks: first positions (of the sequence or segment) that every token sees too.
      implementation: that of the attention operations, see `kernels_pallas`.

    Returns:
      (batch, seq, heads, dim) in `q`'s dtype, and what the routing did.

    Raises:
      ValueError: arguments that do not fit; the message names them.

    >>> q = jnp.ones((1, 4, 2, 8)); kv = jnp.arange(4.0)[None, :, None, None] * jnp.ones((1, 4, 2, 8))
    >>> out, aux = l2a_attention(q, 0 * kv, kv, route(jnp.array([[-1.0, -1.0, 1.0, -1.0]])), window=1)
    >>> out[0, :, 0, 0].tolist(), float(aux.rate)
    ([0.0, 1.0, 1.0, 3.0], 0.25)
    """
    _check_choices(combine=combine, estimator=estimator, overflow=overflow)
    _check_routing(routing, q.shape[:2])
    mask, valid = routing.mask, jnp.ones(q.shape[:2], bool)
    if segment_ids is not None and segment_ids.shape == q.shape[:2]:  # else refused below
        valid = segment_ids != 0
        mask = mask & valid
    seq = q.shape[1]
    idx, n_routed, n_overflow = pack_routed(
        mask, seq if capacity is None else capacity, prob=routing.prob, overflow=overflow, train=train
    )
    local = sliding_window_attention(
        q, k, v, window=window, sinks=sinks, segment_ids=segment_ids, implementation=implementation
    )
    chosen, positions = gathered_rows(q, idx, None, seq)
    wide = gathered_attention(chosen, k, v, positions, segment_ids=segment_ids, implementation=implementation)
    local_rows = jnp.take_along_axis(local, idx[:, :, None, None], axis=1, mode="fill", fill_value=0)
    prob_rows = jnp.take_along_axis(routing.prob, idx, axis=1, mode="fill", fill_value=0)
    rows = combine_rows(local_rows, wide, prob_rows, combine=combine, estimator=estimator)

    count = jnp.maximum(jnp.sum(valid), 1)
    aux = L2AAux(
        n_routed,
        n_overflow,
        rate=jnp.sum(mask) / count,
        prob_mean=jnp.sum(jnp.where(valid, routing.prob, 0)) / count,
    )
    return merge_rows(local, rows, idx), aux


def combine_rows(
    local: Float[Array, "batch rows heads dim"],
    wide: Float[Array, "batch rows heads dim"],
    prob: Float[Array, "batch rows"],
    *,
    combine: str,
    estimator: str,
) -> Float[Array, "batch rows heads dim"]:
    """Outputs of routed tokens from their local and global attention, in float32 and rounded once."""
    dtype = local.dtype
    p = prob[:, :, None, None].astype(jnp.promote_types(prob.dtype, jnp.float32))
    local, wide = local.astype(p.dtype), wide.astype(p.dtype)
    if estimator == "soft":
        out = local + p * (wide - local) if combine == "replace" else local + p * wide
    else:
        # g = 1 + p - stop_gradient(p): the last two cancel exactly, so that a routed token's value is a_glob itself.
        # What they multiply has no gradient through them, which would be 0 at the price of a backward pass.
        zero = p - jax.lax.stop_gradient(p)
        if combine == "replace":
            out = wide + zero * jax.lax.stop_gradient(wide - local)
        else:
            out = local + wide + zero * jax.lax.stop_gradient(wide)
    return out.astype(dtype)


def _check_choices(**given: str) -> None:
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")


def _check_routing(routing: Routing, shape: tuple[int, ...]) -> None:
    mask, prob = routing
    if mask.dtype != jnp.bool_:
        raise ValueError(f"routing.mask must be boolean, got {mask.dtype}")
    if not jnp.issubdtype(prob.dtype, jnp.floating):
        raise ValueError(f"routing.prob must be floating-point, got {prob.dtype}")
    for name, array in (("mask", mask), ("prob", prob)):
        if array.shape != shape:
            raise ValueError(f"routing.{name} must have q's (batch, seq) = {shape}, got {array.shape}")
