"""Peers that only benchmarks need."""

from typing import Any


def import_torch() -> Any:
    """Returns the module `torch`.

    Raises:
      ModuleNotFoundError: it is not installed; the message names the extra that installs it.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        message = "this benchmark compares with PyTorch: pip install 'jaxlib-icml[bench]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return torch
