"""How a device runs the steps of its worker.

Short: a device that is a worker by itself just runs them. Where there are several they work together in them, and say
how (`IslandMember`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class DeviceSteps:
    """Of a device that is a worker by itself."""

    def train(self, module: Any, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        """Run a training step; `redirect` runs it inside the module's own call, where hooks of `forward` see it."""
        return step()

    def evaluate(self, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        return step()

    def averaging(self, closure: Callable[[], Any]) -> Any:
        """Run what computes the gradients of one update."""
        return closure()

    def before(self, loss: Any) -> None:
        """The backward of this loss follows."""

    def after(self) -> None:
        """A backward has ended."""

    def updated(self, optimizer: Any) -> None:
        """An update was due, which a loss scaler may have skipped."""

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Gradients are only accumulated meanwhile."""
        yield

    def explain(self, error: BaseException) -> None:
        """Warn with the remedy where an error comes of how this device holds the model."""

    def rest(self) -> None:
        """Before somebody looks at the parameters."""
