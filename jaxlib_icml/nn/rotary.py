"""Rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864), in the half-split layout of Llama."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered for contexts longer than the one a model was pretrained with.

    linear: all by `factor` (Chen et al., arXiv 2306.15595). llama3: wavelengths above original_context /
    low_frequency_factor by `factor`, those below original_context / high_frequency_factor not, with a linear passage
    in the number of turns. yarn: frequencies with fewer than `beta_slow` turns within the original context by
    `factor`, those with more than `beta_fast` not, with a linear passage in the index of the frequency; queries and
    keys also grow by `attention_factor` (Peng et al., arXiv 2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """None: 1 + 0.1 ln(factor)."""

    def frequencies(self, plain: np.ndarray, theta: float) -> np.ndarray:
        """The scaled frequencies.

        Args:
          plain: (half,) θ^(-i/half).
          theta: the base θ.

        Returns:
          (half,) frequencies, in `plain`'s dtype.
        """
        scaled = plain / self.factor
        if self.kind == "linear":
            return scaled
        if self.kind == "llama3":
            turns = self.original_context * plain / (2 * math.pi)
            low, high = self.low_frequency_factor, self.high_frequency_factor
            kept = np.clip((turns - low) / (high - low), 0, 1)
        else:
            half = len(plain)
            first, last = (self._index(turns, half, theta) for turns in (self.beta_fast, self.beta_slow))
            first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
            kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
        return (kept * plain + (1 - kept) * scaled).astype(plain.dtype)

    def _index(self, turns: float, half: int, theta: float) -> float:
        """The (fractional) index of the frequency with so many turns within the original context."""
        return half * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def amplitude(self) -> float:
        """The factor on cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        return 1 + 0.1 * math.log(self.factor) if self.attention_factor is None else self.attention_factor


def rotary_angles(
    positions: Int[Array, "*batch seq"], head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "*batch seq half"], Float[Array, "*batch seq half"]]:
    """Cosines and sines of the rotary angles p θ^(-2i/head_dim), i < head_dim/2, for longer contexts scaled.

    Args:
      positions: (..., seq) integer positions.
      head_dim: size of one attention head, even.
      theta: base of the geometric progression of wavelengths.
      scaling: how the frequencies are lowered; None: not.

    Returns:
      `(cos, sin)`, each (..., seq, head_dim/2) float32.

    Raises:
      ValueError: `head_dim` is odd or not positive.

    >>> rotary_angles(jnp.arange(4), 8)[0].shape
    (4, 4)
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: must be even and positive, got {head_dim}")
    # In float32, as everybody's checkpoints were trained: far out, an angle is as good as its frequency's last bit.
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    amplitude = 1.0
    if scaling is not None:
        frequencies, amplitude = scaling.frequencies(frequencies, theta), scaling.amplitude
    angles = positions[..., None].astype(jnp.float32) * frequencies
    if amplitude == 1:
        return jnp.cos(angles), jnp.sin(angles)
    return amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)


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
