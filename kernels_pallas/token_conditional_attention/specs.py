"""Cases of token-conditional attention, which has no kernels of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas.flash.specs import dense_peers
from kernels_pallas.spec import Spec, normal
from kernels_pallas.token_conditional_attention.api import token_conditional_attention


def case(
    seq: int,
    chosen: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str = "bfloat16",
    *,
    window: int = 256,
    batch: int = 1,
    small: bool = False,
) -> Spec:
    """`chosen` random rows of `seq` see everything before them."""
    query = jax.ShapeDtypeStruct((batch, seq, heads, dim), dtype)
    key = jax.ShapeDtypeStruct((batch, seq, kv_heads, dim), dtype)

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        arrays = (normal(rng, x.shape, dtype) for x in (query, key, key))
        idx = np.stack([np.sort(rng.choice(seq, chosen, replace=False)) for _ in range(batch)])
        return (*arrays, jnp.asarray(idx, jnp.int32))

    def call(query: Array, key: Array, value: Array, idx: Any, *, implementation: Any) -> Array:
        return token_conditional_attention(query, key, value, idx, window=window, implementation=implementation)

    def peers() -> Mapping[str, Callable[..., Array]]:
        def attend(implementation: Any) -> Callable[..., Array]:
            return lambda query, key, value, idx: jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )

        return {f"{name}, all keys": peer for name, peer in dense_peers(seq, heads, attend).items()}

    size = f"{seq} h{heads}" + (f"/{kv_heads}" if kv_heads != heads else "") + f" d{dim} {dtype}"
    return Spec(
        operation="token_conditional_attention",
        name=(f"{batch}x" if batch > 1 else "") + f"{size} window {window} chosen {chosen}",
        dtype=dtype,
        call=call,
        make=make,
        shapes=(query, key, key, jax.ShapeDtypeStruct((batch, chosen), jnp.int32)),
        gradients=(0, 1, 2),
        passes=lambda implementation: (),
        small=small,
        peers=peers,
    )


def sized(size: int, dtype: str = "bfloat16", heads: int = 4, dim: int = 128) -> Spec:
    """A fifth of that many positions is chosen, the window is 256."""
    return case(size, max(1, size // 5), heads, heads, dim, dtype)


SPECS = (
    case(4096, 819, 4, 4, 128),
    case(300, 60, 4, 1, 64, window=70, batch=2, small=True),
    case(300, 60, 8, 2, 80, "float32", window=40, small=True),
)
