"""Member (job) of a sweep: its overrides, its folder, and the files there: its log, its record, its scores.

    member.json   {"overrides": ["lr=0.1"], "status": "COMPLETED", "value": 0.25, "error": null, "task_name": ..., ...}
    scores.json   {"scores": [{"metric": "val_loss", "mode": "min", "step": 64, "value": 0.3}], "verdict": null}

Reading these files runs no code from them. A member's result is plain: null, booleans, numbers, strings, lists of them,
dictionaries with string keys. Of an exception, the type's name, the message and the traceback are kept as text. The
scores compare members of a resumed sweep."""

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
    """Settings of a sweep's member, with which its process starts."""

    name: str
    own_overrides: tuple[str, ...]  # those that differ from the other members'
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
        return [str(override) for override in self.config.hydra.overrides.task]


def returned(member: SweepMember, status: JobStatus, value: object, **more: str | None) -> JobReturn:
    """Make the outcome of a member that returned, or raised, this value."""
    task, hydra = (
        OmegaConf.masked_copy(member.config, [str(key) for key in member.config if (key == "hydra") == of_hydra])
        for of_hydra in (False, True)
    )
    return JobReturn(member.overrides, task, hydra, status=status, _return_value=value, **more)


def width_of(config: DictConfig) -> int:
    """Number of devices at `trainer.devices`, if that is a number or a list; otherwise 1."""
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
    """Error that a member raised, rebuilt from its record: `kind: message`; its traceback is the cause."""

    def __init__(self, kind: str, message: str = "", trace: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message, self.trace = kind, message, trace
        if trace:
            self.__cause__ = _Traceback(trace)

    @classmethod
    def of(cls, error: BaseException) -> "MemberFailed":
        """Convert an exception into the form that a record keeps."""
        if isinstance(error, cls):
            return error
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(type(error).__name__, str(error), trace)


class MemberEnded(MemberFailed, ValueError):
    """Error of a member whose program ended with a message for its user, `sys.exit("error: ...")`."""

    def __str__(self) -> str:
        return self.message


class _Traceback(Exception):
    """Traceback of another process, printed above the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def begin_record(member: SweepMember) -> None:
    """Overwrite an earlier run's record: the folder is this member's, which has not ended."""
    _write_whole(member, RECORD, {"overrides": member.overrides, "status": JobStatus.UNKNOWN.name, "value": None})


def write_record(member: SweepMember, outcome: JobReturn) -> None:
    """Write the outcome into the member's folder, atomically."""
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
    new = member.folder / f".{name}"  # renamed when complete: a member may be killed at any moment
    with new.open("w") as file:
        json.dump(content, file, indent=1)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    new.replace(member.folder / name)


def plain(value: object) -> bool:
    """Return whether JSON can keep the value; a tuple is read back as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(plain, value.values()))
    return all(map(plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, Plain)


def read_record(member: SweepMember) -> JobReturn | None:
    """Read the member's outcome from its folder; None: it has not ended. ValueError: the folder has a member with other
    overrides, or the record is malformed."""
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
            f"{member.folder} has a member with the overrides {' '.join(overrides)}, but this sweep's overrides there "
            f"are {' '.join(member.overrides)}: resume with the sweep's first overrides; a random sweeper needs a seed"
        )
    return None if status is JobStatus.UNKNOWN else returned(member, status, value, **about)


def write_scores(member: SweepMember, board: Scoreboard) -> None:
    """Write the member's scores so far, and why it was ended, atomically."""
    scores = [asdict(score) for score in board.histories.get(member.name, [])]
    _write_whole(member, SCORES, {"scores": scores, "verdict": board.verdicts.get(member.name)})


def read_scores(member: SweepMember, board: Scoreboard) -> None:
    """Read the folder's scores and verdict onto the board, if the file exists; ValueError for a malformed file."""
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
        raise ValueError(f"{path} isn't a file of a member's scores ({reason}): remove it") from None
