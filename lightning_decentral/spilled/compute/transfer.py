"""Host-device copies: the device that computes is a CUDA device, or a stand-in on the CPU that counts bytes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute import cuda
from lightning_decentral.spilled.compute.memory_ledger import DEVICE, HOST, Ledger


class PendingCopies:
    """Copies on their way to the device."""

    def __init__(self, copies: list[Tensor], event: cuda.Event | None = None) -> None:
        self._copies, self._event = copies, event

    def ready(self) -> list[Tensor]:
        """The copies; the current stream waits for them."""
        if self._event is not None:
            self._event.wait()
        return self._copies


class Leaving:
    """Copies on their way to the host."""

    def __init__(self, copies: list[Tensor], held: list[Tensor], event: cuda.Event | None = None) -> None:
        self._copies, self._event = copies, event
        # Memory that is still read isn't given back; versions show whether it was written to meanwhile.
        self._held = [(tensor, tensor._version) for tensor in held]

    def land(self) -> list[Tensor]:
        """The copies; the host waits for them. ValueError: what was to be copied was changed meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        held, self._held = self._held, []  # from here on their memory may be used again
        if any(tensor._version != version for tensor, version in held):
            raise ValueError(
                "the input of a block was changed in place behind it, before its copy had reached the host: "
                "use an operation that makes a new tensor"
            )
        return self._copies


class OffloadDevice(ABC):
    """Device that blocks compute on, and whose copies come and go: parameters live on the host.

    Attributes:
        place: as torch calls it.
        ledger: of bytes, where nobody else counts them.
        overlaps: whether it copies while it computes.
    """

    place: torch.device
    ledger: Ledger
    overlaps: bool

    @abstractmethod
    def pinned(self, tensor: Tensor) -> Tensor:
        """The same values in host memory from which the device copies by itself."""

    @abstractmethod
    def fetch(self, hosts: Sequence[Tensor]) -> PendingCopies:
        """Start to copy to the device."""

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Leaving:
        """Start to copy to the host, with the strides of `like`."""

    def put(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Start to copy into these tensors of the host; `settle` waits. On the computing stream, behind what makes
        them."""
        with torch.no_grad():
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)

    def note(self, hosts: Sequence[Any], present: Sequence[Any]) -> None:
        """Record tensors on the host and on the device before a step, where bytes are counted; no others count."""
        self.ledger.add(hosts, HOST)
        self.ledger.add(present, DEVICE)

    @abstractmethod
    def settle(self) -> None:
        """The host waits until the device has computed all that it was asked for."""

    def present_bytes(self) -> int:
        """Bytes on the device now."""
        return self.ledger.present_bytes

    def peak_bytes(self) -> int:
        """The most since `forget_peak`."""
        return self.ledger.peak_bytes

    def forget_peak(self) -> None:
        """Begin again at what is present."""
        self.ledger.forget_peak()

    def now(self) -> float:
        """Seconds, once the device has computed all that it was asked for."""
        self.settle()
        return perf_counter()

    def random_state(self) -> list[Tensor]:
        """States of the random generators that computing on it draws from."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Go on drawing where `random_state` was taken."""
        torch.set_rng_state(state[0])


class CpuTransfer(OffloadDevice):
    """The CPU in the place of a device.

    Its bytes are those of the copies, and of what operations make while a `Counting` into its ledger is active.
    """

    overlaps = False

    def __init__(self) -> None:
        self.place, self.ledger = torch.device("cpu"), Ledger()

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, hosts: Sequence[Tensor]) -> PendingCopies:
        copies = [host.detach().clone() for host in hosts]  # real ones: computing with the wrong is found
        self.ledger.add(copies, DEVICE)  # as if it were one
        return PendingCopies(copies)

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Leaving:
        copies = [
            torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor.detach())
            if tensor.layout is torch.strided
            else tensor.detach().clone()
            for tensor, other in zip(tensors, like or tensors, strict=True)
        ]
        self.ledger.add(copies, HOST)
        return Leaving(copies, [])

    def settle(self) -> None:
        """Return at once: here calls return when they are done."""


class Cuda(OffloadDevice):
    """One stream for each way; nothing may be given back before `settle` has seen that nobody uses it any more."""

    overlaps = True

    def __init__(self, place: torch.device) -> None:
        self.place, self.ledger = place, Ledger()
        self._in, self._out = cuda.Stream(place), cuda.Stream(place)  # both ways at once over the bus

    def pinned(self, tensor: Tensor) -> Tensor:
        return cuda.pinned(tensor)

    def fetch(self, hosts: Sequence[Tensor]) -> PendingCopies:
        # Made on the computing stream, as all memory of the device, so that there is one pool of it.
        copies = [torch.empty_like(host, device=self.place, requires_grad=False) for host in hosts]
        # Behind whatever used that memory before.
        self._in.wait_stream(cuda.current_stream(self.place))
        with cuda.on(self._in), torch.no_grad():
            for copy, host in zip(copies, hosts, strict=True):
                copy.copy_(host, non_blocking=True)
        return PendingCopies(copies, self._in.record_event())

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Leaving:
        self._out.wait_stream(cuda.current_stream(self.place))  # behind what makes them
        with cuda.on(self._out), torch.no_grad():
            copies = [
                cuda.host_like(other, self.place, tensor.dtype).copy_(tensor, non_blocking=True)
                if tensor.layout is torch.strided
                else tensor.to("cpu")
                for tensor, other in zip(tensors, like or tensors, strict=True)
            ]
        return Leaving(copies, list(tensors), self._out.record_event())

    def note(self, hosts: Sequence[Any], present: Sequence[Any]) -> None:
        """The allocator knows."""

    def settle(self) -> None:
        # The computing stream alone: copies to the host may still be on their way.
        cuda.current_stream(self.place).synchronize()

    def present_bytes(self) -> int:
        return cuda.present_bytes(self.place)

    def peak_bytes(self) -> int:
        return cuda.peak_bytes(self.place)

    def forget_peak(self) -> None:
        cuda.forget_peak(self.place)

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), cuda.random_state(self.place)]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        cuda.set_random_state(state[1], self.place)


def device_of(place: torch.device) -> OffloadDevice:
    return Cuda(place) if place.type == "cuda" else CpuTransfer()
