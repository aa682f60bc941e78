"""Comparison of the settings that all workers were given, over the key-value store before anything else is exchanged.

Over the store, not by a collective: workers of other versions or plans can read it, too. What is written there never
changes its form: JSON, {name: text}, the versions first.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning_decentral.shared.plan.described import first_difference

LONGEST_PAUSE = 0.05
GOODBYE_SECONDS = 10.0
"""Time that worker 0, whose process keeps the store, lets the others read why all stop."""


def check_same_settings(
    mine: Mapping[str, str], store: Any, rank: int, size: int, timeout: timedelta, when: str
) -> None:
    """Return when all workers have come with the same settings; they read and write a few lines each.

    Args:
        mine: {name: what this worker has}, with the versions first.
        store: of the process group.
        when: where all workers are, for the error.

    Raises:
        ValueError: on every worker, the same line with the first difference.
        TimeoutError: workers that haven't come within `timeout`.
    """
    # Counted by the store, so that a later fit, in this or another world on it, never reads old answers.
    number = store.add(f"settings/{rank}", 1)
    meeting = _Meeting(store, f"settings/{number}", size, time.monotonic() + timeout.total_seconds(), when)
    if rank == 0:
        meeting.say("of", 0, json.dumps(dict(mine)))
    meeting.say("differs", rank, _difference(rank, meeting.hear("of", range(1))[0], mine))
    line = next(filter(None, meeting.hear("differs", range(size))), None)
    if line is not None:
        meeting.leave(rank)
        raise ValueError(line)


class _Meeting:
    """Exchange of text before a deadline: every worker writes some and reads what the others wrote."""

    def __init__(self, store: Any, name: str, size: int, deadline: float, when: str) -> None:
        self._store, self._name, self._size, self._deadline, self._when = store, name, size, deadline, when

    def say(self, what: str, rank: int, text: str) -> None:
        self._store.set(self._key(what, rank), text)

    def hear(self, what: str, ranks: range) -> list[str]:
        """Texts of these workers, in order. TimeoutError where one hasn't come before the deadline."""
        pause, missing = 0.001, list(ranks)
        while missing := [r for r in missing if not self._store.check([self._key(what, r)])]:
            if time.monotonic() > self._deadline:
                raise TimeoutError(
                    f"{_workers(missing)} didn't come to {self._when} in time: look at what they say, "
                    "or give the strategy a longer timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return [self._store.get(self._key(what, r)).decode() for r in ranks]

    def leave(self, rank: int) -> None:
        """The others may still be reading."""
        self.say("read", rank, "")
        if rank == 0:
            self._deadline = time.monotonic() + GOODBYE_SECONDS
            with suppress(TimeoutError):
                self.hear("read", range(self._size))

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"


def _difference(rank: int, text: str, mine: Mapping[str, str]) -> str:
    """The first, in worker 0's order, as a line; empty for none."""
    try:
        first = dict(json.loads(text))
    except (ValueError, TypeError):
        return f"worker {rank} can't read what worker 0 wrote: give every worker the same version"
    found = first_difference(mine, first)
    return f"worker {rank} has {found[0]}, worker 0 has {found[1]}: give every worker the same" if found else ""


def _workers(ranks: list[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
