"""Cases of causal attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array

from kernels_pallas.causal_attention.api import causal_attention
from kernels_pallas.flash.specs import attention_spec, dense_peers, segments
from kernels_pallas.spec import Spec


def case(
    seq: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str = "bfloat16",
    *,
    batch: int = 1,
    segmented: bool = False,
    small: bool = False,
) -> Spec:
    """All positions of `seq`, or those of packed sequences."""

    def call(query: Array, key: Array, value: Array, ids: Any, *, implementation: Any) -> Array:
        return causal_attention(query, key, value, segment_ids=ids, implementation=implementation)

    def peers() -> Mapping[str, Callable[..., Array]]:
        def attend(implementation: Any) -> Callable[..., Array]:
            return lambda query, key, value, ids: jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )

        return {} if segmented else dense_peers(seq, heads, attend)

    return attention_spec(
        "causal_attention",
        call,
        rows=seq,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        batch=batch,
        extras=lambda rng: (segments(rng, batch, seq) if segmented else None,),
        statics={"scale": dim**-0.5},
        question={},
        pairs=seq * (seq + 1) // 2,
        about="segments" if segmented else "",
        small=small,
        peers=peers,
    )


def sized(size: int, dtype: str = "bfloat16", heads: int = 4, dim: int = 128) -> Spec:
    """That many positions."""
    return case(size, heads, heads, dim, dtype)


SPECS = (
    case(4096, 4, 4, 128),
    case(4096, 8, 2, 64),
    case(300, 4, 1, 64, batch=2, small=True),
    case(1, 2, 2, 128, "float32", small=True),
    case(300, 2, 2, 80, "float32", segmented=True, small=True),
)
