"""Cases of causal attention of gathered rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas.flash.specs import attention_spec, dense_peers, segments
from kernels_pallas.gathered_attention.api import gathered_attention
from kernels_pallas.spec import Spec


def case(
    rows: int,
    seq: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str = "bfloat16",
    *,
    batch: int = 1,
    filling: int = 0,
    segmented: bool = False,
    small: bool = False,
) -> Spec:
    """`rows` rows, the last `filling` of them absent, the others spread at random."""

    def call(query: Array, key: Array, value: Array, positions: Any, ids: Any, *, implementation: Any) -> Array:
        return gathered_attention(query, key, value, positions, segment_ids=ids, implementation=implementation)

    def extras(rng: np.random.Generator) -> tuple[Any, ...]:
        positions = np.full((batch, rows), seq, np.int32)
        for row in positions:
            row[: rows - filling] = np.sort(rng.choice(seq, rows - filling, replace=False))
        return jnp.asarray(positions), segments(rng, batch, seq) if segmented else None

    def peers() -> Mapping[str, Callable[..., Array]]:
        def attend(implementation: Any) -> Callable[..., Array]:
            def all_rows(query: Array, key: Array, value: Array, positions: Any, ids: Any) -> Array:
                every = jnp.tile(query, (1, -(-seq // rows), 1, 1))[:, :seq]
                out = jax.nn.dot_product_attention(every, key, value, is_causal=True, implementation=implementation)
                return out[:, :rows]

            return all_rows

        return {f"{name}, all rows": peer for name, peer in dense_peers(seq, heads, attend).items()}

    about = (f"filling {filling}" if filling else "") + (" segments" if segmented else "")
    return attention_spec(
        "gathered_attention",
        call,
        rows=rows,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        batch=batch,
        extras=extras,
        statics={"scale": dim**-0.5},
        question={"segmented": segmented},
        # Spread evenly, a row sees half of the keys.
        pairs=(rows - filling) * (seq + 1) // 2,
        about=about.strip(),
        estimates=False,
        small=small,
        peers=peers,
    )


def sized(size: int, dtype: str = "bfloat16", heads: int = 4, dim: int = 128) -> Spec:
    """A fifth of that many positions."""
    return case(max(1, size // 5), size, heads, heads, dim, dtype)


SPECS = (
    case(819, 4096, 4, 4, 128),
    case(4096, 4096, 4, 4, 128),
    case(819, 4096, 8, 2, 64),
    case(100, 300, 4, 1, 64, batch=2, filling=9, small=True),
    case(60, 300, 8, 1, 64, "float32", small=True),
    case(5, 300, 2, 2, 128, "float32", filling=5, small=True),
    case(70, 300, 2, 2, 80, segmented=True, small=True),
)
