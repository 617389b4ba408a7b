"""x yᵀ as the formula reads, and its upper triangle mirrored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(x: Float[Array, "*batch n k"], y: Float[Array, "*batch m k"]) -> Float[Array, "*batch n m"]:
    """x yᵀ, accumulated in float32 (float64 inputs: float64), in the dtype of `x`.

    Highest precision, so that float32 stays float32 on accelerators; 16-bit products are exact either way.
    """
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == accumulator else None
    out = jnp.einsum("...ik,...jk->...ij", x, y, precision=precision, preferred_element_type=accumulator)
    return out.astype(x.dtype)


def mirrored(square: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The upper triangle, and its transpose below the diagonal."""
    # As a sum, not a selection: XLA:CPU of jaxlib 0.10.2 crashes on where(mask, a, a.T) of a thousand rows.
    return jnp.triu(square) + jnp.swapaxes(jnp.triu(square, 1), -1, -2)


def symmetric_product(x: Float[Array, "*batch n k"], y: Float[Array, "*batch n k"]) -> Float[Array, "*batch n n"]:
    """Every entry computed, then the lower ones replaced; see `api.symmetric_product`."""
    return mirrored(product(x, y))
