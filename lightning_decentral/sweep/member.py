"""Member (job) of a sweep: its overrides, its folder, and what it leaves there: its log, its record, its scores.

    member.json   {"overrides": ["lr=0.1"], "status": "COMPLETED", "value": 0.25, "error": null, "task_name": ..., ...}
    scores.json   {"scores": [{"metric": "val_loss", "mode": "min", "step": 64, "value": 0.3}], "verdict": null}

Reading them runs nothing that somebody wrote there. What a member returns is plain: null, booleans, numbers, strings,
lists of them, dictionaries by strings. Of what it raises the type's name, the message and the traceback are kept, as
texts. With the scores members of a resumed sweep are compared.
"""

import json
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_decentral.sweep.plan.policy import Scoreboard
from lightning_decentral.sweep.wire.client import score_of

LOG, RECORD, SCORES = "member.log", "member.json", "scores.json"


@dataclass(frozen=True)
class SweepMember:
    """Settings that a member is started with."""

    name: str
    own_overrides: tuple[str, ...]  # those that make it differ from the others
    config: DictConfig
    folder: Path  # its output folder
    width: int = 1  # devices that its trainer asks for

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def title(self) -> str:
        return f"#{self.name} : {' '.join(self.own_overrides)}"

    @property
    def overrides(self) -> list[str]:
        """All its overrides of the task's configuration."""
        return [str(override) for override in self.config.hydra.overrides.task]


def returned(member: SweepMember, status: JobStatus, value: object, **more: str | None) -> JobReturn:
    """The outcome of a member that returned, or raised, this value."""
    task, hydra = (
        OmegaConf.masked_copy(member.config, [str(key) for key in member.config if (key == "hydra") == of_hydra])
        for of_hydra in (False, True)
    )
    return JobReturn(member.overrides, task, hydra, status=status, _return_value=value, **more)


def width_of(config: DictConfig) -> int:
    """trainer.devices where that is a number or a list; otherwise 1."""
    try:
        devices: object = OmegaConf.select(config, "trainer.devices")
    except OmegaConfBaseException:  # a trainer of another kind
        return 1
    if isinstance(devices, ListConfig):
        return max(1, len(devices))
    return max(1, devices) if isinstance(devices, int) else 1


ABOUT = ("task_name", "working_dir")
Plain = (bool, int, float, str, type(None))


class MemberFailed(RuntimeError):
    """Error that a member raised, as its record states it: `kind: message`; its traceback is the cause."""

    def __init__(self, kind: str, message: str = "", trace: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message, self.trace = kind, message, trace
        if trace:
            self.__cause__ = _Traceback(trace)

    @classmethod
    def of(cls, error: BaseException) -> "MemberFailed":
        """The error as a record would state it."""
        if isinstance(error, cls):
            return error
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(type(error).__name__, str(error), trace)


class MemberEnded(MemberFailed, ValueError):
    """Error of a member whose program ended itself with a line for its user, `sys.exit("error: ...")`."""

    def __str__(self) -> str:
        return self.message


class _Traceback(Exception):
    """Another process's, to be printed above the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def begin_record(member: SweepMember) -> None:
    """Overwrite an earlier run's outcome: whose folder this is, and that the member has not ended."""
    _write_whole(member, RECORD, {"overrides": member.overrides, "status": JobStatus.UNKNOWN.name, "value": None})


def write_record(member: SweepMember, outcome: JobReturn) -> None:
    """The outcome into the member's folder, whole or not at all."""
    status, value, error = outcome.status, outcome._return_value, None
    if status is JobStatus.FAILED:
        error = MemberFailed.of(value)
    elif not plain(value):
        remedy = "return numbers, strings, lists of them or None"
        error = MemberFailed("TypeError", f"it returned {value!r:.200}, which can't be sent to the sweep: {remedy}")
    record = {"overrides": member.overrides, **{key: getattr(outcome, key) for key in ABOUT}}
    record |= {"status": status.name, "value": value, "error": None}
    if error is not None:
        of_error = {"type": error.kind, "message": error.message, "traceback": error.trace}
        record |= {"status": "FAILED", "value": None, "error": of_error}
    _write_whole(member, RECORD, record, synced=True)


def _write_whole(member: SweepMember, name: str, content: dict[str, Any], synced: bool = False) -> None:
    member.folder.mkdir(parents=True, exist_ok=True)
    new = member.folder / f".{name}"  # renamed when it is whole: a member may be killed at any moment
    with new.open("w") as file:
        json.dump(content, file, indent=1)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    new.replace(member.folder / name)


def plain(value: object) -> bool:
    """Return whether JSON keeps the value; a tuple comes back as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(plain, value.values()))
    return all(map(plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, Plain)


def read_record(member: SweepMember) -> JobReturn | None:
    """The member's outcome, read from its folder; None: it has not ended. ValueError: the folder's member had other
    overrides, or the record isn't one.
    """
    path = member.folder / RECORD
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        overrides, about = [str(one) for one in found["overrides"]], {key: found.get(key) for key in ABOUT}
        status, value = JobStatus[found["status"]], found["value"]
        if status is JobStatus.FAILED:
            kind, *texts = (str(found["error"][key]) for key in ("type", "message", "traceback"))
            value = MemberEnded(kind, texts[0]) if kind == SystemExit.__name__ else MemberFailed(kind, *texts)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no record of a member ({reason}): remove it to run the member again") from None
    if overrides != member.overrides:
        raise ValueError(
            f"{member.folder} holds a member with the overrides {' '.join(overrides)}, this sweep has other overrides "
            f"there, {' '.join(member.overrides)}: resume with those it began with; a sweeper that draws needs a seed"
        )
    return None if status is JobStatus.UNKNOWN else returned(member, status, value, **about)


def write_scores(member: SweepMember, board: Scoreboard) -> None:
    """Write the member's scores so far, and why it was ended: whole or not at all."""
    scores = [asdict(score) for score in board.histories.get(member.name, [])]
    _write_whole(member, SCORES, {"scores": scores, "verdict": board.verdicts.get(member.name)})


def read_scores(member: SweepMember, board: Scoreboard) -> None:
    """Read the folder's scores and verdict onto the board, if there are any; ValueError for no such file."""
    path = member.folder / SCORES
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())
        for score in map(score_of, found["scores"]):
            board.add(member.name, score)
        if found["verdict"] is not None:
            board.verdicts[member.name] = str(found["verdict"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no scores of a member ({reason}): remove it") from None
