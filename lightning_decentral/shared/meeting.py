"""Workers that find, hear and leave each other: the part of every strategy with several workers that knows no method.

A worker's place among the others is its `Attendance`; what it waits for is counted and named by its `Coordination`.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_decentral.shared.coordination import Uncoordinated
from lightning_decentral.shared.registration import UnwrappedStrategy
from lightning_decentral.shared.wire.meeting.notices import Notices, Presence, new_board
from lightning_decentral.shared.wire.meeting.rendezvous import Meeting
from lightning_decentral.shared.wire.meeting.stopping import StopAgreement
from lightning_decentral.shared.wire.objects import broadcast_world, gather_world
from lightning_decentral.shared.wire.transport import Wire, connect, connected, own_connection

GOODBYE_SECONDS = 10.0
"""Worker 0, and the store with it, stays so long for the others to end, too."""

STAGES = {
    RunningStage.VALIDATING: "validation",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.TESTING: "the test",
    RunningStage.PREDICTING: "prediction",
}


class Attendance:
    """One worker's, of one strategy; a new meeting for each fit, validation, test.

    Args:
        module: what is trained, if there is a module yet.

    Attributes:
        ready: set-up is over.
        saving: a checkpoint is being written.
    """

    def __init__(self, module: Callable[[], LightningModule | None]) -> None:
        self._module = module
        self.ready = self.saving = False
        self._presence: Presence | None = None
        self._notices: Notices | None = None
        self._store: Any = None
        self._awaited = 0

    def phase(self) -> str:
        """What this worker does right now."""
        trainer = getattr(self._module(), "_trainer", None)
        if trainer is None or not self.ready:
            return "set-up"
        if self.saving:
            return "a checkpoint"
        return STAGES.get(trainer.state.stage, f"step {trainer.global_step + 1}")

    @staticmethod
    def come(
        environment: ClusterEnvironment,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        layout: tuple[int, int],
    ) -> None:
        """As Lightning starts the world, at a store that says who is missing."""
        settings: dict[str, Any] = {"timeout": timeout, "device_id": None if device.type == "cpu" else device}
        rank, size = environment.global_rank(), environment.world_size()
        if size > 1 and not connected():
            place = environment.main_address, environment.main_port
            settings["store"] = Meeting(*place, rank, size, timeout, _hosted(), layout).store()
        _init_dist_connection(environment, backend, **settings)

    def join(self, rank: int, size: int) -> None:
        """From now on the others see that this worker lives."""
        board = new_board()
        if connected():
            self._store = own_connection(board)
            self._notices = Notices(self._store, rank, size, _hosted())
            self._presence = Presence(self._notices, self.phase)

    def stop(self, timeout: timedelta) -> tuple[StopAgreement, Presence]:
        """A fit's agreement where to stop, and who looks after it."""
        assert self._notices is not None
        assert self._presence is not None
        notices = self._notices
        place = notices.rank, notices.size, timeout.total_seconds()
        return StopAgreement(self._store, notices.read, *place, self._presence.wake), self._presence

    def await_all(self, timeout: timedelta) -> None:
        """Return when all workers are here, too. PeerLost: one has ended, or didn't come in time."""
        if self._notices is not None:
            self._awaited += 1
            self._notices.await_all(f"await/{self._awaited}", timeout.total_seconds())

    def leave(self, error: BaseException) -> None:
        """Tell the others why this worker ends; what only says that it lost a peer is told why in place."""
        if self._presence is not None:
            self._presence.leave(error)

    def close(self, alone: bool) -> None:
        """The end of the meeting; unless an exception has taken this worker away, worker 0 waits for the others."""
        if self._presence is not None and self._notices is not None:
            self._presence.close()
            if not alone:
                with suppress(RuntimeError):  # the store is gone, as is whom there would be to wait for
                    self._say_goodbye(self._notices.rank, self._notices.size)
        self._presence = self._notices = self._store = None
        self.ready = self.saving = False

    def _say_goodbye(self, rank: int, size: int) -> None:
        self._store.set(f"gone/{rank}", "yes")
        keys, end = [f"gone/{other}" for other in range(size)], time.monotonic() + GOODBYE_SECONDS
        while rank == 0 and not self._store.check(keys) and time.monotonic() < end:
            time.sleep(0.005)


def _hosted() -> bool:
    """Whether torchrun's agent has the store, not worker 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


TIMEOUT = timedelta(minutes=5)


class MeetingStrategy(UnwrappedStrategy):
    """Lightning's collectives over workers that know of each other.

    Args:
        timeout: how long a worker waits for another, in set-up, in a step or anywhere, before it ends.
        **unwrapped: what `UnwrappedStrategy` names: cluster_environment, process_group_backend, start_method, ...

    Attributes:
        wire: the groups that every method needs; None before set-up, and for a single worker.
    """

    def __init__(self, *, timeout: timedelta = TIMEOUT, **unwrapped: Any) -> None:
        super().__init__(timeout=timeout, **unwrapped)
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
        place = self.root_device, self._patience, (self.num_nodes, self.num_processes)
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
        """Give the groups back; where an exception may have left messages under way, without waiting for them."""
        if self.wire is not None:
            (self.wire.abandon if alone else self.wire.close)()
        self.wire = None
