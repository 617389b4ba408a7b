"""Causal attention: the public function."""

from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.flash import rules
from kernels_pallas.flash.arguments import check_integers, check_qkv, checked_scale


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
      implementation: A name, a sequence of names to try in order, or None: cuDNN where this machine's GPU has it for
        these inputs, else the kernel of the platform that the program is compiled for, "xla" where there is none and
        in programs that `jit` partitions over several TPUs (where `jax.shard_map` and explicit sharding keep kernels).

    Returns:
      Shape (batch, seq, heads, dim), dtype of `query`.

    Raises:
      ValueError: Shapes or dtypes that do not fit, a scale that is not positive and finite, an unknown name.
      UnsupportedError: The implementation asked for cannot run this call on this platform.

    >>> q = jnp.ones((2, 5, 4, 8)); kv = jnp.ones((2, 5, 2, 8))
    >>> causal_attention(q, kv, kv, segment_ids=jnp.array([[1, 1, 2, 2, 0]] * 2)).shape
    (2, 5, 4, 8)
    """
    check_qkv(query, key, value)
    if segment_ids is not None:
        check_integers("segment_ids", segment_ids, query.shape[:2])
    scale = checked_scale(scale, query.shape[-1])
    if implementation is None and _cudnn_supports(query):
        return _cudnn(query, key, value, segment_ids, scale)

    def unsupported(kernels: ModuleType) -> str | None:
        return kernels.unsupported(query, key)

    attend = rules.choose("causal_attention", implementation, unsupported, ("b.",), scale=scale)
    return attend(query, key, value, segment_ids)


def _cudnn(query, key, value, segment_ids, scale):
    mask = None
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
    )


def _cudnn_supports(query: Array) -> bool:
    if jax.default_backend() != "gpu" or query.dtype == jnp.float32:
        return False
    capability = getattr(jax.local_devices()[0], "compute_capability", "0.0")
    # Flash attention in cuDNN: 16-bit, Ampere or newer, head sizes that are multiples of 8 up to 128.
    is_cuda = capability.replace(".", "").isdigit()
    return is_cuda and float(capability) >= 8.0 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
