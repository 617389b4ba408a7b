"""What the tests of untrusted files share."""

import contextlib
import signal

import pytest


@contextlib.contextmanager
def watchdog(seconds: int = 120):
    """Turns a hang into a failure; it only guards against endless loops."""

    def bark(*_):
        pytest.fail(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
