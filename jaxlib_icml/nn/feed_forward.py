"""Feed-forward weights and activation, shared by dense blocks, experts and shared experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlib_icml.nn.linear import contract
from jaxlib_icml.nn.parameters import logical_param

ACTIVATIONS = ("swiglu", "gelu")

Initializer = Callable[..., Array]


def fan_in_normal() -> Initializer:
    """Initializer of hidden matrices (in, out): normal with variance 1 / in."""
    return nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def activate(pre: tuple[Float[Array, "*rows hidden"], ...]) -> Float[Array, "*rows hidden"]:
    """Hidden activation.

    Args:
      pre: `(up,)` or `(gate, up)`, each (..., hidden).

    Returns:
      The tanh approximation of GELU(up), or SwiGLU, silu(gate) * up.
    """
    if len(pre) == 1:
        return jax.nn.gelu(pre[0], approximate=True)
    return jax.nn.silu(pre[0]) * pre[1]


class Kernel(nnx.Module):
    """Holder of one weight array `kernel`, so that its path in the parameter tree ends in `kernel`, and a bias.

    Args:
      value: the weights.
      *names: logical names of its axes.
      use_bias: add a `bias` of zeros over the last axis.
    """

    def __init__(self, value: Array, *names: str | None, use_bias: bool = False):
        self.kernel = logical_param(value, *names)
        if use_bias:
            self.bias = logical_param(jnp.zeros(value.shape[-1], value.dtype), names[-1])


class FeedForward(nnx.Module):
    """W_down act(W_in x): (..., width) -> (..., width), or the weights of a stack of such blocks.

    Args:
      width: features of a token.
      hidden: hidden features.
      activation: 'swiglu' (kernels `gate`, `up`, `down`) or 'gelu' (`up`, `down`).
      num_experts: None for one block, kernels (in, out); else a leading axis of this size.
      use_bias: add biases to all products (only a single block).
      dtype: compute dtype; None: the promotion of input and parameter dtypes.
      init: initializer called as (key, (in, out), dtype), once per expert.
      param_dtype: dtype of the weights.
      rngs: source of keys, stream `params`.

    >>> FeedForward(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
    (2, 8)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        num_experts: int | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        init: Initializer | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        make = init or fan_in_normal()

        def create(shape: tuple[int, int], names: tuple[str, str]) -> Kernel:
            key = rngs.params()
            if num_experts is None:
                return Kernel(make(key, shape, param_dtype), *names, use_bias=use_bias)
            # One draw per expert: an initializer for matrices would count the expert axis into the fan-in.
            stack = jax.vmap(lambda k: make(k, shape, param_dtype))(jax.random.split(key, num_experts))
            return Kernel(stack, "expert", *names)

        if activation == "swiglu":
            self.gate = create((width, hidden), ("embed", "mlp"))
        self.up = create((width, hidden), ("embed", "mlp"))
        self.down = create((hidden, width), ("mlp", "embed"))

    def kernels(self) -> tuple[tuple[Array, ...], Array]:
        """`(inputs, down)`: the weight arrays in the order that `activate` expects, and the last one."""
        inputs = (self.gate, self.up) if hasattr(self, "gate") else (self.up,)
        return tuple(matrix.kernel[...] for matrix in inputs), self.down.kernel[...]

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Apply a single block (`num_experts=None`)."""
        inputs, down = self.kernels()
        dtype = self.dtype or jnp.promote_types(x.dtype, down.dtype)
        x = x.astype(dtype)
        pre = tuple(contract(x, matrix.astype(dtype)) for matrix in inputs)
        if not hasattr(self.up, "bias"):
            return contract(activate(pre), down.astype(dtype))
        layers = (self.gate, self.up) if hasattr(self, "gate") else (self.up,)
        hidden = activate(tuple(h + layer.bias[...].astype(dtype) for h, layer in zip(pre, layers, strict=True)))
        return contract(hidden, down.astype(dtype)) + self.down.bias[...].astype(dtype)
