"""Draws cases, covers pairs of values, and shrinks a run that fails to the smallest that still does."""

import multiprocessing
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import serve
from tests import ports
from tests.together import run as program
from tests.together.pool import Pool
from tests.together.space import AXES, COSTLY, EVENTS, NONE, Case, Pair, draw, event_of, pairs, planned, served
from tests.together.verdict import accounted, accounted_elsewhere, refusal, verdict

SECONDS = 90.0
"""The longest that a run may take; it takes one."""


def in_worker(case: Case, folder: str, lobby: str, plant: Callable[[], None] | None) -> Any:
    if plant is not None:
        plant()
    return program.run(case, int(os.environ["LOCAL_RANK"]), folder, lobby, accounted(case))


def in_worker_elsewhere(case: Case, folder: str, at: int, accounts: bool, plant: Callable[[], None] | None) -> Any:
    if plant is not None:
        plant()
    return program.run_elsewhere(case, int(os.environ["LOCAL_RANK"]), Path(folder), at, accounts)


@dataclass(frozen=True)
class Result:
    """Of one case."""

    case: Case
    fault: str
    """What is wrong; empty: nothing."""
    refused: str
    """In which words; empty: it trained."""


def tried(case: Case, pool: Pool, plant: Callable[[], None] | None = None) -> Result:
    """One run. `plant` is called in each worker before it; a pool that planted must be closed."""
    with tempfile.TemporaryDirectory() as folder, _lobby(case) as lobby:
        outcomes = pool.run(in_worker, (case, folder, lobby, plant), case.workers, SECONDS)
        fault, refused = verdict(case, outcomes, Path(folder)), refusal(outcomes)
        if case.has("resume elsewhere") and not fault and not refused:
            at = next(event.at for event in case.events if event.kind == "resume elsewhere")
            there, accounts = case.elsewhere, accounted_elsewhere(case)
            outcomes = pool.run(in_worker_elsewhere, (there, folder, at, accounts, plant), there.workers, SECONDS)
            fault = verdict(there, outcomes, Path(folder) / "elsewhere")
            fault = f"resumed by {there.workers}: {fault}" if fault else ""
        return Result(case, fault, refused)


@contextmanager
def _lobby(case: Case) -> Iterator[str]:
    """Where elastic workers meet, in a process of its own."""
    if case["method"] != "elastic":
        yield ""
        return
    port, process = spares.pop(case.bounds, None) or _started(case.bounds)
    if not process.is_alive():  # somebody else took its port
        port, process = _started(case.bounds)
    spares[case.bounds] = _started(case.bounds)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


spares = dict[tuple[int, int], tuple[int, Any]]()
"""{bounds: (port, process)} of lobbies for later runs: a new one first waits for members of an earlier run."""


def _started(bounds: tuple[int, int]) -> tuple[int, Any]:
    port = ports.free()
    given = Bounds(*bounds), Times(5.0), "127.0.0.1", port, _listens
    process = multiprocessing.get_context("fork").Process(target=_serve, args=given, daemon=True)
    process.start()
    return port, process


def _serve(*given: Any) -> None:
    # A worker of xdist that is killed (a test took too long) is missed only once nobody has its pipe any more.
    threading.Thread(target=_ends_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        serve(*given)


def _ends_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _listens(port: int) -> None:
    """Workers try again until it does."""


def drawn(count: int, seed: int) -> Iterator[Case]:
    """`count` cases; the n-th of a seed is always the same."""
    for number in range(count):
        yield draw(random.Random(f"{seed}/{number}"))


def covering(seed: int, candidates: int = 24) -> list[Case]:
    """Cases that have every pair of values that a plan can have, and every value with every event, at least once."""
    numbers, cases, covered = random.Random(seed), [], set[Pair]()
    for first, second in _all_pairs():
        if (first, second) in covered:
            continue
        best = max(_with(first, second, numbers, candidates), key=lambda c: len(pairs(c) - covered), default=None)
        if best is not None:
            cases.append(best)
            covered |= pairs(best)
    return cases


def _all_pairs() -> list[Pair]:
    """From the axes with the most values to those with the fewest: the small ones are then covered on the way."""
    axes = sorted(AXES, key=lambda axis: -len(AXES[axis]))
    values = [[(axis, value) for value in AXES[axis]] for axis in axes] + [[("event", kind) for kind in EVENTS]]
    found = [(a, b) for i, left in enumerate(values) for right in values[i + 1 :] for a in left for b in right]
    found = [(a, b) for a, b in found if b[1] not in COSTLY or a[0] in ("method", "delay")]
    order = {axis: place for place, axis in enumerate([*AXES, "event"])}
    return [(a, b) if order[a[0]] < order[b[0]] else (b, a) for a, b in found]


def _with(first: tuple[str, str], second: tuple[str, str], numbers: random.Random, count: int) -> list[Case]:
    """Cases with both whose plan can be; none where no draw has found one."""
    fixed = {axis: value for axis, value in (first, second) if axis != "event"}
    found = []
    for _ in range(count):
        case = draw(numbers, fixed, patience=20, usual=0.2)
        events = case.events
        if second[0] == "event":
            kinds = served(case, [second[1], *[event.kind for event in events]])
            events = tuple(event_of(kind, case, numbers) for kind in dict.fromkeys(kinds))
        case = replace(case, events=events)
        if not planned(case) and {first, second} <= {*case.values.items(), *(("event", e.kind) for e in events)}:
            found.append(case)
    return found


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with as few events and as many first values as still fails."""
    for event in case.events:
        less = replace(case, events=tuple(other for other in case.events if other != event))
        if fails(less):
            case = less
    for axis, values in AXES.items():
        if case[axis] not in (values[0], NONE):
            simpler = case.but(**{axis: values[0]})
            if not planned(simpler) and simpler.values != case.values and fails(simpler):
                case = simpler
    return case
