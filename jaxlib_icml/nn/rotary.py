"""Rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864), in the half-split layout of Llama."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_angles(
    positions: Int[Array, "*batch seq"], head_dim: int, theta: float = 10000.0
) -> tuple[Float[Array, "*batch seq half"], Float[Array, "*batch seq half"]]:
    """Cosines and sines of the rotary angles p θ^(-2i/head_dim), i < head_dim/2.

    Args:
      positions: (..., seq) integer positions.
      head_dim: size of one attention head, even.
      theta: base of the geometric progression of wavelengths.

    Returns:
      `(cos, sin)`, each (..., seq, head_dim/2) float32.

    Raises:
      ValueError: `head_dim` is odd or not positive.

    >>> rotary_angles(jnp.arange(4), 8)[0].shape
    (4, 4)
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: must be even and positive, got {head_dim}")
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "*b seq half"],
    sin: Float[Array, "*b seq half"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate the pairs (x_i, x_{i+half}) of every head by the angles of its position.

    Args:
      x: (batch, seq, heads, head_dim) queries or keys.
      cos: (seq, half) or (batch, seq, half), from `rotary_angles`.
      sin: like `cos`.

    Returns:
      The rotated array, in `x`'s shape and dtype; computed in float32.
    """
    cos, sin = cos[..., :, None, :], sin[..., :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
