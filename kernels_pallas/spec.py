"""Cases of an operation that tests, reports, benchmarks and tuning share."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kernels_pallas
from kernels_pallas import autotune, dispatch


class Pass(NamedTuple):
    """One kernel call of a case.

    Attributes:
      operation: Folder of the operation.
      implementation: "pallas_tpu" or "pallas_gpu".
      name: "forward" or "backward".
      function: The kernel: arrays, and `config=` where it has block sizes.
      args: Its arrays as shapes and dtypes, None where there is none.
      flops: Multiplications and additions that the result needs.
    """

    operation: str
    implementation: str
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    flops: int

    @property
    def kernel(self) -> str:
        """Its name in `autotune`."""
        return f"{self.implementation}.{self.name}"

    @property
    def bytes(self) -> int:
        """Every argument read once, every result written once."""
        results = jax.eval_shape(self.function, *self.args)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.args, results)))

    def key(self) -> Mapping[str, autotune.Scalar] | None:
        """The case as the kernel looks it up; None for a kernel without block sizes."""
        asked = autotune.asked_by(self.function, *self.args)
        if asked is None:
            return None
        if asked[:2] != (self.operation, self.kernel):
            raise ValueError(f"{self.operation} {self.kernel} looks up {' '.join(asked[:2])}")
        return asked[2]

    def candidates(self) -> list[Any]:
        """The configs worth trying; none for a kernel without block sizes."""
        key = self.key()
        if key is None:
            return []
        module = dispatch.module(self.operation, self.implementation)
        own: Callable[..., list[Any]] = getattr(module, f"{self.name}_candidates", None) or module.candidates
        return own(key)

    def at(self, config: Mapping[str, int] | None) -> Callable[..., Any]:
        """The kernel with these fields of a config; None: with those of its heuristic."""
        if config is not None:
            return functools.partial(self.function, config=type(self.candidates()[0])(**config))

        def by_heuristic(*args: Any) -> Any:
            with autotune.only_heuristics():
                return self.function(*args)

        return by_heuristic


@dataclasses.dataclass(frozen=True)
class Spec:
    """One case of an operation.

    Attributes:
      operation: Folder of the operation.
      name: Unique within the operation.
      dtype: Of its floating-point arrays.
      call: The public function: arrays, and `implementation=`.
      make: Arrays for a seed.
      shapes: Those arrays as shapes and dtypes, None where there is none.
      gradients: Which of the arrays are differentiated.
      passes: The kernel calls of "pallas_tpu" or "pallas_gpu"; none where the kernels do not take this case.
      operands: The arrays as the forward kernel takes them. A backward kernel takes those, then what the forward kernel
        gives, then the cotangent of the output.
      estimates: Whether cycle estimates can choose between block sizes: not where loops depend on values that are only
        known when the program runs.
      small: Whether it is for tests of values; else for reports, benchmarks and tuning.
      peers: Other people's functions of the same arrays that compute the same, by name; made when asked for.
    """

    operation: str
    name: str
    dtype: str
    call: Callable[..., Array]
    make: Callable[[int], tuple[Any, ...]]
    shapes: tuple[Any, ...]
    gradients: tuple[int, ...]
    passes: Callable[[str], tuple[Pass, ...]]
    operands: Callable[..., tuple[Any, ...]] = lambda *arrays: arrays
    estimates: bool = True
    small: bool = False
    peers: Callable[[], Mapping[str, Callable[..., Array]]] = dict

    def runs(self, implementation: dispatch.Implementation, *, gradient: bool) -> Callable[..., Any]:
        """The public function, or with `gradient` a function (arrays..., cotangent) -> (out, gradients)."""
        return with_gradients(functools.partial(self.call, implementation=implementation), self.gradients, gradient)


def with_gradients(call: Callable[..., Array], gradients: Sequence[int], gradient: bool = True) -> Callable[..., Any]:
    """`call`, or with `gradient` a function (arrays..., cotangent) -> (out, gradients of the arrays named)."""
    if not gradient:
        return call

    def run(*args: Any) -> tuple[Any, ...]:
        *arrays, cotangent = args

        def of_some(*some: Any) -> Any:
            full = list(arrays)
            for i, x in zip(gradients, some, strict=True):
                full[i] = x
            return call(*full)

        out, pull_back = jax.vjp(of_some, *(arrays[i] for i in gradients))
        return out, *pull_back(cotangent)

    return run


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal numbers."""
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def operations() -> tuple[str, ...]:
    """Operations that have specs, in alphabetical order."""
    folders = sorted(m.name for m in pkgutil.iter_modules(kernels_pallas.__path__) if m.ispkg and m.name != "flash")
    return tuple(name for name in folders if importlib.util.find_spec(f"kernels_pallas.{name}.specs") is not None)


def specs(operation: str) -> tuple[Spec, ...]:
    """The specs of an operation.

    Raises:
      ValueError: An operation that has none.

    >>> sorted({spec.operation for spec in specs("symmetric_product")})
    ['symmetric_product']
    """
    if operation not in operations():
        raise ValueError(f"operation must be one of {', '.join(operations())}, got {operation!r}")
    found: tuple[Spec, ...] = importlib.import_module(f"kernels_pallas.{operation}.specs").SPECS
    return found


def find(operation: str, name: str) -> Spec:
    """The spec of that name."""
    (found,) = (spec for spec in specs(operation) if spec.name == name)
    return found


def program(
    operation: str, spec: str, implementation: str, name: str, config: Mapping[str, int] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A kernel call and its arguments, as `static_report.Program` names them; `config` as for `Pass.at`."""
    (found,) = (p for p in find(operation, spec).passes(implementation) if p.name == name)
    return found.at(config), found.args
