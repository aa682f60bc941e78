"""Numbers that a device computed and the host reads, without making the device's queue empty first."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Arriving:
    """A small tensor on its way to the host.

    One of the host is there at once. From a device it is copied to pinned memory behind what the current stream has to
    do, and `read` waits for that copy alone, not for what was queued after it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = not tensor.is_cuda
        self._tensor = tensor
        if tensor.is_cuda:
            self._source = tensor  # its memory is not to be used again before the copy is done
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """On the host."""
        if not self.on_host:
            self._arrived.synchronize()
        return self._tensor


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """What is queued inside has a stream of its own on a CUDA device, and doesn't wait for the other's work."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
