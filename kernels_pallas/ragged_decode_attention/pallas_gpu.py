"""No kernel for GPUs yet: "xla" runs there, and asking for this one by name is refused."""

from typing import Any


def unsupported(*args: Any, **case: Any) -> str | None:
    """Returns why the kernel cannot run this call."""
    return 'there is no kernel for GPUs, "xla" runs there'


def unsupported_device() -> str | None:
    """Returns why this machine's device cannot run the kernel."""
    return unsupported()
