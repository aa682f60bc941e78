"""Makes SIGTERM, by which schedulers stop a process, raise KeyboardInterrupt as Ctrl-C does.

This short module stands alone: sweeps and the starter of elastic workers use it, and neither may import the other."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt."""

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
