"""jaxlib_icml: the systems of ICML 2026 papers as JAX software.

Families (`optim`, `moe`, ...) and the flagship functions load on first use, so importing this package costs
next to nothing:

>>> from jaxlib_icml import gradient_stabilizer, olion
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBPACKAGES = ("agents", "attention", "lm", "moe", "optim", "quant", "training")
_FUNCTIONS = {"gradient_stabilizer": "optim", "olion": "optim"}

if TYPE_CHECKING:
    from jaxlib_icml import agents, attention, lm, moe, optim, quant, training
    from jaxlib_icml.optim import gradient_stabilizer, olion

__all__ = ["agents", "attention", "gradient_stabilizer", "lm", "moe", "olion", "optim", "quant", "training"]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *_FUNCTIONS})
