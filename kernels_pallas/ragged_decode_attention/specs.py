"""Cases of decoding attention."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas import dispatch
from kernels_pallas.ragged_decode_attention.api import ragged_decode_attention
from kernels_pallas.ragged_decode_attention.cache import PagedCache, init_cache
from kernels_pallas.spec import Pass, Spec, normal

OPERATION = "ragged_decode_attention"


def case(
    kinds: tuple[bool, ...],
    *,
    batch: int,
    longest: int,
    group: int = 4,
    dim: int = 128,
    rows: int = 1,
    page_size: int = 128,
    n_sink: int = 16,
    n_recent: int = 112,
    dtype: str = "bfloat16",
    pool: str | None = None,
    small: bool = False,
) -> Spec:
    """Sequences of 0 to `longest` tokens; their arrays are the query and what a `PagedCache` holds."""
    pool = pool or dtype
    max_pages = -(-longest // page_size)
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(0, longest, batch).astype(np.int32))
    table = rng.permutation(batch * max_pages).reshape(batch, max_pages).astype(np.int32)
    budget = {"n_sink": n_sink, "n_recent": n_recent}

    def empty() -> PagedCache:
        return init_cache(
            head_kind=kinds,
            dim=dim,
            batch=batch,
            num_pages=batch * max_pages,
            page_size=page_size,
            rows=rows,
            dtype=pool,
            **budget,
        )

    query = jax.ShapeDtypeStruct((batch, rows, group * len(kinds), dim), dtype)
    shapes = (query, *jax.eval_shape(empty))

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)

        def fill(x: Any) -> Any:
            if x is None:
                return None
            if x.dtype == jnp.int8:
                return jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8)
            return 0.02 * normal(rng, x.shape, x.dtype) if x.shape[2] == 2 else normal(rng, x.shape, x.dtype)

        return tuple(map(fill, shapes))

    def call(query: Array, *held: Any, implementation: dispatch.Implementation = None) -> Array:
        return ragged_decode_attention(
            query,
            PagedCache(*held),
            jnp.asarray(lengths),
            jnp.asarray(table),
            head_kind=kinds,
            implementation=implementation,
            **budget,
        )

    def passes(implementation: str) -> tuple[Pass, ...]:
        # The trip counts of the kernel's loops are not known to the compiler: its estimates would say nothing, and
        # large cases are for measuring.
        if not small and jax.default_backend() != "tpu":
            return ()
        module = dispatch.module(OPERATION, implementation)
        reasons: list[str | None] = []  # asked while tracing, where shapes are arrays

        def ask(query: Array, *held: Any) -> None:
            cache, pages = PagedCache(*held), jnp.asarray(table)
            reasons.append(module.unsupported(query, cache, pages, kinds=kinds, **budget))

        jax.eval_shape(ask, *shapes)
        if reasons != [None]:
            return ()

        def forward(query: Array, *held: Any, **options: Any) -> Array:
            return module.ragged_decode_attention(
                query,
                PagedCache(*held),
                jnp.asarray(lengths),
                jnp.asarray(table),
                kinds=kinds,
                scale=dim**-0.5,
                **budget,
                **options,
            )

        # Two products with every token that a head sees.
        seen = kinds.count(True) * lengths.sum() + kinds.count(False) * np.minimum(lengths, n_sink + n_recent).sum()
        return (Pass(OPERATION, implementation, "forward", forward, shapes, int(4 * seen * rows * group * dim)),)

    heads = f"{kinds.count(True)}+{kinds.count(False)} heads x{group} d{dim}"
    return Spec(
        operation=OPERATION,
        name=f"{batch}x{longest} {heads} pages of {page_size} rows {rows} {dtype}" + f" in {pool}" * (pool != dtype),
        dtype=dtype,
        call=call,
        make=make,
        shapes=shapes,
        gradients=(),
        passes=passes,
        small=small,
        peers=lambda: _peers(kinds, lengths, table, rows, dim),
    )


def sized(size: int, dtype: str = "bfloat16") -> Spec:
    """Eight sequences of up to `size` tokens, half of the heads compressed."""
    return case((True, False) * 4, batch=8, longest=size, dtype=dtype)


def _peers(kinds: tuple[bool, ...], lengths: np.ndarray, table: np.ndarray, rows: int, dim: int) -> Mapping[str, Any]:
    """Dense attention to gathered pages, where all heads are full and there is one query."""
    if not all(kinds) or rows > 1:
        return {}

    def dense(query: Array, pages: Array, *rest: Any) -> Array:
        held = jnp.swapaxes(pages[jnp.asarray(table)], 2, 3)
        held = held.reshape(len(lengths), -1, len(kinds), 2 * dim).astype(query.dtype)
        key, value = held[..., :dim], held[..., dim:]
        return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=jnp.asarray(lengths))

    return {"jax.nn": dense}


MIXED = (True, False, False, True)

SPECS = (
    case((True,) * 8, batch=16, longest=4096),
    case((True, False) * 4, batch=16, longest=4096),
    case((True, False) * 4, batch=16, longest=4096, pool="int8"),
    case((True, False) * 4, batch=64, longest=1024, dim=64, page_size=16),
    case(MIXED, batch=3, longest=40, dim=64, page_size=16, n_sink=2, n_recent=6, small=True),
    case(MIXED, batch=3, longest=300, dim=64, pool="int8", n_sink=2, n_recent=6, small=True),
    case(MIXED, batch=3, longest=40, dim=80, page_size=8, dtype="float32", rows=3, n_recent=9, group=1, small=True),
)
