"""Compares workers: their settings before anything else is sent, and their trained parameters when one sees a change.

Settings are compared through the key-value store, not by a collective: workers of other versions or plans can read
them, too. The form never changes: JSON, {name: text}, the versions first.

Trained parameters are compared only in steps in which a worker sees a change:

    NAME/<averages done>.<changes since>/<rank>   {parameter or optimizer: shape and type}, as this worker trains them
    NAME/asked                                    a change for which a worker waits for the others' answers

An average is one of gradients, or a round of gossip. A worker that sees a change in its trained parameters writes their
present layout, and goes on when the others have written the same. A worker that has begun or finished the same average
without the change (as gossip's neighbours may) will block in its messages: its watching thread writes its layout."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_decentral.shared.plan.described import first_difference
from lightning_decentral.shared.wire.meeting.notices import LOOK_SECONDS, Heartbeat, StatusBoard
from lightning_decentral.shared.wire.pending import PeerLost

LONGEST_PAUSE = 0.05
GOODBYE_SECONDS = 10.0  # seconds that worker 0, whose process has the store, leaves the others to read why all stop


def check_same_settings(
    mine: Mapping[str, str], store: Any, rank: int, size: int, timeout: timedelta, when: str
) -> None:
    """Wait until all workers have written the same settings to the store; each reads and writes a few lines. `mine`:
    {name: this worker's value as text}, with the versions first. `when`: where all workers are, for the error.
    ValueError: on every worker, the same line with the first difference. TimeoutError: workers that haven't come within
    `timeout`."""
    # Counted by the store, so that a later fit, in this or another world on it, never reads old answers.
    place = f"settings/{store.add(f'settings/{rank}', 1)}"

    def received(what: str, ranks: Sequence[int], end: float) -> list[str]:
        """Wait for the texts of these workers, and return them in order."""
        pause, missing = 0.001, ranks
        while missing := [r for r in missing if not store.check([f"{place}/{what}/{r}"])]:
            if time.monotonic() > end:
                workers = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise TimeoutError(
                    f"{workers} didn't come to {when} in time: look at their own output, "
                    "or give the strategy a longer timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return [store.get(f"{place}/{what}/{r}").decode() for r in ranks]

    if rank == 0:
        store.set(f"{place}/of/0", json.dumps(dict(mine)))
    end = time.monotonic() + timeout.total_seconds()
    store.set(f"{place}/differs/{rank}", _difference(rank, received("of", [0], end)[0], mine))
    if line := next(filter(None, received("differs", range(size), end)), None):
        store.set(f"{place}/read/{rank}", "")
        if rank == 0:  # the others may still be reading
            with suppress(TimeoutError):
                received("read", range(size), time.monotonic() + GOODBYE_SECONDS)
        raise ValueError(line)


def _difference(rank: int, text: str, mine: Mapping[str, str]) -> str:
    """Return the first difference, in worker 0's order, as a line; empty for none."""
    try:
        first = dict(json.loads(text))
    except (ValueError, TypeError):
        return f"worker {rank} can't read what worker 0 wrote: give every worker the same version"
    found = first_difference(mine, first)
    return f"worker {rank} has {found[0]}, worker 0 has {found[1]}: give every worker the same" if found else ""


Layout = Mapping[str, str]
Named = Callable[[], Iterable[tuple[str, nn.Parameter]]]
MakeLayouts = Callable[[Callable[[], Layout]], "TrainingComparison"]
ASK_SECONDS = 0.5
"""Period of repeated requests for missing answers: of two requests for different changes, one overwrites the other."""


class TrainedLayout:
    """Describes one worker's trained parameters: {parameter or optimizer: shape, type, change that added it}."""

    def __init__(self, named: Named, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._named, self._optimizers = named, optimizers  # functions that return the present ones
        self._since: dict[Any, int] = {}  # by object: a new parameter of the same shape and type counts as a change
        self._calls = 0

    def __call__(self) -> Layout:
        found = {}
        for name, p in self._named():
            found[name] = f"{tuple(p.shape)} {p.dtype}, {'trained' if p.requires_grad else 'frozen'}{self._new(p)}"
        for place, optimizer in enumerate(self._optimizers()):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            found[f"optimizer {place}"] = f"{type(optimizer).__name__} with groups of {sizes}{self._new(optimizer)}"
        self._calls += 1
        return found

    def _new(self, one: Any) -> str:
        since = self._since.setdefault(one, self._calls)
        return f", new at change {since}" if since else ""


class TrainingComparison:
    """Compares trained parameters between workers, for averages; the base class is for a single worker."""

    def changed(self) -> None:
        """Wait until all workers train the same parameters from the next average on. Collective, in effect.
        RuntimeError: another worker trains something else; the text has the first difference."""

    def begin(self) -> None:
        """Begin the next average: the trained parameters of this average are fixed."""

    def done(self) -> None:
        """End the average."""

    def settle(self) -> None:
        """Accept the present parameters without a comparison, as after all workers have read the same files."""

    def close(self) -> None:
        """End the comparisons."""


def unasked(_: Callable[[], Layout]) -> TrainingComparison:
    """Make a comparison for a single worker, as a `MakeLayouts`."""
    return TrainingComparison()


@dataclass(eq=False)
class Layouts(TrainingComparison):
    """Compares one worker's trained parameters with those of its peers, in one fit, through the status board."""

    board: StatusBoard
    heartbeat: Heartbeat  # its thread answers
    peers: Sequence[int]  # ranks that average with this worker, itself included
    name: str  # key of this fit and of these peers in the store
    layout: Callable[[], Layout]  # describes this worker's trained parameters
    timeout: timedelta  # how long to wait for another worker to see the same change
    rests: Callable[[], bool] = bool  # whether this worker's epoch is over: it makes no more changes

    def __post_init__(self) -> None:
        self._averages, self._changes, self._begun = 0, 0, -1  # done; changes since the last; the last begun
        self._now = self._settled = self.layout()
        self._answered: set[str] = set()
        self.heartbeat.listen(self._look)

    def close(self) -> None:
        self.heartbeat.forget(self._look)

    def begin(self) -> None:
        self._settled, self._begun = self._now, self._averages

    def done(self) -> None:
        self._averages, self._changes = self._averages + 1, 0

    def settle(self) -> None:
        self._now = self._settled = self.layout()

    def changed(self) -> None:
        change, self._now = f"{self._averages}.{self._changes}", self.layout()
        self._changes += 1
        self._answer(change, self._now)
        self.heartbeat.wake()
        end = time.monotonic() + self.timeout.total_seconds()
        for rank in (rank for rank in self.peers if rank != self.board.rank):
            if found := first_difference(self._now, self._answer_of(rank, change, end), sign=" "):
                raise RuntimeError(
                    f"worker {self.board.rank} has {found[0]} where worker {rank} has {found[1]}: freeze, thaw, add "
                    "and replace parameters and optimizers on every worker in the same step"
                )

    def _answer(self, change: str, layout: Layout) -> None:
        self._answered.add(change)  # written once for each change
        self.board.write(f"{self.name}/{change}", json.dumps(dict(layout)))

    def _answer_of(self, rank: int, change: str, end: float) -> Layout:
        ask = 0.0
        while (found := self.board.read(f"{self.name}/{change}/{rank}", _read)) is None:
            if time.monotonic() > ask:
                self.board.put(f"{self.name}/asked", change)
                ask = time.monotonic() + ASK_SECONDS
            if rank in self.board.look() or time.monotonic() > end:
                raise PeerLost(f"worker {self.board.rank} lost worker {rank}")
            time.sleep(LOOK_SECONDS)
        layout: Layout = found
        return layout

    def _look(self) -> bool:
        """Answer, in a thread, for a worker that began without the change; return True while it may still come."""
        change: str | None = self.board.read(f"{self.name}/asked", _change)
        if change is None or change in self._answered:
            return False
        if int(change.split(".")[0]) > self._begun and not self.rests():
            return True
        self._answer(change, self._settled)
        return False


def _read(written: bytes) -> Layout:
    row = json.loads(written.decode())
    if not isinstance(row, dict) or not all(isinstance(text, str) for text in row.values()):
        raise ValueError(f"not a layout: {row!r}")
    return row


def _change(written: bytes) -> str:  # ValueError for a text that no worker wrote
    average, number = written.decode().split(".")
    return f"{int(average)}.{int(number)}"
