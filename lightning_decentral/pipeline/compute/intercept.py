"""Interception of a module's forward while somebody else's step runs: the call is read, the answer given later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_decentral.pipeline.compute.model import Call, Pipelined


class _Reached(BaseException):
    """Ends a step at its call of the model; no `except Exception` of a user's catches it."""

    def __init__(self, call: Call) -> None:
        self.call = call


@contextmanager
def answering(model: Pipelined, answer: Callable[[Call], Any]) -> Iterator[None]:
    """Within, a call of the model is read and returns `answer(call)`."""
    module: Any = model.module
    module.forward = lambda *args, **kwargs: answer(model.read(args, kwargs))
    try:
        yield
    finally:
        del module.forward  # the class's own again


def called(model: Pipelined, step: Callable[[], Any]) -> Call:
    """What `step` asks of the model; it isn't run any further.

    Raises:
        ValueError: it returned without a call.
    """

    def reach(call: Call) -> Any:
        raise _Reached(call)

    try:
        with answering(model, reach):
            step()
    except _Reached as reached:
        return reached.call
    raise ValueError(
        f"training_step returned without calling {type(model.module).__name__}: under a token pipeline it must "
        "call the model itself (not a part of it) exactly once"
    )


class Once:
    """Answers the first call and refuses a second."""

    def __init__(self, answer: Callable[[Call], Any], name: str) -> None:
        self._answer, self._name, self._calls = answer, name, 0

    def __call__(self, call: Call) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise ValueError(
                f"training_step called {self._name} twice: a token pipeline runs one call per step; "
                "join both inputs in one batch, or use another strategy"
            )
        return self._answer(call)
