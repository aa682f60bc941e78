"""Running statistics of replicas that stay equal (BatchNorm's): worker 0's buffers for all, after each update.

Short, and a module of its own: two methods with equal replicas use it, and neither may import the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_decentral.shared.wire.gradients import parts
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport


class RunningBuffers:
    """Worker 0's buffers that change (running statistics) for all, as DDP does it with every buffer.

    Args:
        over: a transport of its own.
    """

    def __init__(self, module: nn.Module, over: Transport) -> None:
        self._module, self._over = module, over
        self._names: list[str] = []
        self._before = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def share(self, look: bool) -> None:
        """Collective. With `look`, find out first which further ones have changed on some worker."""
        # To walk through all modules takes longer than many a model's gradients take to be averaged.
        buffers = dict(self._module.named_buffers()) if look or self._names else {}
        if look:
            changed = [n for n, before in self._before.items() if n in buffers and not _same(buffers[n], before)]
            found = {name for row in gather_objects(self._over, changed) for name in row} | set(self._names)
            # What never changes (masks, tables of positions) isn't sent: most of the bytes of some models.
            self._names = [name for name in buffers if name in found]
            self._before = {name: before for name, before in self._before.items() if name not in found}
        self._broadcast([buffers[name] for name in self._names if name in buffers])

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for dtype, device in dict.fromkeys((t.dtype, t.device) for t in tensors):
            members = [t for t in tensors if (t.dtype, t.device) == (dtype, device)]
            flat = torch.cat([t.reshape(-1) for t in members])
            self._over.broadcast(flat).wait()
            torch._foreach_copy_(members, list(parts(flat, members)))


def _same(a: Tensor, b: Tensor) -> bool:
    """The same bits or both not a number."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
