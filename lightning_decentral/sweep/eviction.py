"""Eviction (swapping): move a training's tensors from its device to the host and back, unnoticed by the training."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute import cuda


class Residence:
    """Storages of one training on one device: parameters, their gradients, buffers, optimizer state."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        # Tensors on another device (the step counters of some optimizers) stay where they are.
        self._module, self._optimizers, self._device = module, optimizers, device
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device now; 0 while the training is evicted."""
        return sum(storage.nbytes() for storage in self._storages())

    def leave(self) -> None:
        """Move every storage to the host and free its device memory for other processes."""
        if self._away:
            return
        for storage in self._storages():
            there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            # Pinned memory copies at the full rate of the bus both ways; for a CPU it isn't needed.
            host = cuda.host_bytes(storage.nbytes(), self._device)
            self._away.append((storage, host.copy_(there)))
        # Storages are emptied, tensors not replaced: parameters, views of flat buffers, tied weights and what the
        # optimizer refers to stay the same objects.
        for storage, _ in self._away:
            storage.resize_(0)
        if self._device.type == "cuda":
            cuda.give_back()  # else the allocator would keep the memory from other processes

    def enter(self) -> None:
        """Move every storage back to the device, with the same bytes."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            there.copy_(host, non_blocking=True)
        if self._away and self._device.type == "cuda":
            cuda.synchronize(self._device)  # the host's copies, read until here, are freed next
        self._away.clear()

    def _storages(self) -> list[torch.UntypedStorage]:
        """List the storages on the device, each once, though several tensors view it."""
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = tree_leaves([dict(optimizer.state) for optimizer in self._optimizers])
        tensors = [*parameters, *gradients, *self._module.buffers(), *(leaf for leaf in state if torch.is_tensor(leaf))]
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == self._device}
        return [storage for storage in found.values() if storage.nbytes()]
