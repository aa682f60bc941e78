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
        self._watched: list[tuple[dict[str, Tensor | None], str, Tensor, int]] = []
        self._known = len(self._before)
        self._watch()

    def changed(self) -> bool:
        """Return whether an unshared buffer has changed on this worker since the last look. No communication."""
        news = any(of.get(key) is not tensor or _version(tensor) != was for of, key, tensor, was in self._watched)
        return news or self._known != len(self._before) + len(self._names)

    def share(self, look: bool) -> None:
        """Collective. With `look`, find out first which further ones have changed, or come, on some worker.

        Raises:
            RuntimeError: a buffer has come on some workers alone; on all.
        """
        # To walk through all modules takes longer than many a model's gradients take to be averaged.
        buffers = dict(self._module.named_buffers()) if look or self._names else {}
        new: list[str] = []
        if look:
            changed = [n for n, before in self._before.items() if n in buffers and not _same(buffers[n], before)]
            new = [n for n in buffers if n not in self._before and n not in self._names]
            rows = gather_objects(self._over, (changed, new))
            if any(others != new for _, others in rows):
                raise _uneven([others for _, others in rows])
            found = {name for row, _ in rows for name in row} | set(self._names)
            # What never changes (masks, tables of positions) isn't sent: most of the bytes of some models.
            self._names = [name for name in buffers if name in found]
            self._before = {n: before for n, before in self._before.items() if n in buffers and n not in found}
        self._broadcast([buffers[name] for name in (*self._names, *new) if name in buffers])
        if look:
            self._before |= {name: buffers[name].clone() for name in new}
            self._watch()
        if buffers:
            self._known = len(buffers)

    def _watch(self) -> None:
        """Make `changed` look at those that aren't shared from now on."""
        self._watched = [
            (module._buffers, key, buffer, _version(buffer))
            for prefix, module in self._module.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and (f"{prefix}.{key}" if prefix else key) not in self._names
        ]

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


def _version(tensor: Tensor) -> int:
    """Counts writes in place; of a tensor that was made in inference mode nobody counts them."""
    return -1 if tensor.is_inference() else tensor._version


def _uneven(rows: Sequence[Sequence[str]]) -> RuntimeError:
    some = next(name for row in rows for name in row if not all(name in other for other in rows))
    without = next(worker for worker, row in enumerate(rows) if some not in row)
    return RuntimeError(f"worker {without} has no buffer {some}, others have: register buffers on every worker alike")
