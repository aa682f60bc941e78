"""SIGTERM, a scheduler's Ctrl-C, as the exception that Ctrl-C is.

Short, and a module of its own: sweeps and the starter of elastic workers use it, and neither may import the other.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    if threading.current_thread() is not threading.main_thread():  # only there handlers may be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
