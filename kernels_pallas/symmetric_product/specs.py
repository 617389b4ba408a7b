"""Cases of the symmetric product."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch
from kernels_pallas.spec import Pass, Spec, normal
from kernels_pallas.symmetric_product.api import symmetric_product

OPERATION = "symmetric_product"


def case(n: int, k: int, dtype: str = "bfloat16", *, batch: int = 1, small: bool = False) -> Spec:
    """x xᵀ of `batch` matrices with n rows of k entries."""
    shape = (batch, n, k)
    x = jax.ShapeDtypeStruct(shape, dtype)

    def passes(implementation: str) -> tuple[Pass, ...]:
        module = dispatch.module(OPERATION, implementation)
        if module.unsupported(n, k, jnp.dtype(dtype)):
            return ()
        # One triangle: n (n + 1) / 2 sums of k products.
        flops = batch * n * (n + 1) * k
        return (Pass(OPERATION, implementation, "forward", module.symmetric_product, (x, x), flops),)

    return Spec(
        operation=OPERATION,
        name=f"{batch}x{n}x{k} {dtype}",
        dtype=dtype,
        call=symmetric_product,
        make=lambda seed: (normal(np.random.default_rng(seed), shape, dtype),),
        shapes=(x,),
        gradients=(0,),
        passes=passes,
        operands=lambda x: (x, x),
        small=small,
        peers=_peers,
    )


def sized(size: int, dtype: str = "bfloat16") -> Spec:
    """A square matrix of that many rows."""
    return case(size, size, dtype)


def _peers() -> Mapping[str, Any]:
    return {"jnp.matmul": functools.partial(_plain)}


def _plain(x: Any) -> Any:
    return jnp.matmul(x, jnp.swapaxes(x, -1, -2), precision="highest" if x.dtype == jnp.float32 else None)


SPECS = (
    case(1024, 1024),
    case(1024, 4096),
    case(2048, 2048),
    case(768, 3072, batch=4),
    case(1024, 1024, "float32"),
    case(300, 200, small=True),
    case(300, 200, "float32", batch=2, small=True),
    case(256, 384, "float16", batch=2, small=True),
)
