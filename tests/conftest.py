"""Shared test set-up: two virtual CPU devices, and shape annotations checked at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

from jaxtyping import install_import_hook

# Installed before any test module imports the packages, so that every annotated function is checked.
install_import_hook(["jaxlib_icml", "kernels_pallas"], "beartype.beartype")
