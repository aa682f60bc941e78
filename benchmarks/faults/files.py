"""Checkpoint files that are damaged, foreign, mixed up or half written, and runs that go on from them."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from faults.kinds import changed, killed_at_operation, no_room, on
from faults.row import EITHER, METHODS, Place, Row
from faults.runs import CORRUPT, GOES_ON, LINE, Outcome, Run, differs, judged, unsound

FROM_THE_MEAN = "start from the mean"


def plain(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def own(folder: Path) -> list[Path]:
    """Return the files that workers wrote for themselves in addition to `last.ckpt`, by rank."""
    place = folder / "checkpoints"
    files = [
        path for path in place.rglob("*") if path.is_file() and path.parent != place and "last" in str(path.parent)
    ]
    return sorted(files, key=lambda path: path.name)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit of one number of the model."""
    state = torch.load(path, weights_only=False)["state_dict"]
    numbers = next(iter(state.values())).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(numbers) + len(numbers) // 2 + 2] ^= 0x40
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


class _Runs:
    """A value that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def _armed(place: Place, folder: Path) -> None:
    path = plain(folder)
    torch.save({**torch.load(path, weights_only=False), "more": _Runs(place.folder / "was-run")}, path)


def foreign(path: Path) -> None:
    path.write_text("not a checkpoint\n" * 100)


def resumed(
    fault: str,
    method: str,
    damage: Callable[[Place, Path], None],
    due: Sequence[str],
    size: int = 2,
    by: str | None = None,
) -> Row:
    """Goes on from a checkpoint to which this was done; whoever says that it goes on exactly must. by: who saved it."""

    def run(place: Place) -> Outcome:
        folder = place.folder / "run"
        shutil.copytree(place.saved(by or method), folder)
        damage(place, folder)
        started = place.train("run", method=method, resume=plain(folder), size=size)
        started.wait()
        # Another method's run can't be gone on with exactly: from its mean, or from what all its workers had alike.
        return judged(started, (), lambda: unsound(started.folder) if by else _exact(place, started, method))

    return Row("files", fault, method, due, run)


def _exact(place: Place, run: Run, method: str) -> str | None:
    if (place.folder / "was-run").exists():
        return "what stood in the file was run"
    if any(FROM_THE_MEAN in process.printed for process in run.processes):
        return unsound(run.folder)
    return unsound(run.folder) or differs(run.folder, place.whole(method))


def _swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _of_another_run(place: Place, folder: Path) -> None:
    stranger = place.saved("gossip", seed=0.03)
    for mine, its in zip(own(folder), own(stranger), strict=True):
        mine.write_bytes(its.read_bytes())


def _blocked(folder: Path) -> None:
    """Something else stands where workers write."""
    place = folder / "checkpoints" / ".workers"
    shutil.rmtree(place)
    place.write_text("")


def _another_save(place: Place) -> Outcome:
    """Save in another folder, as on nodes with disks of their own."""
    other = changed(resume=str(plain(place.saved("gossip", seed=0.03))))
    started = place.train("run", on(1, other), resume=plain(place.saved("gossip")))
    started.wait()
    return judged(started, (), lambda: "it went on, and nothing was said")


def rows() -> Iterator[Row]:
    for method in METHODS:
        yield resumed("none: resumed from a checkpoint", method, lambda place, folder: None, (GOES_ON,))
    for name, act in (
        ("halved", halve),
        ("with one bit flipped", flip),
        ("empty", empty),
        ("of another kind", foreign),
    ):
        for method in METHODS:
            # Where workers go on from files of their own, they may exactly, whatever became of this one's numbers.
            due = EITHER if act is flip and method != "partial_backprop" else (LINE,)
            yield resumed(f"last.ckpt {name}", method, lambda _, folder, act=act: act(plain(folder)), due)  # type: ignore[misc]
        yield resumed(f"worker 1's file {name}", "gossip", lambda _, folder, act=act: act(own(folder)[1]), EITHER)  # type: ignore[misc]
    for method in METHODS:
        yield resumed("last.ckpt would run a program", method, _armed, (LINE,))
    yield resumed("worker 1's file missing", "gossip", lambda _, folder: own(folder)[1].unlink(), EITHER)
    yield resumed("the workers' files mixed up", "gossip", lambda _, folder: _swap(*own(folder)), EITHER)
    yield resumed("the workers' files of another run", "gossip", _of_another_run, EITHER)
    yield resumed("resumed by 3 workers", "gossip", lambda place, folder: None, EITHER, 3)
    for by, method in (("gossip", "partial_backprop"), ("partial_backprop", "gossip"), ("compressed", "gossip")):
        yield resumed(f"last.ckpt of {by}", method, lambda place, folder: None, EITHER, by=by)
    yield resumed(".workers is a file", "gossip", lambda _, folder: _blocked(folder), (LINE,))
    yield Row("files", "worker 1 resumes from another save", "gossip", (LINE,), _another_save, "different checkpoints")
    yield resumed("last.ckpt missing", "gossip", lambda _, folder: plain(folder).unlink(), (LINE,))
    for rank in (0, 1):
        yield Row("files", f"worker {rank}'s disk is full", "gossip", (LINE,), _full(rank), "File too large|No space")
        yield Row("files", f"worker {rank} killed at each moment of a save", "gossip", (GOES_ON,), _killed(rank))


def _full(rank: int) -> Callable[[Place], Outcome]:
    """All say so, and the checkpoint of the epoch before is what it was."""

    def run(place: Place) -> Outcome:
        wide = changed(module={"width": 512})  # a checkpoint is much longer than what a worker prints
        started = place.train("run", wide, on(rank, no_room))
        started.wait()
        outcome = judged(started, (), lambda: "it went on, and nothing was said")
        if outcome.kind != LINE:
            return outcome
        again = place.train("run", wide, resume=plain(started.folder))
        again.wait()
        end = judged(again, (), lambda: unsound(again.folder))
        return outcome if end.kind == GOES_ON else Outcome(CORRUPT, f"it can't be resumed: {end.said}")

    return run


def _killed(rank: int) -> Callable[[Place], Outcome]:
    """Killed at the first file operation of the saves, at the second ..., and resumed each time."""

    def run(place: Place) -> Outcome:
        for number in range(1, 60):
            started = place.train(f"at-{number}", on(rank, killed_at_operation(number)))
            started.wait(aside=lambda _, started=started: _stop_all(started, rank))  # type: ignore[misc]
            if started.processes[rank].status == 0:
                return Outcome(GOES_ON, f"{number - 1} moments")
            again = place.train(f"at-{number}", resume=plain(started.folder))
            again.wait()
            outcome = judged(again, (), lambda again=again: differs(again.folder, place.whole("gossip")))  # type: ignore[misc]
            if outcome.kind != GOES_ON:
                return Outcome(outcome.kind, f"at operation {number}: {outcome.said}")
        return Outcome(CORRUPT, "a save without an end")

    return run


def _stop_all(run: Run, rank: int) -> None:
    """Stop all workers, as a scheduler does with a job of which one task has died."""
    if run.processes[rank].poll():
        for process in run.processes:
            if process.status is None:
                process.kill()
                process.status = -signal.SIGKILL
