"""Functions of libraries, replaced for a while wherever they were imported to. Short: pipelines and islands use it.

`from torch.nn.utils import get_total_norm` holds the function itself: its code is replaced, not a module's name for it.
"""

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

NAME = "_redirected_by_lightning_decentral"


def _stub(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of the function whose code it takes the place of."""
    return _redirected_by_lightning_decentral(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class Redirected:
    """Until `close`, whoever calls the function calls `by(original, *args, **kwargs)`.

    Args:
        function: a plain one, or one that a decorator wraps; no other of its module is redirected meanwhile.
    """

    def __init__(self, function: Callable[..., Any], by: Callable[..., Any]) -> None:
        target: Any = inspect.unwrap(function)
        assert NAME not in target.__globals__, "one function of a module at a time"
        self._target: Any = target
        self._code: CodeType = target.__code__
        self._defaults, self._keywords = target.__defaults__, target.__kwdefaults__
        original = FunctionType(self._code, target.__globals__, target.__name__, self._defaults, target.__closure__)
        original.__kwdefaults__ = self._keywords
        target.__globals__[NAME] = lambda *args, **kwargs: by(original, *args, **kwargs)
        target.__code__, target.__defaults__, target.__kwdefaults__ = _stub.__code__, None, None

    def close(self) -> None:
        """The function is itself again."""
        target = self._target
        target.__code__, target.__defaults__, target.__kwdefaults__ = self._code, self._defaults, self._keywords
        del target.__globals__[NAME]
