"""Not built yet."""


def unsupported(*args, **kwargs):
    return "not built yet"


def unsupported_device():
    return None
