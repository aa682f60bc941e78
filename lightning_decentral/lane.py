"""Host work beside the training: a thread that does what it's given, one thing after the other."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
END_SECONDS = 1.0


class Errand(Generic[Result]):
    """A call under way on a lane."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._done = threading.Event()
        self._result: Result
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the lane."""
        assert self._call is not None
        try:
            with torch.no_grad():  # a new thread would have it on
                self._result = self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # and the tensors that it holds
        self._done.set()

    def wait(self) -> None:
        """Until it's done, however it ended."""
        self._done.wait()

    def done(self) -> bool:
        """Whether it is."""
        return self._done.is_set()

    def result(self) -> Result:
        """What it returned, or its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Lane:
    """Begins with its first errand and ends when nobody holds it any more.

    A daemon: at the end of a program that failed, a transfer that never ends doesn't keep it alive for more than a
    second. That is why it's no `ThreadPoolExecutor`, which joins its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: SimpleQueue[Errand[Any] | None] | None = None

    def send(self, call: Callable[[], Result]) -> Errand[Result]:
        """Do it after all that was sent before."""
        if self._errands is None:
            self._errands = SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._errands,), name=self._name, daemon=True)
            thread.start()
            _alive[thread] = self._errands
            weakref.finalize(self, self._errands.put, None)
        errand = Errand(call)
        self._errands.put(errand)
        return errand


_alive: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Errand[Any] | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """A thread that comes back from torch when the interpreter is gone would end the program by a signal."""
    lanes = list(_alive.items())
    for _, errands in lanes:
        errands.put(None)
    end = time.monotonic() + END_SECONDS
    for thread, _ in lanes:
        thread.join(max(0.0, end - time.monotonic()))


def _work(errands: "SimpleQueue[Errand[Any] | None]") -> None:
    while (errand := errands.get()) is not None:
        errand.run()
        del errand  # with its result
