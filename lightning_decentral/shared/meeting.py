"""Process groups of a fixed number of workers: `WorkerGroup` connects them, sends heartbeats, and disconnects them.

Every strategy with several workers has one `WorkerGroup`, which is alike for all methods. `FitCoordinator` counts a
fit's collective calls and names those in which a worker waits."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightning_decentral.shared.coordination import FitCoordinator, Result, Uncoordinated
from lightning_decentral.shared.refusals import refuse_backend
from lightning_decentral.shared.wire.meeting import placement
from lightning_decentral.shared.wire.meeting.comparison import Layout, Layouts, TrainingComparison
from lightning_decentral.shared.wire.meeting.groups import connect, make_world
from lightning_decentral.shared.wire.meeting.notices import Heartbeat, StatusBoard
from lightning_decentral.shared.wire.meeting.rendezvous import Meeting, group_failed
from lightning_decentral.shared.wire.meeting.stopping import StopAgreement
from lightning_decentral.shared.wire.meeting.waits import Backlog, Rescue
from lightning_decentral.shared.wire.transport import STORES, Wire, abort_nccl, connected, own_connection

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric
    import lightning_decentral.shared.setup_and_step as strategies

GOODBYE_SECONDS = 10.0  # Seconds that worker 0, which holds the store, waits at its end for the others to end.

STAGES = {
    RunningStage.VALIDATING: "validation",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.TESTING: "the test",
    RunningStage.PREDICTING: "prediction",
}

TIMEOUT = timedelta(minutes=5)
BLOCKS = {"NCCL_MAX_P2P_NCHANNELS": "8"}
"""NCCL setting used where the user gave none: NCCL would start up to 32 blocks for each send, and each block occupies a
multiprocessor of the device, also while a neighbour is late (nccl#1656, nccl#1598)."""


class WatchedDevice(Uncoordinated):
    """Coordination outside of a fit (set-up, a validation or test by itself), without an agreement to stop. A device
    that waits for a lost worker is freed, as in a fit. `queued` tells whether the device waits, and not the host;
    `seconds` is how long a worker waits for another."""

    def __init__(self, queued: bool, heartbeat: Heartbeat, seconds: float) -> None:
        self._backlog = Backlog(queued)
        self._rescue = Rescue(heartbeat, self._backlog.since, abort_nccl, seconds)

    def meet(self, call: Callable[[], Result]) -> Result:
        self._rescue.check()
        found = call()
        self._backlog.mark()
        self._rescue.check()
        return found

    def close(self) -> None:
        self._rescue.close()


class WorkerGroup:
    """Connects one worker of a strategy to the others; anew for each fit, validation and test. A worker waits for
    another for `timeout`, in set-up, in a step or anywhere, before it ends. ValueError: timeout is not positive."""

    def __init__(self, strategy: "strategies.WorkersStrategy | fabric.FabricWorkers", timeout: timedelta) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}: {TIMEOUT} is the default")
        self._strategy, self.timeout = strategy, timeout
        self.ready = self._saving = False  # `ready`: whether set-up is over
        self.coordination = Uncoordinated()  # runs calls that wait for other workers; another object in a fit
        self._heartbeat: Heartbeat | None = None
        self._board: StatusBoard | None = None
        self._store: Any = None
        self._fits = self._compared = 0

    @property
    def _trainer(self) -> Any:
        return getattr(self._strategy.lightning_module, "_trainer", None)

    def phase(self) -> str:
        """Return text on what this worker does right now."""
        trainer = self._trainer
        if trainer is None or not self.ready:
            return "set-up"
        if self._saving:
            return "a checkpoint"
        return STAGES.get(trainer.state.stage, f"step {trainer.global_step + 1}")

    def come(self) -> None:
        """Create the process group as Lightning does, through a store that names missing workers; start the heartbeat,
        by which the others see that this worker is alive. ValueError: workers can't communicate by this device, backend
        or address."""
        strategy, environment = self._strategy, self._strategy.cluster_environment
        assert environment is not None
        assert strategy.process_group_backend is not None
        refuse_backend(strategy.process_group_backend, strategy.root_device)
        rank, size = environment.global_rank(), environment.world_size()
        if size > 1 and strategy.root_device.type == "mps":
            # Headers of messages, weights and norms: in float32 a sum over many workers wouldn't be exact.
            raise ValueError("workers need float64, which mps devices don't have: train with accelerator='cpu'")
        if strategy.root_device.type == "cuda":
            os.environ.update({name: value for name, value in BLOCKS.items() if name not in os.environ})
        if size > 1 and not connected():
            try:
                place = environment.main_address, environment.main_port, rank, size
            except ValueError as error:
                raise ValueError(f"MASTER_PORT must be a number ({error}): set it alike on all workers") from error
            self._make_world(Meeting(*place, self.timeout, _hosted(), placement.shared_layout(strategy)))
        else:
            _init_dist_connection(environment, strategy.process_group_backend, **self._settings)
        if connected():
            connection = own_connection("notices")
            # The store counts set-ups, as a process (of a pool, an actor) may have been in other groups before.
            self._store = STORES.PrefixStore(str(connection.add(f"meetings/{rank}", 1)), connection)
            self._board = StatusBoard(self._store, rank, size, _hosted())
            self._heartbeat = Heartbeat(self._board, self.phase)
        agreed = self._board is None or self._board.agree(placement.in_order(strategy), timeout=self.timeout)
        placement.arrive(strategy, agreed)

    @property
    def _settings(self) -> dict[str, Any]:
        device = self._strategy.root_device
        return {"timeout": self.timeout, "device_id": None if device.type == "cpu" else device}

    def _make_world(self, meeting: Meeting) -> None:
        environment, backend = self._strategy.cluster_environment, self._strategy.process_group_backend
        assert environment is not None
        assert backend is not None
        met = meeting.store()
        agree = partial(StatusBoard(met, meeting.rank, meeting.size).agree, timeout=self.timeout)
        init = partial(_init_dist_connection, environment, backend, **self._settings)
        try:
            make_world(met, init, agree, self.timeout)
        except RuntimeError as error:
            raise group_failed(met, meeting.rank, error) from error

    def join_groups(self) -> Wire | None:
        """Return the strategy's `wire`, its process groups, created where there are none. Collective."""
        if self._strategy.wire is None and connected():
            # After the last fit there is no status board (heartbeats).
            agree = bool if self._board is None else partial(self._board.agree, timeout=self.timeout)
            self._strategy.wire = connect(self._strategy.root_device, self.timeout, agree=agree)
            if self._heartbeat is not None:
                queued, seconds = self._strategy.wire.world.queued, self.timeout.total_seconds()
                self.coordination = WatchedDevice(queued, self._heartbeat, seconds)
        return self._strategy.wire

    def leave_groups(self, cut_off: bool) -> None:
        """Close the process groups; after an exception, without waiting for messages that may be in flight."""
        if self._strategy.wire is not None:
            (self._strategy.wire.abandon if cut_off else self._strategy.wire.close)()
        self._strategy.wire = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context for writing a checkpoint, which all workers do together."""
        between, self._saving = self._strategy.wire is None, True
        yield
        self._saving = False  # after an error the phase stays: it tells where this worker ended
        if between:  # between two fits, or after the last one: groups for this checkpoint alone
            self.leave_groups(self.cut_off)

    # ---- a fit: what waits is counted and named, all stop together --------------------------------------------------

    def coordinate(self, trainer: Trainer, strategy: "strategies.WorkersStrategy") -> None:
        """Coordinate the fit with the other workers from now on, until `coordination.close`."""
        if self._strategy.wire is None:
            return
        assert self._board is not None
        assert self._heartbeat is not None
        board, heartbeat = self._board, self._heartbeat
        stop = StopAgreement(board, self.timeout.total_seconds(), heartbeat.wake)
        self.coordination.close()  # that of set-up
        name = f"fit-{self._fits}"  # a new name: the store still has the keys of earlier fits
        self.coordination = FitCoordinator(self._strategy.wire, trainer, strategy, stop, heartbeat, name)
        self._fits += 1

    def layouts(self, layout: Callable[[], Layout], peers: Sequence[int] = ()) -> TrainingComparison:
        """Return a comparison of what these ranks, or all, train. Every worker makes as many, in the same order."""
        if self._board is None or self._heartbeat is None:
            return TrainingComparison()
        peers = peers or range(self._board.size)
        self._compared, name = self._compared + 1, f"layouts-{self._compared}-{peers[0]}"
        return Layouts(self._board, self._heartbeat, peers, name, layout, self.timeout, lambda: self.coordination.rests)

    @property
    def cut_off(self) -> bool:
        """Return whether an exception has cut this worker off the others, so that it may call nothing collective."""
        trainer = self._trainer
        return trainer is not None and trainer.interrupted and not self.coordination.agreed and connected()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """Report to the others why this worker ends, unless all have agreed to stop. An error about a lost peer gets
        the peer's own reason in its text."""
        if self._heartbeat is not None and not self.coordination.agreed:
            self._heartbeat.leave(error)

    def close(self, cut_off: bool) -> None:
        """Disconnect this worker; unless an exception has cut it off, worker 0 first waits for the others."""
        self.coordination.close()
        if self._heartbeat is not None and self._board is not None:
            self._heartbeat.close()
            if not cut_off:
                rank, keys = self._board.rank, [f"gone/{other}" for other in range(self._board.size)]
                with suppress(RuntimeError):  # the store is gone, and with it every worker to wait for
                    self._store.set(keys[rank], "yes")
                    end = time.monotonic() + GOODBYE_SECONDS
                    while rank == 0 and not self._store.check(keys) and time.monotonic() < end:
                        time.sleep(0.005)
            # Trainer and strategy refer to each other, so their objects wait for Python's collector, and an open
            # connection with it.
            self._board.close()
        self._heartbeat = self._board = self._store = None
        self.ready = self._saving = False


def _hosted() -> bool:
    """Return whether torchrun's agent hosts the store, not worker 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
