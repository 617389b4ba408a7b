"""Cases of sliding-window attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array

from kernels_pallas.flash.specs import attention_spec, dense_peers, segments
from kernels_pallas.sliding_window_attention.api import sliding_window_attention
from kernels_pallas.spec import Spec


def case(
    seq: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str = "bfloat16",
    *,
    window: int = 256,
    sinks: int = 0,
    batch: int = 1,
    segmented: bool = False,
    small: bool = False,
) -> Spec:
    """All positions of `seq`, or those of packed sequences."""

    def call(query: Array, key: Array, value: Array, ids: Any, starts: Any, *, implementation: Any) -> Array:
        return sliding_window_attention(
            query, key, value, window=window, sinks=sinks, segment_ids=ids, implementation=implementation
        )

    def peers() -> Mapping[str, Callable[..., Array]]:
        def attend(implementation: Any) -> Callable[..., Array]:
            return lambda query, key, value, ids, starts: jax.nn.dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                local_window_size=(window - 1, 0),
                implementation=implementation,
            )

        def full(query: Array, key: Array, value: Array, ids: Any, starts: Any) -> Array:
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")

        if segmented or sinks:
            return {}
        found = dense_peers(seq, heads, attend)
        if "cudnn" in found:
            found["cudnn, all keys"] = full
        return found

    inside, last = min(window, seq), min(sinks, max(seq - window, 0))
    pairs = inside * (inside + 1) // 2 + (seq - inside) * inside
    # Row window + i sees min(i + 1, sinks) sinks that its window does not hold.
    pairs += last * (last + 1) // 2 + max(seq - window - last, 0) * last
    about = f"window {window}" + (f" sinks {sinks}" if sinks else "") + (" segments" if segmented else "")
    statics = {"scale": dim**-0.5, "window": inside, "sinks": min(sinks, seq)}
    return attention_spec(
        "sliding_window_attention",
        call,
        rows=seq,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        batch=batch,
        extras=lambda rng: (segments(rng, batch, seq) if segmented else None, None),
        statics=statics,
        question={**statics, "segmented": segmented, "chunk": False},
        pairs=pairs,
        about=about,
        small=small,
        peers=peers,
    )


def sized(size: int, dtype: str = "bfloat16", heads: int = 4, dim: int = 128) -> Spec:
    """That many positions and a window of 256."""
    return case(size, heads, heads, dim, dtype)


SPECS = (
    case(4096, 4, 4, 128),
    case(4096, 4, 4, 128, window=1024),
    case(4096, 8, 2, 64, sinks=4),
    case(300, 4, 1, 64, window=70, batch=2, small=True),
    case(300, 8, 1, 64, "float32", window=256, sinks=3, small=True),
    case(1, 2, 2, 128, "float32", window=4, small=True),
    case(300, 2, 2, 80, window=40, segmented=True, small=True),
)
