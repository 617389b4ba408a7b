"""Heads and rows as loops over (batch, key head) read and write them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rows_of(x: Array, start: Any, size: int, group: int = 1) -> Array:
    """Rows (position, query head) of `size` positions from `start` on."""
    return jax.lax.dynamic_slice_in_dim(x, start * group, size * group)


def add_rows(total: Float[Array, "seq dim"], start: Any, piece: Float[Array, "rows dim"]) -> Float[Array, "seq dim"]:
    """`total` with `piece` added to the rows from `start` on."""
    rows = rows_of(total, start, piece.shape[0]) + piece
    return jax.lax.dynamic_update_slice_in_dim(total, rows, start, axis=0)


def head_of(x: Array, batch: Array, head: Array, width: int = 1) -> Float[Array, "seq width dim"]:
    """Heads width * head ... of one batch element, in float32."""
    _, seq, _, dim = x.shape
    piece = jax.lax.dynamic_slice(x, (batch, 0, head * width, 0), (1, seq, width, dim))
    return piece[0].astype(jnp.float32)


def set_head(x: Array, batch: Array, head: Array, piece: Float[Array, "seq width dim"]) -> Array:
    """Writes what `head_of` would read."""
    return jax.lax.dynamic_update_slice(x, piece[None].astype(x.dtype), (batch, 0, head * piece.shape[1], 0))
