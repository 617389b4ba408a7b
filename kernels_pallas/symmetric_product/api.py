"""Products that are known to be symmetric: the public function."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from kernels_pallas import _compat, dispatch
from kernels_pallas.symmetric_product import reference, xla

_OPERATION = "symmetric_product"
_SMALLEST = 128  # rows and columns below which no kernel is worth loading; the kernels say what else they need


def symmetric_product(
    x: Float[Array, "*batch n k"],
    y: Float[Array, "*batch n k"] | None = None,
    *,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "*batch n n"]:
    """x yᵀ where it is known to be symmetric, such as Z Zᵀ or a product of two polynomials of one matrix.

    One triangle of blocks is computed and mirrored, so the result is exactly symmetric. Sums are float32 (float64
    inputs: float64), and float32 inputs are multiplied at full precision on every platform. Derivatives are those
    of the plain product x yᵀ, in forward and reverse mode and of any order.

    None takes a Pallas kernel in programs compiled for a TPU (bfloat16, float32) or a Hopper GPU (bfloat16, float16)
    when n and k are at least 128, else "xla"; the platform is the one compiled for, also on a machine without it
    (`kernels_pallas.aot`, where GPUs are taken to be Hoppers). A Pallas kernel needs whole matrices: in a program that
    `jit` partitions over several TPUs or GPUs, call this inside `jax.shard_map`, split along batch axes only. Elsewhere
    None is "xla" under a mesh set by `jax.set_mesh`; where only the arrays know of a mesh, and in `jax.export` to
    several platforms at once, JAX refuses the kernel: name "xla".

    Args:
      x: Shape (*batch, n, k), floating point.
      y: Shape and dtype of `x`; the caller promises that x yᵀ is symmetric. None: `x`, the Gram matrix.
      implementation: A name, a sequence of names to try in order, or None.

    Returns:
      Shape (*batch, n, n), dtype of `x`.

    Raises:
      ValueError: Shapes or dtypes that do not fit, an unknown name.
      UnsupportedError: The implementation asked for cannot run this call on this platform.

    The product behind the Newton-Schulz iterations of "OLion: Approaching the Hadamard Ideal by Intersecting Spectral
    and l_inf Implicit Biases" (arXiv 2602.01105), A = Z Zᵀ and A A.

    >>> z = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> symmetric_product(z).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    _validate(x, y)
    return _choose(implementation, x)(x, y)


def _validate(x: Array, y: Array | None) -> None:
    if x.ndim < 2:
        raise ValueError(f"x must have shape (*batch, n, k), got {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, got {x.dtype}")
    if y is not None and y.shape != x.shape:
        raise ValueError(f"y must have x's shape {x.shape}, got {y.shape}")
    if y is not None and y.dtype != x.dtype:
        raise ValueError(f"y must have x's dtype {x.dtype}, got {y.dtype}")


Operation = Callable[[Array, Array | None], Array]


def _choose(implementation: dispatch.Implementation, x: Array) -> Operation:
    """The function that runs this call, with its rules for vmap and differentiation."""
    if implementation is None and (x.size == 0 or min(x.shape[-2:]) < _SMALLEST or _may_be_partitioned(x)):
        return _XLA
    found = dispatch.select(_OPERATION, implementation, lambda module: module.unsupported(*x.shape[-2:], x.dtype))
    if isinstance(found, dict):
        return _operation_by_platform(tuple(found.items()))
    if found in dispatch.KERNELS:
        return _operation_of(found)
    return {"reference": _REFERENCE, "xla": _XLA}[found]


def _may_be_partitioned(x: Array) -> bool:
    """Whether a mesh in use has axes that `jit` partitions over; those of `jax.shard_map` it leaves alone."""
    kind = jax.sharding.AxisType
    meshes = (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh())
    axes = [axis for mesh in meshes for axis in zip(mesh.axis_types, mesh.axis_sizes, strict=True)]
    return any(axis == kind.Explicit or (axis == kind.Auto and size > 1) for axis, size in axes)


def _operation(run: Callable[[Array, Array], Array]) -> Operation:
    """`run` of (*batch, n, k) operands, with its rules: batch axes of vmap come first, derivatives are x yᵀ's."""

    @custom_vmap
    def batched(x, y):
        return run(x, y)

    @batched.def_vmap
    def _(axis_size, in_batched, x, y):
        x, y = (
            a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip((x, y), in_batched, strict=True)
        )
        return batched(x, y), True

    @jax.custom_jvp
    def operation(x, y):
        return batched(x, x if y is None else y)

    @operation.defjvp
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        if y is None:  # d(x xᵀ) = dx xᵀ + (dx xᵀ)ᵀ
            half = reference.product(dx, x)
            return operation(x, None), half + jnp.swapaxes(half, -1, -2)
        return operation(x, y), reference.product(dx, y) + reference.product(x, dy)

    return jax.jit(operation)


_REFERENCE = _operation(reference.symmetric_product)
_XLA = _operation(xla.symmetric_product)


@functools.cache
def _operation_of(name: str) -> Operation:
    return _operation(_folded(dispatch.module(_OPERATION, name).symmetric_product))


@functools.cache
def _operation_by_platform(kernels: tuple[tuple[str, ModuleType], ...]) -> Operation:
    """Kernels by the platform that runs them, "xla" on every other."""
    if not kernels:
        return _XLA
    branches: dict[str, Any] = {platform: _folded(module.symmetric_product) for platform, module in kernels}
    return _operation(functools.partial(jax.lax.platform_dependent, default=xla.symmetric_product, **branches))


def _folded(kernel: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """`kernel` of one batch axis, for any number of them and inside `jax.shard_map`."""

    def call(x, y):
        x, y = _compat.same_varying((x, y))
        flat = (a.reshape(-1, *a.shape[-2:]) for a in (x, y))
        out = kernel(*flat).reshape(*x.shape[:-1], x.shape[-2])
        return _compat.same_varying(out, x)

    return call
