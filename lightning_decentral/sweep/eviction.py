"""Eviction (swapping): what a training keeps on its device, taken to the host and back without anybody noticing."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute import cuda


class Residence:
    """The storages of one training on one device: of parameters, their gradients, buffers, optimizer state."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        # What lies on another device (the step counters of some optimizers) stays where it is.
        self._module, self._optimizers, self._device = module, optimizers, device
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device at this moment; 0 while it is away."""
        return sum(storage.nbytes() for storage in self._storages())

    def leave(self) -> None:
        """Move every storage to the host, its memory on the device free for other processes."""
        if self._away:
            return
        for storage in self._storages():
            there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            # Pinned memory makes both ways a copy at the full rate of the bus; a processor's own memory needs none.
            host = cuda.host_bytes(storage.nbytes(), self._device)
            self._away.append((storage, host.copy_(there)))
        # Storages are emptied, not tensors replaced: parameters, views of flat buffers, tied weights and what the
        # optimizer refers to stay the very objects that they were.
        for storage, _ in self._away:
            storage.resize_(0)
        if self._device.type == "cuda":
            cuda.give_back()  # the allocator would keep it from other processes

    def enter(self) -> None:
        """Move every storage back, with the same bytes."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            there.copy_(host, non_blocking=True)
        if self._away and self._device.type == "cuda":
            cuda.synchronize(self._device)  # the host's copies, still read until here, are dropped next
        self._away.clear()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Storages on the device, each once, though several tensors view it."""
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = tree_leaves([dict(optimizer.state) for optimizer in self._optimizers])
        tensors = [*parameters, *gradients, *self._module.buffers(), *(leaf for leaf in state if torch.is_tensor(leaf))]
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == self._device}
        return [storage for storage in found.values() if storage.nbytes()]
