"""Profiling an offloaded step: seconds, peak bytes and bytes sent of every visit to a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lightning_decentral.spilled.compute.transfer import OffloadDevice
from lightning_decentral.spilled.plan.footprint import BlockFootprint, Footprint, Visit


class Unmeasured:
    """A step that isn't measured: the calls of `Log` without effect."""

    checks = False

    def close(self) -> None:
        """A visit ends."""

    def open(self, block: int, backward: bool, loaded_bytes: int, came_bytes: int) -> None:
        """A visit begins, with so many bytes of parameters on the device, of which some just came."""

    def sends(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are sent to the host."""

    def ran_again(self) -> None:
        """The forward of a visit of a backward has run."""


class Log:
    """Measures a step's visits while every block is loaded alone, and all copying is waited for.

    A visit lasts until the next one begins. Its `other_bytes` are the device's peak less the parameters loaded for it.

    Args:
        checks: whether blocks are compared with their second run.
    """

    def __init__(self, device: OffloadDevice, checks: bool) -> None:
        self.checks = checks
        self.visits: list[Visit] = []
        self.opening_bytes = 0
        self._device = device
        self._load_bytes, self._load_seconds = 0, 0.0
        self._open: Visit | None = None  # one that hasn't ended
        self._began = self._closed = 0.0
        self._loaded_bytes = self._before_bytes = 0  # when it began: of parameters, and of everything
        device.forget_peak()

    def close(self) -> None:
        self._closed = self._device.now()
        peak, visit = self._device.peak_bytes(), self._open  # the peak since `open`
        if visit is None:
            self.opening_bytes = max(peak, self.opening_bytes)
            return
        seconds, other = self._closed - self._began, peak - self._loaded_bytes
        self.visits.append(replace(visit, seconds=seconds, other_bytes=other))
        self._open = None

    def open(self, block: int, backward: bool, loaded_bytes: int, came_bytes: int) -> None:
        self._began = self._device.now()
        self._load_bytes += came_bytes  # over all visits: the rate of the link is one number
        # Since `close`, loads alone were waited for.
        self._load_seconds += self._began - self._closed if came_bytes else 0.0
        self._device.forget_peak()
        self._loaded_bytes, self._before_bytes = loaded_bytes, self._device.present_bytes()
        self._open = Visit(block, backward, 0.0, 0)

    def sends(self, tensors: Sequence[Tensor]) -> None:
        if self._open is not None:
            sent_bytes = self._open.sent_bytes + sum(t.numel() * t.element_size() for t in tensors)
            self._open = replace(self._open, sent_bytes=sent_bytes)

    def ran_again(self) -> None:
        if self._open is not None:
            again_seconds, saved_bytes = self._device.now() - self._began, self._device.present_bytes()
            saved_bytes -= self._before_bytes
            self._open = replace(self._open, again_seconds=again_seconds, saved_bytes=saved_bytes)

    def footprint(self, blocks: Sequence[BlockFootprint]) -> Footprint:
        rate = self._load_bytes / max(self._load_seconds, 1e-9)
        # Each backward gets back the bytes of inputs that the forward it belongs to had sent.
        visits, sent = self.visits, dict[int, list[int]]()
        for i, visit in enumerate(visits):
            if visit.backward:
                visits[i] = replace(visit, awaited_bytes=(sent.get(visit.block) or [0]).pop())
            else:
                sent.setdefault(visit.block, []).append(visit.sent_bytes)
        return Footprint(tuple(blocks), tuple(visits), self.opening_bytes, max(rate, 1.0), self._device.overlaps)


def joined(first: Footprint, second: Footprint) -> Footprint | None:
    """The second step's seconds, and the bytes of whichever step had more; None where they went different ways."""
    if [(v.block, v.backward) for v in first.visits] != [(v.block, v.backward) for v in second.visits]:
        return None
    pairs = zip(first.visits, second.visits, strict=True)
    # On the CPU a second step counts nothing but copies.
    visits = tuple(
        replace(w, other_bytes=max(v.other_bytes, w.other_bytes), saved_bytes=v.saved_bytes) for v, w in pairs
    )
    return replace(second, visits=visits, opening_bytes=max(first.opening_bytes, second.opening_bytes))
