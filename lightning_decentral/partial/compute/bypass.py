"""Bypassed parameters: gradients flow through what they compute, none is made for them, nothing is kept to make one.

Short, and by itself: the one place that touches `requires_grad` within a step.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


class Bypass:
    """No parameter requires a gradient from `begin` to `end`, of those that do otherwise.

    That long, and not for the forward only: activation checkpointing runs the forward again in the backward, and must
    find what it found.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """These from now on, no others."""
        self.end()
        self._parameters = [p for p in parameters if p.requires_grad]
        self._require(False)

    def end(self) -> None:
        """All as the user set them."""
        self._require(True)
        self._parameters = []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """As the user set them for a while."""
        self._require(True)
        try:
            yield
        finally:
            self._require(False)

    def _require(self, gradient: bool) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(gradient)
