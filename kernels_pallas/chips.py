"""The chips that kernels are compiled, tuned and measured for, with the figures of their data sheets."""

from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """One accelerator, as programs see it (v4, v5p: both cores).

    Attributes:
      device_kinds: How JAX calls it; of GPUs the beginnings of names.
      flops: Dense bfloat16 multiplications and additions, per second.
      bandwidth: Bytes per second from and to its main memory.
      is_tpu: Whether it is a TPU.
    """

    device_kinds: tuple[str, ...]
    flops: float
    bandwidth: float
    is_tpu: bool = True

    def seconds(self, flops: int, bytes_moved: int, passes: int = 1) -> tuple[float, float]:
        """The least time that arithmetic and memory need: the roofline bound is the larger.

        Args:
          flops: Multiplications and additions.
          bytes_moved: From and to main memory.
          passes: Multiplications of bfloat16 that one multiplication takes.

        Returns:
          Seconds of arithmetic, seconds of memory.
        """
        return flops * passes / self.flops, bytes_moved / self.bandwidth


# TPUs: cloud.google.com/tpu/docs, pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e", table "key chip specifications".
# GPUs: NVIDIA's data sheets "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU" (SXM), without sparsity.
CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, 1.228e12),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 0.819e12),
    "v5p": Chip(("TPU v5p", "TPU v5"), 459e12, 2.765e12),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 1.640e12),
    "h100": Chip(("NVIDIA H100",), 989.4e12, 3.35e12, is_tpu=False),
    "h200": Chip(("NVIDIA H200", "NVIDIA GH200"), 989.4e12, 4.8e12, is_tpu=False),
}
"""Chips by the name that `aot` gives them."""


def of_device(kind: str) -> str | None:
    """The chip that a device is.

    Args:
      kind: `device_kind` of a JAX device.

    Returns:
      Its name in `CHIPS`, None for any other.

    >>> of_device("TPU v5 lite"), of_device("TPU v5"), of_device("cpu")
    ('v5e', 'v5p', None)
    """
    for name, chip in CHIPS.items():
        # GPUs carry their memory in the name, while "TPU v5 lite" is not a "TPU v5".
        if kind in chip.device_kinds or (not chip.is_tpu and kind.startswith(chip.device_kinds)):
            return name
    return None


def present() -> str | None:
    """The chip of this process's default backend; None on a CPU or on a chip that is not listed."""
    if jax.default_backend() not in ("tpu", "gpu"):
        return None
    return of_device(jax.local_devices()[0].device_kind)
