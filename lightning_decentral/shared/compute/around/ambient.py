"""Modes of torch that belong to a thread (gradients, autocast, function modes, stream): taken here, entered there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_decentral.shared.compute import cuda


class Autocast:
    """Autocast modes of the host and of a device, as they are when this is made."""

    def __init__(self, place: torch.device) -> None:
        kinds = dict.fromkeys(("cpu", place.type))
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter the autocast modes as they were then."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            yield


class ThreadModes:
    """Modes of the thread that makes this (autocast, gradients), for another thread that goes on in its place."""

    def __init__(self, place: torch.device) -> None:
        self._autocast = Autocast(place)
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._functions, self._dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._stream = cuda.current_stream(place) if place.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes in the current thread."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(cuda.on(self._stream))  # its device, too
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            for mode in (*self._functions, *self._dispatches):
                stack.enter_context(mode)
            stack.enter_context(self._autocast.again())
            yield
