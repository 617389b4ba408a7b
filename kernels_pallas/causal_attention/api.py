"""Causal attention: the public function."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.causal_attention import reference, xla

_AVAILABLE = {"reference": reference.causal_attention, "xla": xla.causal_attention}


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    scale: float | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "batch seq heads dim"]:
    """Causal softmax attention, optionally confined to the segments of packed sequences.

    Position t of head h attends to the positions s <= t of key head h // (heads // kv_heads) that carry the
    same segment id. Padding is a segment like any other (0 by convention): its rows are finite, and get no
    gradient when the loss ignores them. Scores and sums are float32 whatever the input dtype. Memory of "xla"
    is linear in `seq`, forward and backward; it has a reverse-mode rule of its own, so forward-mode
    differentiation (`jax.jvp`) needs "reference", while gradients of gradients work for both.

    Args:
      query: Shape (batch, seq, heads, dim); float32, bfloat16 or float16.
      key: Shape (batch, seq, kv_heads, dim), dtype of `query`; heads must be a multiple of kv_heads.
      value: Shape and dtype of `key`.
      segment_ids: Integers of shape (batch, seq); attention only where ids are equal. None: one segment.
      scale: Factor on the scores; None is 1 / sqrt(dim).
      implementation: A name, a sequence of names to try in order, or None: "xla" on CPU, on GPU and TPU
        `jax.nn.dot_product_attention` (cuDNN where it supports the inputs). The platform is the default
        backend at trace time.

    Returns:
      Shape (batch, seq, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes or dtypes that do not fit, a scale that is not positive and finite, an unknown name.
      UnsupportedError: The implementation asked for does not exist yet.

    >>> q = jnp.ones((2, 5, 4, 8)); kv = jnp.ones((2, 5, 2, 8))
    >>> causal_attention(q, kv, kv, segment_ids=jnp.array([[1, 1, 2, 2, 0]] * 2)).shape
    (2, 5, 4, 8)
    """
    scale = _validate(query, key, value, segment_ids, scale)
    default = xla.causal_attention if jax.default_backend() == "cpu" else _vendor_attention
    attend = dispatch.choose("causal_attention", implementation, _AVAILABLE, default)
    return attend(query, key, value, segment_ids, scale)


def _validate(query: Array, key: Array, value: Array, segment_ids: Array | None, scale: float | None) -> float:
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(f"query must be a non-empty (batch, seq, heads, dim) array, got shape {query.shape}")
    if query.dtype not in dtypes:
        raise ValueError(f"query must be float32, bfloat16 or float16, got {query.dtype}")
    batch, seq, heads, dim = query.shape
    if key.ndim != 4 or (*key.shape[:2], key.shape[3]) != (batch, seq, dim):
        raise ValueError(f"key must have shape ({batch}, {seq}, kv_heads, {dim}) like query, got {key.shape}")
    if key.shape[2] == 0 or heads % key.shape[2]:
        raise ValueError(f"key must have a number of heads that divides query's {heads}, got {key.shape[2]}")
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {array.dtype}")
    if segment_ids is not None:
        if segment_ids.shape != (batch, seq):
            raise ValueError(f"segment_ids must have shape ({batch}, {seq}), got {segment_ids.shape}")
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")
    if scale is None:
        return dim**-0.5
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def _vendor_attention(query, key, value, segment_ids, scale):
    """The platform's own attention on GPU and TPU."""
    mask = None
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    attend = functools.partial(jax.nn.dot_product_attention, query, key, value, mask=mask, scale=scale, is_causal=True)
    return attend(implementation="cudnn" if _cudnn_supports(query) else "xla")


def _cudnn_supports(query: Array) -> bool:
    if jax.default_backend() != "gpu" or query.dtype == jnp.float32:
        return False
    capability = getattr(jax.local_devices()[0], "compute_capability", "0.0")
    # Flash attention in cuDNN: 16-bit, Ampere or newer, head sizes that are multiples of 8 up to 128.
    is_cuda = capability.replace(".", "").isdigit()
    return is_cuda and float(capability) >= 8.0 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
