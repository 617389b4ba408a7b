"""The blocks on and above the diagonal, and padding to whole blocks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32


def upper_blocks(blocks: int) -> tuple[Int32[np.ndarray, " pairs"], Int32[np.ndarray, " pairs"]]:
    """Row and column indices of the blocks (i, j) with i <= j, row by row: the rows' operand is loaded once a row.

    >>> upper_blocks(2)
    (array([0, 0, 1], dtype=int32), array([0, 1, 1], dtype=int32))
    """
    rows, columns = np.triu_indices(blocks)
    return rows.astype(np.int32), columns.astype(np.int32)


def padded(x: Float[Array, "batch n k"], rows: int, columns: int) -> Float[Array, "batch rows columns"]:
    """`x` with zeros to make its last two axes multiples of `rows` and `columns`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, -x.shape[2] % columns)))
