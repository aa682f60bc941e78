"""A row of the page of faults, and the place where it runs."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.kinds import (
    REACHED,
    changed,
    hook,
    leave,
)
from faults.runs import CORRUPT, GOES_ON, LINE, TRACEBACK, Outcome, Run, judged, train, unsound
from faults.worker import BATCHES, Fault

INJECTED = ("a worker ends", "a run is stopped", "numbers", "one worker alone")
EITHER = (GOES_ON, LINE)
METHODS = ("gossip", "partial_backprop", "token_pipeline")


@dataclass(frozen=True)
class Place:
    """Folders and ports where a row may run.

    Args:
        shared: folder of runs that several rows look at.
    """

    folder: Path
    shared: Path
    port: int
    seconds: float

    def train(self, name: str, *faults: Fault, **options: Any) -> Run:
        return train(self.folder / name, self.port, self.seconds, faults=faults, **options)

    def whole(self, method: str, size: int = 2) -> Path:
        """The folder of an undisturbed run."""
        folder = self.shared / f"whole-{method}-{size}"
        return self._once(folder, lambda place: train(place, self.port + 1, self.seconds, method, size))

    def saved(self, method: str, size: int = 2, seed: float = 0.05) -> Path:
        """The folder of one whose workers all ended after two of its three epochs."""
        folder = self.shared / f"saved-{method}-{size}-{seed}"
        ended = [hook("on_train_epoch_start", 2 * BATCHES)(leave), changed(module={"learning_rate": seed})]
        return self._once(folder, lambda place: train(place, self.port + 1, self.seconds, method, size, ended))

    def _once(self, folder: Path, start: Callable[[Path], Run]) -> Path:
        if not folder.exists():
            made = self.folder / folder.name
            run = start(made)
            run.wait()
            outcome = judged(run, (), lambda: unsound(made))
            assert outcome.kind == GOES_ON, f"without any fault: {outcome}"
            with suppress(OSError):  # another row was faster
                made.rename(folder)
        return folder


@dataclass(frozen=True)
class Row:
    """One fault. due: the ends that are right; `run` says how it ended; pattern: text that a line must have."""

    group: str
    fault: str
    strategy: str
    due: Sequence[str]
    run: Callable[[Place], Outcome]
    pattern: str = ""

    def right(self, outcome: Outcome) -> bool:
        """Return whether that end was due."""
        return outcome.kind in self.due and (outcome.kind != LINE or bool(re.search(self.pattern, outcome.said)))


def struck(
    group: str,
    fault: str,
    method: str,
    faults: Sequence[Fault],
    victims: Sequence[int] = (),
    due: Sequence[str] = EITHER,
    size: int = 2,
    pattern: str = "",
) -> Row:
    """A training with these faults; victims aren't asked how they ended. pattern: what a line must say."""

    def run(place: Place) -> Outcome:
        started = place.train("run", *faults, method=method, size=size)
        started.wait(victims)
        outcome = judged(started, victims, lambda: unsound(started.folder))
        if group in INJECTED and not (started.folder / REACHED).exists():
            return Outcome(TRACEBACK, f"it ended before the fault: {outcome.said}")
        if outcome.kind == GOES_ON and GOES_ON not in due:
            return Outcome(CORRUPT, "it went on, and nothing was said")
        return outcome

    return Row(group, fault, method, due, run, pattern)
