"""What each block of a chain costs in one forward: seconds, bytes saved for the backward, parameters' bytes."""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.partial.plan.cost import SegmentCost

TIMED_RUNS = 3


class _Meter:
    """Charges seconds and saved storages to the piece that the forward is in: 0 before the first mark."""

    def __init__(self, root: nn.Module, marks: Sequence[nn.Module], device: torch.device) -> None:
        self.order: list[int] = []
        self.saved: dict[int, tuple[int, int]] = {}
        self._times: list[float] = []
        self._device = device
        self._parameters = {p.untyped_storage().data_ptr() for p in root.parameters()}
        self._hooks = [m.register_forward_pre_hook(self._begin(i)) for i, m in enumerate(marks, start=1)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def tick(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(perf_counter())

    def _begin(self, piece: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.order.append(piece)
            self.tick()

        return hook

    def pack(self, tensor: Tensor) -> Tensor:
        """Charged to the highest piece that needs it: what a cut below that piece still keeps."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.saved[storage.data_ptr()] = self.order[-1] if self.order else 0, storage.nbytes()
        return tensor

    def saved_bytes(self) -> list[int]:
        pieces = range(len(self._times) - 1)
        return [sum(size for owner, size in self.saved.values() if owner == piece) for piece in pieces]

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self._times[:-1], self._times[1:], strict=True)]


def measure(
    root: nn.Module, marks: Sequence[str], parameter_bytes: Sequence[int], run: Callable[[], Tensor]
) -> list[SegmentCost]:
    """One cost for each piece: what runs before the first mark (a module's input), between two, and behind the last.

    Runs the forward a few times; each piece's seconds are its shortest. Storages that several operations save count
    once, for the highest piece that needs them; parameters, which are there anyway, don't.

    Raises:
        ValueError: the forward doesn't pass the marks in this order, each once.
    """
    meters = [_metered(root, marks, run) for _ in range(1 + TIMED_RUNS)]
    seconds = [min(times) for times in zip(*(meter.seconds() for meter in meters[1:]), strict=True)]
    rows = zip(seconds, meters[-1].saved_bytes(), parameter_bytes, strict=True)
    return [SegmentCost(shortest, saved, size) for shortest, saved, size in rows]


def _metered(root: nn.Module, marks: Sequence[str], run: Callable[[], Tensor]) -> _Meter:
    """One forward."""
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    meter = _Meter(root, [root.get_submodule(name) for name in marks], device)
    try:
        meter.tick()
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            loss = run()  # kept alive, so that no storage is freed and another counted in its place
        meter.tick()
    finally:
        meter.remove()
    if meter.order != list(range(1, len(marks) + 1)):
        passed = ", ".join(marks[i - 1] for i in meter.order) or "none of them"
        raise ValueError(f"the forward doesn't pass {', '.join(marks)} in this order, each once: it passes {passed}")
    del loss
    return meter


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Of distinct parameters."""
    return sum(p.numel() * p.element_size() for p in dict.fromkeys(parameters))
