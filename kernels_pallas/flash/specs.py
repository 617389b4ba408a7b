"""Cases of the attention operations: what is the same for all of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas import dispatch
from kernels_pallas.spec import Pass, Spec, normal

_DENSE_BYTES = 2**31  # peers that hold all scores are left out where those take more than this


def attention_spec(
    operation: str,
    call: Callable[..., Array],
    *,
    rows: int,
    seq: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    batch: int = 1,
    extras: Callable[[np.random.Generator], tuple[Any, ...]],
    statics: Mapping[str, Any],
    question: Mapping[str, Any],
    pairs: int,
    about: str = "",
    estimates: bool = True,
    small: bool = False,
    peers: Callable[[], Mapping[str, Callable[..., Array]]] = dict,
) -> Spec:
    """A case of an attention operation.

    Args:
      operation: Its folder.
      call: The public function of query, key, value and extras, with `implementation=`.
      rows: Query rows.
      seq: Keys.
      heads: Query heads.
      kv_heads: Key heads.
      dim: Head size.
      dtype: Of query, key and value.
      batch: Batch elements.
      extras: The further arrays for a random generator, None where there is none.
      statics: What the kernels take by keyword.
      question: What their `unsupported` takes by keyword.
      pairs: Pairs (row, key) that see each other, in one head of one batch element.
      about: What else belongs in the name.
      estimates: As in `Spec`.
      small: As in `Spec`.
      peers: As in `Spec`.

    Returns:
      The case; its name lists the sizes.
    """
    query = jax.ShapeDtypeStruct((batch, rows, heads, dim), dtype)
    key = jax.ShapeDtypeStruct((batch, seq, kv_heads, dim), dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        arrays = (normal(rng, x.shape, dtype) for x in (query, key, key))
        return (*arrays, *extras(rng))

    extra_shapes = tuple(
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in extras(np.random.default_rng(0))
    )
    shapes = (query, key, key, *extra_shapes)

    def passes(implementation: str) -> tuple[Pass, ...]:
        module = dispatch.module(operation, implementation)
        reasons: list[str | None] = []  # asked while tracing, where shapes are arrays
        jax.eval_shape(lambda *arrays: reasons.append(module.unsupported(*arrays, **question)), query, key)
        if reasons != [None]:
            return ()

        def forward(*args: Any, **options: Any) -> Any:
            return module.forward(*args, **statics, **options)

        def backward(*args: Any, **options: Any) -> Any:
            return module.backward(*args, **statics, **options)

        # Two products of (row, key, dim) forward, five backward.
        product = 2 * batch * heads * pairs * dim
        return (
            Pass(operation, implementation, "forward", forward, shapes, 2 * product),
            Pass(operation, implementation, "backward", backward, (*shapes, query, lse, query), 5 * product),
        )

    length = f"{rows}x{seq}" if rows != seq else f"{seq}"
    size = f"{length} h{heads}" + (f"/{kv_heads}" if kv_heads != heads else "") + f" d{dim} {dtype}"
    return Spec(
        operation=operation,
        name=(f"{batch}x" if batch > 1 else "") + size + (f" {about}" if about else ""),
        dtype=dtype,
        call=call,
        make=make,
        shapes=shapes,
        gradients=(0, 1, 2),
        passes=passes,
        estimates=estimates,
        small=small,
        peers=peers,
    )


def segments(rng: np.random.Generator, batch: int, seq: int) -> Array:
    """Ids of packed sequences: runs of 3, 2, 1, then padding."""
    ids = np.sort(rng.integers(0, 4, (batch, seq)), axis=1)[:, ::-1]
    return jnp.asarray(ids.copy(), jnp.int32)


def dense_peers(seq: int, heads: int, attend: Callable[..., Callable[..., Array]]) -> dict[str, Callable[..., Array]]:
    """`attend(implementation=)` of `jax.nn.dot_product_attention`, where its scores fit, and of cuDNN on a GPU."""
    found = {}
    if 4 * seq * seq * heads <= _DENSE_BYTES:
        found["jax.nn"] = attend("xla")
    if jax.default_backend() == "gpu":
        found["cudnn"] = attend("cudnn")
    return found
