"""Agreement of all workers: equal models at the start, and a roll call at an epoch's end with unequal batches."""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_decentral.shared.compute.layout import described, put
from lightning_decentral.shared.plan.described import first_difference
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport

PATIENCE_SECONDS = 1.0
ALERT_SECONDS = 0.02  # seconds between polls once some worker has ended its epoch and waits for rounds of the others
ENDED = "ended"


def check_same_model(module: nn.Module, over: Transport) -> None:
    """Check that all workers have the same parameters and buffers by name, shape, dtype and strides, and train the same
    ones. ValueError on every worker, naming the first difference."""
    rows = gather_objects(over, [*described(module).items()])
    for rank, row in enumerate(rows):
        if found := first_difference(dict(row), dict(rows[0]), sign=" "):
            raise ValueError(
                f"worker {rank} has {found[0]} where worker 0 has {found[1]}: every worker must build the same model"
            )


def start_from_worker_0(tensors: Sequence[torch.Tensor], over: Transport, device: torch.device) -> None:
    """Set the tensors on every worker to worker 0's values. Messages are on `device`; tensors that are elsewhere stay
    there, and are copied one by one."""
    for tensor in tensors:
        values = tensor.detach().to(device).contiguous()
        over.broadcast(values).wait()
        put(tensor.detach(), values)


class Uneven(RuntimeError):
    """Error: an epoch ended on one worker while another worker trains on and needs it."""

    def __init__(self, worker: int, line: str) -> None:
        super().__init__(line)
        self._worker = worker

    def of_early_end(self) -> RuntimeError:
        """Return the error for a worker that stopped early although it has more batches."""
        return RuntimeError(
            f"worker {self._worker} alone stops early (trainer.should_stop) while another goes on and needs it: stop "
            "on all workers, as EarlyStopping does (trainer.should_stop = "
            "trainer.strategy.reduce_boolean_decision(stop, all=False))"
        )


def uneven(worker: int, steps: int) -> Uneven:
    """Return the error of a worker whose epoch ended early, under a method in which all take the same updates."""
    return Uneven(
        worker,
        f"worker {worker} ended its epoch after {steps} steps while another goes on, and all must take the same "
        "updates: give every worker the same number of batches (drop_last=True, limit_train_batches), and let none "
        "skip optimizer.step()",
    )


@dataclass(eq=False)
class RollCall:
    """Ends an epoch with unequal numbers of batches: no worker hangs, and all take the same number of rounds.

    A worker that has no batch left waits here until all have come. The others then write their rounds to the store, and
    the waiting worker takes part, without updates, in the rounds that all of the others have reached:

        rounds_k <- min_j wanted_jk     k: optimizers;  j: workers whose epoch goes on

    It takes no part in a round that only the fastest waits for: with several optimizers that round might wait for a
    worker that waits for this one in another optimizer's round. With equal batches it costs one small gather."""

    over: Transport
    store: Any
    rounds: Callable[[], list[int]]  # how many this worker has taken, one number for each optimizer
    wanted: Callable[[], list[int]]  # how many it needs the others to have taken before it can go on
    take_part: Callable[[int], None]  # runs one more round of the optimizer with that index, without an update
    met: Callable[[], int]  # how many collective calls of Lightning this worker has entered
    name: str  # key of this roll call in the store, different in each fit
    left_after: Callable[[], list[int] | None] = lambda: (
        None
    )  # rounds after which others stopped before the epoch's end

    def __post_init__(self) -> None:
        self._number, self._alert, self._reported = 0, False, ""  # number of roll calls; whether a worker has ended
        self._lock, self._closed = threading.Lock(), threading.Event()
        # A thread: a worker that waits is blocked in a message, a collective call or, if the device waits in its place,
        # in whatever needs the device next, and can't report that itself.
        self._watch = threading.Thread(target=self._watch_epoch, name="lightning_decentral-roll-call", daemon=True)
        self._watch.start()

    def close(self) -> None:
        self._closed.set()
        self._watch.join(PATIENCE_SECONDS)

    @property
    def rests(self) -> bool:
        """Return whether this worker has ended its epoch and waits for others that haven't."""
        return self._reported == ENDED

    def _watch_epoch(self) -> None:
        with suppress(RuntimeError):  # the store is gone: so is worker 0, which a worker that waits for it reports
            while not self._closed.wait((ALERT_SECONDS if self._alert else PATIENCE_SECONDS) / 2):
                number = self._number
                ended = self._alert or self.store.check([self._key("ended")])
                with self._lock:
                    self._alert = ended and number == self._number  # the roll call may be over meanwhile
                if self._alert:
                    self._report(",".join(map(str, [*self.wanted(), self.met()])))

    def _report(self, where: str) -> None:
        with self._lock:
            if where == self._reported or self._reported == ENDED:
                return
            self._reported = where
            self.store.set(self._key(f"at/{self.over.rank}"), where)
            if where != ENDED:
                self.store.set(self._key("needed"), "yes")

    def _key(self, what: str) -> str:
        return f"{self.name}/{what}/{self._number}"

    def end_epoch(self) -> None:
        """Return when every worker has ended its epoch, or stopped, and all have taken the same number of rounds.
        RuntimeError: another worker waits in a collective call that this worker, at its end, will not enter."""
        mine = self.rounds()
        self._report(ENDED)
        self.store.set(self._key("ended"), "yes")
        # Done when all have ended; until then another worker may need further rounds of this one.
        gathering, rows = self.over.all_gather(torch.tensor(mine))
        pause = 0.001
        while not gathering.done():
            if (stop := self.left_after()) is not None:
                self._catch_up(stop)
                return
            pause = 0.001 if self._answer() else min(2 * pause, 0.05)
            time.sleep(pause)
        gathering.wait()
        ends = torch.stack(rows).amax(dim=0).tolist()
        self._catch_up(ends)
        with self._lock:
            self._number, self._alert, self._reported = self._number + 1, False, ""
        early = {rank: row.tolist() for rank, row in enumerate(rows) if row.tolist() != ends}
        if early and self.over.rank == 0:
            workers = ", ".join(f"worker {rank} ended after round {max(rounds)}" for rank, rounds in early.items())
            warnings.warn(
                f"unequal numbers of batches: {workers}, the longest took {max(ends)}; workers that had "
                "ended took part in the others' rounds without updates",
                stacklevel=2,
            )

    def anyone(self, *mine: bool) -> list[bool]:
        """Return for each flag whether it is true on any worker. Collective, at an epoch's end."""
        votes = torch.tensor(mine, dtype=torch.int64)
        self.over.all_reduce(votes).wait()
        return [bool(vote) for vote in votes]

    def _answer(self) -> bool:
        """Take part in the rounds that other workers wait for; return whether there were any."""
        rows, all_known = self._asked()
        if any(met > self.met() for *_, met in rows):
            raise Uneven(
                self.over.rank,
                f"worker {self.over.rank} ended its epoch while another waits for all workers within it (validation, "
                "sync_dist=True, ConsensusMonitor): give every worker the same number of batches, "
                "or log with sync_dist=False",
            )
        return bool(rows) and all_known and self._catch_up([min(column) for column in zip(*rows, strict=True)][:-1])

    def _asked(self) -> tuple[list[list[int]], bool]:
        """Return (rounds that each other worker needs before its epoch's end, whether all others have reported)."""
        rows = []
        with suppress(RuntimeError):  # worker 0, with the store, has ended or died: the gather finds out
            # Checked first: `get` waits for a key that isn't there.
            if not self.store.check([self._key("needed")]):
                return [], False
            keys = [self._key(f"at/{rank}") for rank in range(self.over.size) if rank != self.over.rank]
            known = [self.store.get(key).decode() for key in keys if self.store.check([key])]
            rows = [list(map(int, where.split(","))) for where in known if where != ENDED]
            return rows, len(known) == len(keys)
        return rows, False

    def _catch_up(self, rounds: list[int]) -> bool:
        missing = [index for index, target in enumerate(rounds) for _ in range(self.rounds()[index], target)]
        for index in missing:
            self.take_part(index)
        return bool(missing)
