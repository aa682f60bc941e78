"""What all workers must agree on: the model they start from, when to stop, and when an epoch has ended."""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_decentral.transport import Pending, Transport, gather_objects

PATIENCE_SECONDS = 1.0


def check_same_model(module: nn.Module, over: Transport) -> None:
    """Every worker has the same parameters and buffers by name, shape and dtype.

    Raises:
        ValueError: on every worker, naming the first difference.
    """
    mine = [(n, tuple(t.shape), str(t.dtype)) for n, t in (*module.named_parameters(), *module.named_buffers())]
    rows = gather_objects(over, mine)
    for rank, row in enumerate(rows):
        if row == rows[0]:
            continue
        ours, theirs = ({n: f"{n} {s} {d}" for n, s, d in r} for r in (rows[0], row))
        name = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
        raise ValueError(
            f"worker {rank} has {theirs.get(name, f'no {name}')} where worker 0 has {ours.get(name, f'no {name}')}: "
            "every worker must build the same model"
        )


def start_from_worker_0(tensors: Sequence[torch.Tensor], over: Transport) -> None:
    """Every worker gets worker 0's values, frozen parameters and buffers included."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        over.broadcast(values).wait()
        tensor.detach().copy_(values)


class StopFlag:
    """A signal that reached one worker stops all of them after the same step, and nobody waits for it.

    Every `every` rounds the workers start to sum their flags; the sum is read `every` rounds later. A worker waits for
    another only if it's more than `every` rounds ahead.
    """

    def __init__(self, over: Transport, every: int) -> None:
        self.raised = False
        self.agreed = False
        self._over, self._every = over, every
        self._tick = 0
        self._sum: tuple[Pending, torch.Tensor] | None = None

    def tick(self) -> None:
        """Once per round, on every worker."""
        if self._tick % self._every == 0:
            if self._sum is not None:
                self._sum[0].wait()
                self.agreed |= bool(self._sum[1])
            votes = torch.tensor([int(self.raised)])
            self._sum = self._over.all_reduce(votes), votes
        self._tick += 1


class RollCall:
    """The end of an epoch with unequal numbers of batches: nobody hangs and all take the same number of rounds.

    A worker that has no batch left waits here until all have come. Another that waits long for a message says so in
    the store; whoever waits here then takes part in its round, without an update. In the usual case, equal numbers, it
    costs one small gather at an epoch's end, where validation would make the workers meet anyway.

    Args:
        rounds: how many rounds this worker has taken, one number for each optimizer.
        wanted: how many it needs the others to have taken before it can go on.
        take_part: runs one more round of the optimizer with that index, without an update.
        met: how many collective calls of Lightning this worker has entered.
    """

    def __init__(
        self,
        over: Transport,
        store: Any,
        rounds: Callable[[], list[int]],
        wanted: Callable[[], list[int]],
        take_part: Callable[[int], None],
        met: Callable[[], int],
    ) -> None:
        self._over, self._store = over, store
        self._rounds, self._wanted, self._take_part, self._met = rounds, wanted, take_part, met
        self._number = 0
        self._waiting_since: float | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._say_when_waiting, name="lightning_decentral-roll-call", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()
        self._watch.join(PATIENCE_SECONDS)

    def __enter__(self) -> None:
        """Around whatever may wait for other workers."""
        self._waiting_since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._waiting_since = None

    def _say_when_waiting(self) -> None:
        while not self._closed.wait(PATIENCE_SECONDS / 2):
            since = self._waiting_since
            if since is not None and time.monotonic() - since > PATIENCE_SECONDS:
                needed = [*self._wanted(), self._met()]
                self._store.set(f"needed/{self._number}", ",".join(map(str, needed)))

    def end_epoch(self) -> None:
        """Return when every worker has ended its epoch and all have taken the same number of rounds.

        Raises:
            RuntimeError: another worker waits in a collective call that this worker, at its end, will not enter.
        """
        mine = self._rounds()
        gathering, rows = self._over.all_gather(torch.tensor(mine))
        pause = 0.001
        while not gathering.done():
            self._answer()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        gathering.wait()
        ends = torch.stack(rows).amax(dim=0).tolist()
        self._catch_up(ends)
        self._number += 1
        early = {rank: row.tolist() for rank, row in enumerate(rows) if row.tolist() != ends}
        if early and self._over.rank == 0:
            warnings.warn(f"unequal numbers of batches: {_sentence(early, ends)}", stacklevel=2)

    def _answer(self) -> None:
        key = f"needed/{self._number}"
        if not self._store.check([key]):
            return
        *rounds, met = map(int, self._store.get(key).decode().split(","))
        if met > self._met():
            raise RuntimeError(
                f"worker {self._over.rank} ended its epoch while another still averages values over all workers within "
                "it (sync_dist=True, ConsensusMonitor): give every worker the same number of batches, or log with "
                "sync_dist=False and without that callback"
            )
        self._catch_up(rounds)

    def _catch_up(self, rounds: list[int]) -> None:
        for index, target in enumerate(rounds):
            while self._rounds()[index] < target:
                self._take_part(index)


def _sentence(early: dict[int, list[int]], ends: list[int]) -> str:
    workers = ", ".join(f"worker {rank} ended after round {max(rounds)}" for rank, rounds in early.items())
    return f"{workers}, the longest took {max(ends)}; the rounds were finished without updates of those that had ended"
