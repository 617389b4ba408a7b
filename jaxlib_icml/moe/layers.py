"""The mixture-of-experts layer that every MoE method and the language model share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxlib_icml.moe.dispatch import (
    ExpertKernels,
    blocked_experts,
    dense_experts,
    ragged_experts,
)
from jaxlib_icml.moe.expert_parallel import can_split, context_mesh, expert_parallel
from jaxlib_icml.moe.routing import COMBINES, GATES, Routing, RoutingStats, route, router_logits
from jaxlib_icml.nn import (
    ACTIVATIONS,
    FeedForward,
    Initializer,
    Kernel,
    activate,
    fan_in_normal,
    logical_axes,
    logical_param,
)

__all__ = ["ExpertBias", "SparseMoE"]

PATHS = ("auto", "dense", "blocked", "ragged", "expert_parallel")


class ExpertBias(nnx.Variable):
    """Selection bias of the experts, (experts,). Not an `nnx.Param`: optimizers never see it."""


class _RouterDelta(nnx.Module):
    """tanh(a) tanh(W_2 gelu(x W_1)), which starts as 0: a learned correction of a router's logits."""

    def __init__(self, width: int, hidden: int, num_experts: int, init: Initializer, dtype: Any, rngs: nnx.Rngs):
        self.up = Kernel(init(rngs.params(), (width, hidden), dtype), "embed", None)
        # a starts at 0.1, so that the zero matrix behind it gets gradients.
        self.down = Kernel(jnp.zeros((hidden, num_experts), dtype), None, None)
        self.scale = logical_param(jnp.full((), 0.1, dtype))

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens experts"]:
        x, up, down, scale = (
            v.astype(jnp.promote_types(v.dtype, jnp.float32))
            for v in (x, self.up.kernel[...], self.down.kernel[...], self.scale[...])
        )
        return jnp.tanh(scale) * jnp.tanh(activate((x @ up,)) @ down)


class SparseMoE(nnx.Module):
    """Mixture of experts: each token goes through `num_active` of `num_experts` feed-forward blocks.

    y(x) = sum over the chosen experts of w_i(x) * E_i(x), plus a shared expert that sees every token. How
    experts are chosen and weighted is described at `jaxlib_icml.moe.routing.route`. No token is ever dropped.

    Parameters: `router/kernel` (width, experts), `experts/{gate,up,down}/kernel` (experts, in, out),
    `shared/{gate,up,down}/kernel` (in, out), and the selection bias `expert_bias` of type `ExpertBias`. They
    carry the logical axis names 'embed', 'expert' and 'mlp'. The expert axis of the router is unnamed: its
    logits are compared across experts, so splitting them would only add communication.

    After "Hyperparameter Transfer with Mixture-of-Experts Layers" (arXiv:2601.20205, section 2) for the
    sigmoid gate.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = SparseMoE(8, 16, num_experts=4, num_active=2, rngs=nnx.Rngs(0))
    >>> y, stats = layer(jnp.ones((2, 3, 8)))
    >>> y.shape, stats.load.shape, float(stats.load.sum())
    ((2, 3, 8), (4,), 2.0)
    """

    def __init__(
        self,
        width: int,
        expert_width: int,
        num_experts: int,
        num_active: int,
        *,
        gate: str = "softmax_renorm",
        combine: str | None = None,
        activation: str = "swiglu",
        shared_expert_width: int = 0,
        path: str = "auto",
        block_size: int = 128,
        cosine_scale: float = 10.0,
        router_delta_width: int = 0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        """Create the layer.

        Args:
          width: features of a token.
          expert_width: hidden features of an expert.
          num_experts: number of routed experts.
          num_active: experts per token.
          gate: 'sigmoid', 'softmax', 'softmax_renorm' or 'cosine'.
          combine: 'sum', 'mean' or 'soft'; default 'mean' for the sigmoid gate, else 'sum'.
          activation: 'swiglu' (gate, up and down matrices) or 'gelu' (up and down, tanh approximation).
          shared_expert_width: hidden features of the shared expert; 0 for none.
          path: 'dense', 'blocked', 'ragged' (same result, see `jaxlib_icml.moe.dispatch`); 'expert_parallel': tokens
            travel to experts that are spread over the surrounding mesh (`jaxlib_icml.moe.expert_parallel`); or 'auto':
            expert-parallel where such a mesh surrounds the layer and divides it, else blocked when compiled for CPUs,
            ragged otherwise.
          block_size: rows of one matrix product of the blocked path.
          cosine_scale: logits of the cosine gate are this times the cosine.
          router_delta_width: hidden features of a correction tanh(a) tanh(MLP(x)) of the cosine gate's logits, with
            a learned scalar a and an MLP whose last matrix starts at 0; 0 for none.
          dtype: compute dtype of the experts; default the promotion of input and parameter dtypes. The router
            computes in float32 whatever this is.
          param_dtype: dtype of the weights.
          kernel_init: initializer of every matrix, called as (key, (in, out), dtype), once per expert;
            default normal with variance 1 / in.
          rngs: source of keys, stream `params`.

        Raises:
          ValueError: a size is below 1, `num_active` exceeds `num_experts`, or a name is unknown.
        """
        sizes = {
            "width": width,
            "expert_width": expert_width,
            "num_experts": num_experts,
            "num_active": num_active,
            "block_size": block_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if num_active > num_experts:
            raise ValueError(f"num_active must be at most num_experts = {num_experts}, got {num_active}")
        if shared_expert_width < 0:
            raise ValueError(f"shared_expert_width must be 0 or more, got {shared_expert_width}")
        if router_delta_width < 0 or (router_delta_width and gate != "cosine"):
            raise ValueError(f"router_delta_width must be 0, or positive for the cosine gate, got {router_delta_width}")
        if not cosine_scale > 0:
            raise ValueError(f"cosine_scale must be positive, got {cosine_scale}")
        if combine is None:
            combine = "mean" if gate == "sigmoid" else "sum"
        choices = {
            "gate": (gate, GATES),
            "combine": (combine, COMBINES),
            "activation": (activation, ACTIVATIONS),
            "path": (path, PATHS),
        }
        for name, (given, allowed) in choices.items():
            if given not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")

        self.width, self.num_experts, self.num_active = width, num_experts, num_active
        self.gate, self.combine, self.path = gate, combine, path
        self.block_size, self.cosine_scale, self.dtype = block_size, cosine_scale, dtype

        init = kernel_init or fan_in_normal()
        shape = (width, num_experts)
        self.router = Kernel(init(rngs.params(), shape, param_dtype), "embed", None)
        if router_delta_width:
            self.router_delta = _RouterDelta(width, router_delta_width, num_experts, init, param_dtype, rngs)
        feed_forward = functools.partial(
            FeedForward,
            width,
            activation=activation,
            dtype=dtype,
            init=init,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.experts = feed_forward(expert_width, num_experts=num_experts)
        if shared_expert_width:
            self.shared = feed_forward(shared_expert_width, num_experts=None)
        self.expert_bias = ExpertBias(jnp.zeros(num_experts), **logical_axes(None))

    def route(self, x: Float[Array, "tokens features"], token_mask: Bool[Array, " tokens"] | None = None) -> Routing:
        """Choices, weights, logits and statistics for tokens, without running the experts."""
        logits = router_logits(x, self.router.kernel[...], gate=self.gate, cosine_scale=self.cosine_scale)
        if hasattr(self, "router_delta"):
            logits = logits + self.router_delta(x)
        return route(
            logits,
            self.expert_bias[...],
            num_active=self.num_active,
            gate=self.gate,
            combine=self.combine,
            token_mask=token_mask,
        )

    def __call__(
        self, x: Float[Array, "..."], *, token_mask: Bool[Array, "..."] | None = None
    ) -> tuple[Float[Array, "..."], RoutingStats]:
        """Apply the layer.

        Args:
          x: tokens, (*batch, width).
          token_mask: (*batch,), False for padding tokens; their output is 0 and, off the dense path, they
            cost nothing in the routed experts.

        Returns:
          The output, shaped like `x`, in the compute dtype; and the routing statistics of the whole batch.

        Raises:
          ValueError: `x` or `token_mask` has the wrong shape.
        """
        if x.ndim == 0 or x.shape[-1] != self.width:
            raise ValueError(f"x must have width = {self.width} features in its last axis, got shape {x.shape}")
        if token_mask is not None and token_mask.shape != x.shape[:-1]:
            raise ValueError(f"token_mask must have shape {x.shape[:-1]}, got {token_mask.shape}")
        kernels = ExpertKernels(*self.experts.kernels())
        dtype = self.dtype or jnp.promote_types(x.dtype, kernels.down.dtype)
        tokens = x.reshape(-1, self.width)
        if token_mask is not None:
            token_mask = token_mask.reshape(-1)
            tokens = jnp.where(token_mask[:, None], tokens, 0)  # whatever padding holds, it stays out

        routing = self.route(tokens, token_mask)
        tokens = tokens.astype(dtype)
        y = self._run(tokens, kernels, routing)
        if hasattr(self, "shared"):
            y = y + self.shared(tokens.astype(dtype))
        return y.astype(dtype).reshape(x.shape), routing.stats

    def _run(self, tokens: Array, kernels: ExpertKernels, routing: Routing) -> Array:
        def blocked(*args: Any) -> Array:
            return blocked_experts(*args, block_size=self.block_size)

        def fastest(*args: Any) -> Array:
            return jax.lax.platform_dependent(*args, cpu=blocked, default=ragged_experts)

        args = (tokens, kernels, routing.weights, routing.indices)
        mesh = context_mesh() if self.path == "auto" else None
        if self.path == "expert_parallel" or (mesh and can_split(mesh, self.num_experts, tokens.shape[0])):
            return expert_parallel(*args, local=fastest)
        paths = {"auto": fastest, "dense": dense_experts, "blocked": blocked, "ragged": ragged_experts}
        return paths[self.path](*args)
