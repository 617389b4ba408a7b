"""Checks of what the attention operations are given."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_qkv(query: Array, key: Array, value: Array, *, same_length: bool = True) -> None:
    """Raises a ValueError that names the argument unless these are (batch, seq, heads, dim) arrays that fit."""
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(f"query must be a non-empty (batch, seq, heads, dim) array, got shape {query.shape}")
    if query.dtype not in DTYPES:
        raise ValueError(f"query must be float32, bfloat16 or float16, got {query.dtype}")
    batch, rows, heads, dim = query.shape
    seq = rows if same_length else "seq"
    fits = key.ndim == 4 and 0 not in key.shape and (key.shape[0], key.shape[3]) == (batch, dim)
    if not fits or (same_length and key.shape[1] != rows):
        raise ValueError(f"key must have shape ({batch}, {seq}, kv_heads, {dim}) like query, got {key.shape}")
    if heads % key.shape[2]:
        raise ValueError(f"key must have a number of heads that divides query's {heads}, got {key.shape[2]}")
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {array.dtype}")


def check_integers(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless `array` holds integers of that shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")


def checked_scale(scale: float | None, dim: int) -> float:
    """The factor on the scores, 1 / sqrt(dim) for None."""
    if scale is None:
        return dim**-0.5
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def check_window(window: int, sinks: int) -> None:
    """Raises a ValueError unless every row sees itself and `sinks` is not negative."""
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if sinks < 0:
        raise ValueError(f"sinks must be at least 0, got {sinks}")


def concrete(array: Array | None) -> np.ndarray | None:
    """The values of an array where they are known at trace time, else None."""
    if array is None or isinstance(array, jax.core.Tracer):
        return None
    values: Any = np.asarray(array)
    return values
