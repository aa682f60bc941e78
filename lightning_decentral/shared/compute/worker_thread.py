"""Worker threads: calls done in order beside the training, and what they return or raise."""

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


class WorkerThread:
    """Begins with its first call and ends when nobody holds it any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Future[Any] | None] | None = None

    def send(self, call: Callable[[], Result]) -> "Future[Result]":
        """Do it after all that was sent before."""
        if self._calls is None:
            self._calls = SimpleQueue()
            # A daemon, and no `ThreadPoolExecutor`, which joins its threads: when a program has failed, a
            # transfer that never ends doesn't keep it alive for more than `END_SECONDS`.
            thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            thread.start()
            _alive[thread] = self._calls
            # The thread holds the queue alone: were it to hold this object, nothing would end it.
            weakref.finalize(self, self._calls.put, None)
        future = Future(call)
        self._calls.put(future)
        return future


class Future(Generic[Result]):
    """A call under way on a worker thread."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._done = threading.Event()
        self._result: Result
        self._error: BaseException | None = None
        self.wait, self.done = self._done.wait, self._done.is_set

    def run(self) -> None:
        assert self._call is not None
        try:
            with torch.no_grad():  # a new thread would have it on
                self._result = self._call()
        except BaseException as error:
            # Raised by `result`, in the thread that asks.
            self._error = error
        self._call = None  # and the tensors that it holds
        self._done.set()

    def result(self) -> Result:
        """What it returned, or its error, once it's done."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


_alive: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Future[Any] | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    # A thread that comes back from torch when the interpreter is gone would end the program by a signal.
    threads = list(_alive.items())
    for _, calls in threads:
        calls.put(None)
    end = time.monotonic() + END_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _work(calls: "SimpleQueue[Future[Any] | None]") -> None:
    while (future := calls.get()) is not None:
        future.run()
        del future  # with its result
