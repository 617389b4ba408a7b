"""Compile for TPUs and GPUs on a machine that has neither.

The compilers come with the extra `[aot]` (`libtpu`; `jax-cuda13-plugin` and `jax-cuda13-pjrt`, of jaxlib's version),
which belongs in an environment of its own: where the plugins are installed, every start of JAX looks for chips. Set
`JAX_PLATFORMS=cpu` there. What the compiler accepts fits the chip: memory beyond VMEM or shared memory, bad tilings
and unsupported operations are errors.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from kernels_pallas import autotune, chips

# Read by the plugins when JAX first looks for devices; none of them matters on a machine with the chip.
for _name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
    os.environ.setdefault(_name, "1")

TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest topology of every TPU generation."""

# Device name, memory and second-level cache (bytes): the vendor's data sheets.
_HOPPERS = {
    "h100": ("NVIDIA H100 80GB HBM3", 85_000_000_000, 52_428_800),
    "h200": ("NVIDIA H200", 150_000_000_000, 62_914_560),
}

CHIPS = (*TPUS, *_HOPPERS)


def missing(chip: str) -> str | None:
    """Returns why this environment cannot compile for `chip`, None if it can.

    >>> missing("h9000")
    Traceback (most recent call last):
    ...
    ValueError: chip must be one of v4, v5e, v5p, v6e, h100, h200 or a TPU topology such as 'v5p:4x4x4', got 'h9000'
    """
    _check(chip)
    module = "jax_plugins.xla_cuda13" if chip in _HOPPERS else "libtpu"
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"compiling for {chip} needs {module}: pip install 'jaxlib-icml[aot]'"


def devices(chip: str) -> list[Any]:
    """Devices to compile for, in no other way usable.

    Args:
      chip: one of `CHIPS`, or a TPU topology such as `"v5p:4x4x4"`.

    Returns:
      The devices of the topology.

    Raises:
      ValueError: an unknown chip.
      ImportError: the compiler is not installed.
    """
    if reason := missing(chip):
        raise ImportError(reason)
    if chip in _HOPPERS:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=_hopper_config(chip), topology="1x1x1"
        )
    else:
        topology = topologies.get_topology_desc(TPUS.get(chip, chip), platform="tpu")
    return list(topology.devices)


def make_mesh(chip: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh over the first devices of a topology.

    Args:
      chip: as in `devices`.
      shape: size of every axis; their product is at most the number of devices.
      names: names of the axes.

    Returns:
      The mesh.

    Raises:
      ValueError: more devices than the topology has.
    """
    found, count = devices(chip), int(np.prod(shape))
    if count > len(found):
        raise ValueError(f"shape {shape} needs {count} devices, {chip} has {len(found)}")
    return Mesh(np.array(found[:count]).reshape(shape), names)


def compile_for(chip: str, function: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """Compile a function for one chip, with the block sizes that kernels have for it (`autotune`).

    Args:
      chip: as in `devices`.
      function: what `jax.jit` takes.
      *args: trees of arrays or anything with shape and dtype.

    Returns:
      The compiled program: `as_text()`, `memory_analysis()`, `cost_analysis()`; it cannot be called.

    Raises:
      ValueError, ImportError: as `devices`.
      Exception: what the compiler says when the program does not fit the chip.
    """
    sharding = SingleDeviceSharding(devices(chip)[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with autotune.for_chip(chip.partition(":")[0]), warnings.catch_warnings():
        # Donated buffers that a compile-only client cannot alias.
        warnings.filterwarnings("ignore", message=".*donated.*")
        return jax.jit(function).lower(*placed).compile()


def _check(chip: str) -> None:
    if chip not in CHIPS and chip.partition(":")[0] not in TPUS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)} or a TPU topology such as 'v5p:4x4x4', got {chip!r}")


def _hopper_config(chip: str) -> str:
    """The chip as XLA's `GpuTargetConfigProto`, in text form."""
    name, memory, cache = _HOPPERS[chip]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": int(chips.CHIPS[chip].bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": 1.98,
        "device_memory_size": memory,
    }
    fields = " ".join(f"{key}: {value}" for key, value in info.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: 9 minor: 0 }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } '
        f'runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{name}"'
    )
