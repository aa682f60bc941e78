"""Host-device copies for a CUDA device, or for the CPU as a stand-in, whose bytes are counted (`Ledger`)."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute import cuda

DEVICE, HOST = "device", "host"


class Ledger:
    """Ledger of live storages: where each is, and its bytes; those on the device now, and most since `forget_peak`."""

    def __init__(self) -> None:
        self.present_bytes = self.peak_bytes = 0
        self._living: dict[int, tuple[str, int, Any]] = {}  # by storage: (where, bytes, weak reference)

    def add(self, tensors: Iterable[Any], where: str) -> None:
        """Record that these tensors are at `where`, whatever was recorded before."""
        for tensor in tensors:
            if _counted(tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._strike(key)
                self._living[key] = where, size, weakref.ref(storage, partial(self._strike, key))
                self._change(where, size)

    def where(self, tensor: Tensor) -> str | None:
        """Place of the tensor's storage; None if it wasn't recorded."""
        entry = self._living.get(tensor.untyped_storage()._cdata)
        return entry and entry[0]

    def forget_peak(self) -> None:
        """Reset the peak to the present bytes."""
        self.peak_bytes = self.present_bytes

    def _strike(self, key: int, _dead: Any = None) -> None:
        where, size, _ = self._living.pop(key, (HOST, 0, None))
        self._change(where, -size)

    def _change(self, where: str, size: int) -> None:
        self.present_bytes += size if where == DEVICE else 0
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)


class Counting(TorchDispatchMode):
    """Mode that records the results of operations in a ledger. `absent`: names of parameters by the storage of their
    stand-ins, while they aren't on the device: computing with one is an error."""

    def __init__(self, ledger: Ledger, absent: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._absent = ledger, absent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _counted(leaf)]
        # Views and in-place operations make no new bytes.
        old = {tensor.untyped_storage()._cdata for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if _counted(leaf) and leaf.untyped_storage()._cdata not in old]
        if made:
            if wrong := [self._absent[key] for key in old if key in self._absent]:
                raise ValueError(
                    f"parameter {wrong[0]} is used outside of a call of its block, when it isn't on the "
                    f"device: give resident=[{wrong[0]!r}] to keep it there during the whole step"
                )
            # As on a real device: a result of host tensors only is on the host, any other result on the device.
            on_host = bool(given) and all(self._ledger.where(tensor) == HOST for tensor in given)
            self._ledger.add(made, HOST if on_host else DEVICE)
        return result


def _counted(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided  # sparse tensors have no storage to ask


class Copies:
    """Copies on their way to the device, or to the host, and what they are made from, held until they are done."""

    def __init__(self, copies: list[Tensor], event: cuda.Event | None = None, held: Sequence[Tensor] = ()) -> None:
        self._copies, self._event = copies, event
        # Memory that is still read isn't freed; versions show whether it was written to meanwhile.
        self._held = [(tensor, tensor._version) for tensor in held]

    def ready(self) -> list[Tensor]:
        """Return the copies on the device; the current stream waits for them."""
        if self._event is not None:
            self._event.wait()
        return self._copies

    def land(self) -> list[Tensor]:
        """Return the copies on the host, which waits for them. ValueError: a source was changed meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        held, self._held = self._held, []  # from here on their memory may be reused
        if any(tensor._version != version for tensor, version in held):
            raise ValueError(
                "the input of a block was changed in place after the block ran, before its copy had reached the host: "
                "use an operation that makes a new tensor"
            )
        return self._copies


class OffloadDevice:
    """Device that computes blocks, with copies to and from it: parameters live on the host.

    This class uses the CPU as a stand-in. Its bytes, in `ledger`, are those of the copies, and of operations' results
    while a `Counting` into it is active."""

    overlaps: ClassVar[bool] = False  # whether the device copies while it computes

    def __init__(self, place: torch.device = torch.device("cpu")) -> None:  # noqa: B008  # a value
        self.place, self.ledger = place, Ledger()

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return the same values in host memory from which the device copies asynchronously."""
        return tensor

    def fetch(self, hosts: Sequence[Tensor]) -> Copies:
        copies = [host.detach().clone() for host in hosts]  # real copies: computing with the wrong ones is found
        self.ledger.add(copies, DEVICE)  # as on a real device
        return Copies(copies)

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Copies:
        """Start to copy tensors to the host, with the strides of `like`."""
        copies = [
            torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor.detach())
            if tensor.layout is torch.strided
            else tensor.detach().clone()
            for tensor, other in zip(tensors, like or tensors, strict=True)
        ]
        self.ledger.add(copies, HOST)
        return Copies(copies)

    def put(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Start to copy into these tensors of the host, on the computing stream, after what makes the sources; `settle`
        waits."""
        with torch.no_grad():
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)

    def note(self, hosts: Sequence[Any], present: Sequence[Any]) -> None:
        """Record tensors on the host and on the device before a step, if bytes are counted; no others count."""
        self.ledger.add(hosts, HOST)
        self.ledger.add(present, DEVICE)

    def settle(self) -> None:
        """Wait until the device has computed all its work; on the CPU calls return only then."""

    def present_bytes(self) -> int:
        """Bytes on the device now."""
        return self.ledger.present_bytes

    def peak_bytes(self) -> int:
        """Maximum bytes on the device since `forget_peak`."""
        return self.ledger.peak_bytes

    def forget_peak(self) -> None:
        """Reset the peak to the present bytes."""
        self.ledger.forget_peak()

    def now(self) -> float:
        """Seconds by the clock, after the device has computed all its work."""
        self.settle()
        return perf_counter()

    def random_state(self) -> list[Tensor]:
        """States of the random number generators that computing on the device uses."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])


class Cuda(OffloadDevice):
    """CUDA device with one stream for each direction; nothing may be freed before `settle` has waited for its users."""

    overlaps: ClassVar[bool] = True

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self._in, self._out = cuda.Stream(place), cuda.Stream(place)  # both directions at once over the bus

    def pinned(self, tensor: Tensor) -> Tensor:
        return cuda.pinned(tensor)

    def fetch(self, hosts: Sequence[Tensor]) -> Copies:
        # Allocated on the computing stream, as all memory of the device, so that there is one pool.
        copies = [torch.empty_like(host, device=self.place, requires_grad=False) for host in hosts]
        # After whatever used that memory before.
        self._in.wait_stream(cuda.current_stream(self.place))
        with cuda.on(self._in), torch.no_grad():
            for copy, host in zip(copies, hosts, strict=True):
                copy.copy_(host, non_blocking=True)
        return Copies(copies, self._in.record_event())

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Copies:
        self._out.wait_stream(cuda.current_stream(self.place))  # after the work that computes the sources
        with cuda.on(self._out), torch.no_grad():
            copies = [
                cuda.host_like(other, self.place, tensor.dtype).copy_(tensor, non_blocking=True)
                if tensor.layout is torch.strided
                else tensor.to("cpu")
                for tensor, other in zip(tensors, like or tensors, strict=True)
            ]
        return Copies(copies, self._out.record_event(), tensors)

    def note(self, hosts: Sequence[Any], present: Sequence[Any]) -> None:
        """Do nothing: the allocator counts bytes."""

    def settle(self) -> None:
        # Only the computing stream: copies to the host may still be on their way.
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
    return Cuda(place) if place.type == "cuda" else OffloadDevice()
