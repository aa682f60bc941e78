"""Interception of a model's forward while the user's step runs: the call is read, and answered later.

A step that gets an answer waits in its call, in its own thread, and continues there. The step runs once, so whatever it
draws, counts, reads or writes before and after the call happens once, as in one process."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_decentral.pipeline.compute.model import Call, Pipelined
from lightning_decentral.shared.compute.around import ThreadModes


class _Reached(BaseException):
    """Exception that ends a step at its call of the model; no `except Exception` of the user's catches it."""

    def __init__(self, call: Call) -> None:
        self.call = call


@contextmanager
def answering(model: Pipelined, answer: Callable[[Call], Any]) -> Iterator[None]:
    """Read each call of the model in this context, and return `answer(call)` to the caller."""
    module: Any = model.module
    module.forward = lambda *args, **kwargs: answer(model.read(args, kwargs))
    try:
        yield
    finally:
        del module.forward  # the class's own again


def called(model: Pipelined, step: Callable[[], Any]) -> Call:
    """Run `step` up to its call of the model, and return that call. ValueError: the step returned without a call."""
    try:
        with answering(model, _reach):
            step()
    except _Reached as reached:
        return reached.call
    raise _never(model)


class Suspended:
    """The user's step, run at once up to its `call` of the model, where it waits in its own thread. `place`: the device
    whose modes (autocast, stream) it uses, as set in the thread that creates this. ValueError: the step returned
    without a call. The step's own exceptions are raised here."""

    def __init__(self, model: Pipelined, step: Callable[[], Any], place: torch.device) -> None:
        self._model, self._step, self._modes = model, step, ThreadModes(place)
        self._paused, self._going = threading.Semaphore(0), threading.Semaphore(0)
        self._calls: list[Call] = []
        self._answer: Callable[[Call], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        run = contextvars.copy_context().run
        # A daemon: a worker that is interrupted while its step runs can end without the thread.
        thread = threading.Thread(target=run, args=(self._run,), name="training_step", daemon=True)
        self._while_it_runs(thread.start)
        if not self._calls:
            raise _never(model)
        self.call = self._calls[0]

    def go_on(self, answer: Callable[[Call], Any]) -> Any:
        """Answer the step's call, let the step continue, and return its result. `answer`: computes the call's result;
        it runs in the step's thread. ValueError: the step called the model again."""
        self._while_it_runs(lambda: self._proceed(answer))
        return self._result

    def end(self) -> None:
        """End the step's thread: an exception that is no `Exception` leaves its call."""
        if self._answer is None:
            self._proceed(_reach)

    def _proceed(self, answer: Callable[[Call], Any]) -> None:
        self._answer = answer
        self._going.release()

    def _while_it_runs(self, begin: Callable[[], None]) -> None:
        """Let the step's thread run until its call of the model or its end."""
        with answering(self._model, self._wait):
            begin()
            self._paused.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._modes.entered():
                self._result = self._step()
        except _Reached:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._paused.release()

    def _wait(self, call: Call) -> Any:
        if self._calls:
            raise ValueError(
                f"training_step called {type(self._model.module).__name__} twice: a token pipeline runs one call per "
                "step; join both inputs in one batch, or use another strategy"
            )
        self._calls.append(call)
        self._paused.release()
        self._going.acquire()
        assert self._answer is not None
        return self._answer(call)


def _reach(call: Call) -> Any:
    raise _Reached(call)


def _never(model: Pipelined) -> ValueError:
    return ValueError(
        f"training_step returned without calling {type(model.module).__name__}: under a token pipeline it must "
        "call the model itself (not a part of it) exactly once"
    )
