"""Shared test set-up: two virtual CPU devices, quick compiles, and shape annotations checked at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of what the tests do: machine code is not optimised, which nearly halves their time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
)

from jaxtyping import install_import_hook

# Installed before any test module imports the packages, so that every annotated function is checked.
install_import_hook(["jaxlib_icml", "kernels_pallas"], "beartype.beartype")
