"""Stopwatches, asynchronous reads, call queues (threads, streams) and hooks of a step, for a CPU or CUDA device."""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future as Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_decentral.shared.compute import cuda

Result = TypeVar("Result")


class HostStopwatch:
    """Sums wall seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self._total, self._begun = 0.0, list[float]()

    def start(self) -> None:
        self._begun.append(perf_counter())

    def stop(self) -> None:
        # Intervals may be nested or, with two threads, overlap: in any pairing of starts and stops the sum is the same.
        self._total += perf_counter() - self._begun.pop()

    def during(self, waits: Iterable[Callable[[], object]]) -> None:
        """Add the seconds that these calls take, one after the other, or make the current stream wait."""
        self.start()
        for wait in waits:
            wait()
        self.stop()

    def seconds(self) -> float:
        return self._total


OPEN = 64  # intervals that a device's stopwatch keeps before it removes those that the device has finished


class DeviceStopwatch(HostStopwatch):
    """Sums device seconds between `start` and `stop` on the current stream, by events, without making the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self._open: deque[tuple[cuda.Event, cuda.Event]] = deque()
        self._spare: list[tuple[cuda.Event, cuda.Event]] = []

    def start(self) -> None:
        pair = self._spare.pop() if self._spare else (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
        pair[0].record()
        self._open.append(pair)

    def stop(self) -> None:
        self._open[-1][1].record()
        if len(self._open) > OPEN:  # `seconds` may never be called
            self.seconds()

    def seconds(self) -> float:
        """Return the device seconds of all intervals that the device has finished so far."""
        while self._open and self._open[0][1].query():
            start, stop = pair = self._open.popleft()
            self._total += start.elapsed_time(stop) / 1000.0
            self._spare.append(pair)
        return self._total


def stopwatch(device: torch.device) -> HostStopwatch:
    """Return the stopwatch that measures waiting on `device`."""
    # A host clock would see nothing of a device: waiting for NCCL only queues a wait on the stream.
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class AsyncRead:
    """Reads a small tensor on the host, asynchronously. A host's tensor is ready at once. A device's is copied after
    the work that the current stream has queued."""

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = tensor.device.type != "cuda"
        self._tensor = tensor
        if not self.on_host:
            self._source = tensor  # keeps the memory from being reused before the copy is done
            self._tensor = cuda.host_like(tensor).copy_(tensor, non_blocking=True)
            # An event for this copy alone: `read` doesn't wait for what is queued after it.
            self._arrived = cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        if not self.on_host:
            self._arrived.synchronize()
        return self._tensor


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Context whose work runs on a CUDA stream of its own, and doesn't wait for work of other streams."""
    return cuda.on(cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class CallQueue(Protocol):
    """Queue of calls that run in order, concurrently with training."""

    def send(self, call: Callable[[], Any]) -> Any:
        """Run the call after all calls sent before; returns an object with `result` and `done`, as `Future` has."""


Calls: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Future[Any], ...]] | None]"
END_SECONDS = 1.0


class WorkerThread:
    """Call queue on a thread, which starts with the first call and ends when this object is deleted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls | None = None

    def send(self, call: Callable[..., Result], *inputs: "Future[Any]") -> "Future[Result]":
        """Run the call after all calls sent before, with the results of `inputs`; an input's error becomes its own."""
        if self._calls is None:
            self._calls = SimpleQueue()
            # A daemon, and no `ThreadPoolExecutor`, which joins its threads: when a program has failed, a
            # transfer that never ends doesn't keep it alive for more than `END_SECONDS`.
            thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            thread.start()
            _alive[thread] = self._calls
            # The thread refers to the queue only: with a reference to this object, the object would never be deleted.
            weakref.finalize(self, self._calls.put, None)
        future: Future[Result] = Future()
        self._calls.put((future, call, inputs))
        return future


_alive: weakref.WeakKeyDictionary[threading.Thread, Calls] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    # A thread that comes back from torch when the interpreter is gone would end the program by a signal.
    threads = list(_alive.items())
    for _, calls in threads:
        calls.put(None)
    end = time.monotonic() + END_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _work(calls: Calls) -> None:
    while (sent := calls.get()) is not None:
        future, call, inputs = sent
        try:
            with torch.no_grad():  # gradients are enabled in a new thread
                future.set_result(call(*(one.result() for one in inputs)))
        except BaseException as error:
            future.set_exception(error)  # raised by `result`, in the thread that asks
        del sent, future, call, inputs  # and the tensors that they hold


class StreamQueue:
    """Call queue on a stream of a CUDA device. A call runs after the work that the current stream has queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = cuda.Stream(device)

    def send(self, call: Callable[[], Any]) -> "Queued":
        self._stream.wait_stream(cuda.current_stream(self._stream.device))
        with cuda.on(self._stream), torch.no_grad():
            return Queued(call(), self._stream.record_event())


class Queued:
    """Call that was queued to a stream."""

    def __init__(self, value: Any, event: cuda.Event) -> None:
        self._value, self._event = value, event
        self.done = event.query

    def result(self) -> Any:
        """Return the call's value; the current stream waits, not the host."""
        cuda.current_stream().wait_event(self._event)
        return self._value


def call_queue(device: torch.device, name: str) -> CallQueue:
    """Return a queue whose calls run concurrently with training: on a thread for the host, on a stream for a device."""
    return StreamQueue(device) if device.type == "cuda" else WorkerThread(name)


class Turn:
    """Turn of a forward and backward on a device that other trainings use, too; here on a device of its own."""

    def take(self) -> None:
        """Wait for the device, before a forward."""

    def give(self) -> None:
        """Return the device, after the backward and before other workers' gradients are awaited."""


class DeviceSteps:
    """Hooks around a training step on a device; all empty here, where the device holds a whole worker."""

    def train(self, module: Any, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        """Run a training step; `redirect` runs it inside the module's own call, where hooks of `forward` see it."""
        return step()

    def evaluate(self, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        return step()

    def averaging(self, closure: Callable[[], Any]) -> Any:
        """Run the closure that computes the gradients of one update."""
        return closure()

    def before(self, loss: Any) -> None:
        """Prepare for the backward pass of this loss."""

    def after(self) -> None:
        """Hook after a backward pass."""

    def updated(self, optimizer: Any) -> None:
        """Hook after an optimizer step, which a loss scaler may have skipped."""

    def blocked(self) -> AbstractContextManager[None]:
        """Context in which gradients are only accumulated."""
        return nullcontext()

    def explain(self, error: BaseException) -> None:
        """Warn with a remedy where an error is caused by how this device holds the model."""

    def rest(self) -> None:
        """Make the parameters readable outside of a step (sharded ones may be gathered)."""
