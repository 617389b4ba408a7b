"""No kernel for TPUs yet: "xla" runs there."""

from typing import Any


def unsupported(*args: Any, **case: Any) -> str | None:
    return "there is no kernel for TPUs yet"


def unsupported_device() -> str | None:
    return None
