"""The catalogue: each fault, the strategy that it is done to, and which ends are right."""

import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fault_kinds import (
    MOMENTS,
    changed,
    fail,
    hook,
    interrupt,
    kill,
    killed_at_operation,
    leave,
    no_room,
    on,
    poison,
    slow,
    stop,
    terminate,
)
from fault_runs import CORRUPT, GOES_ON, LINE, Outcome, Run, differs, judged, train, unsound
from fault_worker import BATCHES, Fault

EITHER = (GOES_ON, LINE)
METHODS = ("gossip", "partial_backprop", "token_pipeline")
FROM_THE_MEAN = "start from the mean"


@dataclass(frozen=True)
class Place:
    """Where a row may run.

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
            try:
                made.rename(folder)
            except OSError:  # a row beside this one was faster
                pass
        return folder


@dataclass(frozen=True)
class Row:
    """One fault. due: the ends that are right; `run` says how it ended; pattern: what a line must say."""

    group: str
    fault: str
    strategy: str
    due: Sequence[str]
    run: Callable[[Place], Outcome]
    pattern: str = ""

    def right(self, outcome: Outcome) -> bool:
        """Whether that end was due."""
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
        if outcome.kind == GOES_ON and GOES_ON not in due:
            return Outcome(CORRUPT, "it went on, and nothing was said")
        return outcome

    return Row(group, fault, method, due, run, pattern)


# ---- ends of a worker -------------------------------------------------------------------------------------------------

LATER = ("as the fit starts", "in a step", "before an update", "in validation", "as it saves", "as the fit ends")


def ends() -> Iterator[Row]:
    for method in METHODS:
        moments = (
            list(MOMENTS) if method == "gossip" else ["as groups are made", "in a step", "in validation", "as it saves"]
        )
        for moment in moments:
            size = 3 if method == "gossip" else 2
            late = EITHER if moment == "as the fit ends" else (LINE,)
            for act, name in ((kill, "killed"), (stop, "stopped (SIGSTOP)"), (fail, "raises")):
                if act is fail and moment == "as groups are made":
                    continue
                faults = [on(1, MOMENTS[moment](act))]
                yield struck("a worker ends", f"worker 1 {name} {moment}", method, faults, (1,), late, size)
    yield struck(
        "a worker ends", "worker 0 killed in a step", "gossip", [on(0, MOMENTS["in a step"](kill))], (0,), (LINE,), 3
    )


LONG = changed(trainer={"max_epochs": 1000})


def stops() -> Iterator[Row]:
    for method in METHODS:
        one = [on(1, MOMENTS["in a step"](interrupt))]
        yield struck("a run is stopped", "Ctrl-C at worker 1", method, one, (), (LINE,))
        yield struck("a run is stopped", "Ctrl-C at all", method, [MOMENTS["in a step"](interrupt)], (), (LINE,))
        one = [LONG, slow(0.1), on(1, MOMENTS["in a step"](terminate))]
        yield struck("a run is stopped", "SIGTERM at worker 1, steps of 0.1 s", method, one, (), (LINE,))
    long = [LONG, slow(3.0), on(1, hook("on_train_batch_start", 1)(terminate))]
    yield struck("a run is stopped", "SIGTERM at worker 1, steps of 3 s", "gossip", long, (), (LINE,))


# ---- numbers ----------------------------------------------------------------------------------------------------------


def numbers() -> Iterator[Row]:
    moments = {
        "before an update": hook("on_before_optimizer_step", 6),
        "after an update": hook("on_train_batch_end", 6),
        "before validation": hook("on_validation_start", 4),
        "just before a save": hook("on_save_checkpoint", 4),
    }
    for value in (float("nan"), float("inf"), 1e30):
        for where in ("parameter", "buffer"):
            for moment, at in moments.items():
                faults = [on(1, at(poison(value, where)))]
                yield struck("numbers", f"{value:g} in a {where} of worker 1 {moment}", "gossip", faults, size=3)
        for method in ("partial_backprop", "token_pipeline"):
            faults = [on(1, moments["before an update"](poison(value, "parameter")))]
            yield struck("numbers", f"{value:g} in a parameter of worker 1 before an update", method, faults)


# ---- files ------------------------------------------------------------------------------------------------------------


def plain(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def own(folder: Path) -> list[Path]:
    """What the workers wrote for themselves beside `last.ckpt`, by rank."""
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


def foreign(path: Path) -> None:
    path.write_text("not a checkpoint\n" * 100)


def resumed(fault: str, method: str, damage: Callable[[Place, Path], None], due: Sequence[str], size: int = 2) -> Row:
    """Goes on from a checkpoint to which this was done; whoever says that it goes on exactly must."""

    def run(place: Place) -> Outcome:
        folder = place.folder / "run"
        shutil.copytree(place.saved(method), folder)
        damage(place, folder)
        started = place.train("run", method=method, resume=plain(folder), size=size)
        started.wait()
        return judged(started, (), lambda: _exact(place, started, method))

    return Row("files", fault, method, due, run)


def _exact(place: Place, run: Run, method: str) -> str | None:
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


def files() -> Iterator[Row]:
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
    yield resumed("worker 1's file missing", "gossip", lambda _, folder: own(folder)[1].unlink(), EITHER)
    yield resumed("the workers' files mixed up", "gossip", lambda _, folder: _swap(*own(folder)), EITHER)
    yield resumed("the workers' files of another run", "gossip", _of_another_run, EITHER)
    yield resumed("resumed by 3 workers", "gossip", lambda place, folder: None, EITHER, 3)
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
        resumed = judged(again, (), lambda: unsound(again.folder))
        return outcome if resumed.kind == GOES_ON else Outcome(CORRUPT, f"it can't be resumed: {resumed.said}")

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
    """As a scheduler that ends a job of which one task has died."""
    if run.processes[rank].poll():
        for process in run.processes:
            if process.status is None:
                process.kill()
                process.status = -signal.SIGKILL


def rows() -> list[Row]:
    """Of all groups."""
    import fault_places
    import fault_settings

    return [*ends(), *stops(), *numbers(), *files(), *fault_settings.rows(), *fault_places.rows()]
