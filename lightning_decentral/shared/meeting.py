"""Workers that find, hear and leave each other: the part of every strategy with several workers that knows no method.

A worker's place among the others is its `Attendance`; what it waits for is counted and named by its `Coordination`.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_decentral.shared.attendance import Attendance
from lightning_decentral.shared.coordination import Uncoordinated
from lightning_decentral.shared.registration import refuse_unknown
from lightning_decentral.shared.wire.objects import broadcast_world, gather_world
from lightning_decentral.shared.wire.transport import Wire, connect, connected

TIMEOUT = timedelta(minutes=5)

_left: list[Wire] = []
"""Groups of fits that an exception ended: destroying them would wait for the messages that are under way."""


class MeetingStrategy(DDPStrategy):
    """Lightning's collectives over workers that know of each other.

    Args:
        timeout: how long a worker waits for another, in set-up, in a step or anywhere, before it ends.
        **ddp: what DDPStrategy itself takes: cluster_environment, process_group_backend, start_method, ...

    Attributes:
        wire: the groups that every method needs; None before set-up, and for a single worker.
    """

    def __init__(self, *, timeout: timedelta = TIMEOUT, **ddp: Any) -> None:
        refuse_unknown(type(self), ddp)
        super().__init__(timeout=timeout, **ddp)
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}: {TIMEOUT} is the default")
        self.wire: Wire | None = None
        self._patience = timeout
        self._attendance = Attendance(self._trained)
        self._together = Uncoordinated()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """As DDPStrategy, at a meeting that says who is missing."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        place = self.root_device, self._patience, self.num_nodes == 1
        self._attendance.come(self.cluster_environment, self._process_group_backend, *place)
        self._attendance.join(self.global_rank, self.world_size)

    def join_groups(self) -> Wire | None:
        """The groups that every method needs, made where there are none; None for a single worker. Collective."""
        if self.wire is None and connected():
            self.wire = connect(
                self.root_device, self._patience, None, partial(self._attendance.await_all, self._patience)
            )
        return self.wire

    def _forward_signal(self, signum: int) -> None:
        if self.launcher is not None:
            self.launcher.kill(signum)

    def _trained(self) -> LightningModule | None:
        return self.lightning_module

    def _meet(self, call: Callable[[], Any]) -> Any:
        """Run what waits for other workers; for parts that are made before the fit's coordination."""
        return self._together.meet(call)

    # ---- Lightning's collectives ------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.alone:
            self._together.meet(lambda: super(MeetingStrategy, self).barrier(*args, **kwargs))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._together.meet(lambda: broadcast_world(obj, src))

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return self._together.meet(lambda: super(MeetingStrategy, self).reduce(tensor, group, reduce_op))

    def gather(self, value: Any) -> list[Any]:
        return self._together.meet(lambda: gather_world(value))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """[size, ...]: every worker's tensor."""
        if self.wire is None or sync_grads or group is not None:
            return self._together.meet(lambda: super(MeetingStrategy, self).all_gather(tensor, group, sync_grads))
        pending, rows = self.wire.world.all_gather(tensor.detach().contiguous())
        self._together.meet(pending.wait)
        return torch.stack(rows)

    @property
    def alone(self) -> bool:
        """An exception has taken this worker off the others' path: nothing collective may be called any more."""
        trainer = self._module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.interrupted and not self._together.agreed and connected()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not self._together.agreed:
            self._attendance.leave(exception)

    def _disconnect(self, alone: bool) -> None:
        """Give the groups back; where an exception left messages under way, the process does it when it ends."""
        if self.wire is not None and alone:
            _left.append(self.wire)  # else its groups would wait for the messages
        elif self.wire is not None:
            self.wire.close()
        self.wire = None
