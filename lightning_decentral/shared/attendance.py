"""A worker among the others from set-up to teardown: where they meet, what each says when it ends, where all stop."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage

from lightning_decentral.shared.wire.notices import Notices, Presence
from lightning_decentral.shared.wire.rendezvous import Meeting
from lightning_decentral.shared.wire.stopping import StopAgreement
from lightning_decentral.shared.wire.transport import connected, own_connection

GOODBYE_SECONDS = 10.0
"""Worker 0, and the store with it, stays so long for the others to end, too."""

STAGES = {
    RunningStage.VALIDATING: "validation",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.TESTING: "the test",
    RunningStage.PREDICTING: "prediction",
}

_meetings = 0  # of this process; equal on all workers, which take part in all


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
        environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta, one_node: bool
    ) -> None:
        """As Lightning starts the world, at a store that says who is missing."""
        settings: dict[str, Any] = {"timeout": timeout, "device_id": None if device.type == "cpu" else device}
        rank, size = environment.global_rank(), environment.world_size()
        if size > 1 and not connected():
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            place = environment.main_address, environment.main_port
            settings["store"] = Meeting(*place, rank, size, timeout, hosted, one_node).store()
        _init_dist_connection(environment, backend, **settings)

    def join(self, rank: int, size: int) -> None:
        """From now on the others see that this worker lives."""
        global _meetings
        _meetings += 1
        if connected():
            self._store = own_connection(f"notices/{_meetings}")
            self._notices = Notices(self._store, rank, size)
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
