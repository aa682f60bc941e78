"""Keeps replicas equal (compressed all-reduce, partial backprop) in addition to the average of gradients.

Trainers use this once, Fabric loops once for each module."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.wire.gradients import Average, parts
from lightning_decentral.shared.wire.meeting.comparison import MakeLayouts, TrainedLayout, TrainingComparison
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport


class RunningBuffers:
    """Broadcasts worker 0's buffers that change (running statistics), as DDP broadcasts every buffer."""

    def __init__(self, module: nn.Module, over: Transport) -> None:
        self._module, self._over = module, over  # a transport used for buffers alone
        self._names: list[str] = []  # buffers that are broadcast, as they change
        self._before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._watched: list[tuple[dict[str, Tensor | None], str, Tensor, int]] = []
        self._known = len(self._before)  # buffers of the module, so that a new one is noticed
        self._watch()

    def changed(self) -> bool:
        """Return whether a buffer that isn't shared has changed here since the last check. No communication."""
        news = any(own.get(key) is not tensor or _version(tensor) != was for own, key, tensor, was in self._watched)
        return news or self._known != len(self._before) + len(self._names)

    @torch.no_grad()
    def share(self, look: bool) -> None:
        """Broadcast the shared buffers. Collective. With `look`, find first which more have changed, or are new.
        RuntimeError: on all workers, where only some workers have a new buffer."""
        # To walk through all modules takes longer than many a model's gradients take to be averaged.
        buffers = dict(self._module.named_buffers()) if look or self._names else {}
        new: list[str] = []
        if look:
            kept = {n: before for n, before in self._before.items() if n in buffers}
            changed = [n for n, before in kept.items() if not _same(buffers[n], before)]
            new = [n for n in buffers if n not in self._before and n not in self._names]
            rows = gather_objects(self._over, (changed, new))
            if any(others != new for _, others in rows):
                some = next(name for _, row in rows for name in row if not all(name in other for _, other in rows))
                without = next(worker for worker, (_, row) in enumerate(rows) if some not in row)
                raise RuntimeError(
                    f"worker {without} has no buffer {some}, but others have: register buffers on every worker alike"
                )
            found = {name for row, _ in rows for name in row} | set(self._names)
            # Buffers that never change (masks, position tables) aren't sent: most of the bytes of some models.
            self._names = [name for name in buffers if name in found]
            self._before = {n: before for n, before in kept.items() if n not in found}
        shared = [buffers[name] for name in (*self._names, *new) if name in buffers]
        for kind in dict.fromkeys((t.dtype, t.device) for t in shared):
            members = [t for t in shared if (t.dtype, t.device) == kind]
            flat = torch.cat([t.reshape(-1) for t in members])  # (elements of all buffers of a type,)
            self._over.broadcast(flat).wait()
            torch._foreach_copy_(members, list(parts(flat, members)))
        if look:
            self._before |= {name: buffers[name].clone() for name in new}
            self._watch()
        if buffers:
            self._known = len(buffers)

    def _watch(self) -> None:
        """Make `changed` look at the buffers that aren't shared from now on."""
        self._watched = [
            (module._buffers, key, buffer, _version(buffer))
            for prefix, module in self._module.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and (f"{prefix}.{key}" if prefix else key) not in self._names
        ]


def _same(a: Tensor, b: Tensor) -> bool:  # NaN equal to NaN
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _version(tensor: Tensor) -> int:
    """Return the number of writes in place; -1 for a tensor from inference mode, where torch doesn't count them."""
    return -1 if tensor.is_inference() else tensor._version


Optimizers = Callable[[], Sequence[Optimizer]]


class EqualReplicas:
    """Shares running buffers, counts updates and compares trained parameters, from `begin` to `close`."""

    def __init__(self) -> None:
        self.updates: int | None = None  # since `begin`; None outside of training, and in a parent process
        self._buffers: RunningBuffers | None = None
        self._layouts = TrainingComparison()
        self._average: Average | None = None
        self._period, self._sharing = -1, False  # whether this worker waits in `share`

    def begin(self, module: nn.Module, over: Transport | None, layouts: MakeLayouts, optimizers: Optimizers) -> None:
        """Begin to train. Collective. `over`: a group for buffers alone; None: there is a single worker. `optimizers`
        returns the present optimizers whenever it is called."""
        self.updates, self._period = 0, -1
        self._buffers = None if over is None else RunningBuffers(module, over)
        self._layouts = layouts(TrainedLayout(module.named_parameters, optimizers))

    def join(self, average: Average) -> None:
        """Use this average of gradients from now on."""
        assert self._buffers is not None
        average.news, average.layouts, self._average = self._buffers.changed, self._layouts, average

    def close(self) -> None:
        self._layouts.close()
        self.updates, self._buffers, self._layouts, self._average = None, None, TrainingComparison(), None

    def replaced(self) -> None:
        """Compare after the optimizers were replaced. RuntimeError: on another worker they weren't."""
        self._layouts.changed()

    def rounds(self) -> list[int]:
        """Return the number of updates so far, in a list; an empty list outside of training."""
        return [] if self.updates is None else [self.updates]

    def wanted(self) -> list[int]:
        """Return how many updates the others must take before this worker can continue. From any thread."""
        # In this order: an update that ends meanwhile is then counted once, never twice.
        updates = self.rounds()
        return [n + (self._sharing or (self._average is not None and self._average.under_way)) for n in updates]

    def advance(self, period: int) -> None:
        """Share buffers and count an update. Collective. A new value of `period` (an epoch, say) makes it look which
        more buffers have changed."""
        assert self.updates is not None
        # Not in each step: comparing all buffers takes long.
        look, self._period = period != self._period, period
        if self._buffers is not None:
            self._sharing = True  # a worker that waits in `share` waits for this update, not for the next one
            self._buffers.share((self._average is not None and self._average.any_news()) or look)
            self._sharing = False
        self.updates += 1
