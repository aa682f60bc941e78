"""Record of a member in its folder: what became of it, as JSON. Reading one runs nothing that somebody wrote there.

    {"overrides": ["lr=0.1"], "status": "COMPLETED", "value": 0.25, "error": null, "task_name": ..., "working_dir": ...}

What a member returns is plain: null, booleans, numbers, strings, lists of them, dictionaries by strings. Of what it
raises the type's name, the message and the traceback are kept, as texts.
"""

import json
import os
import traceback
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from lightning_decentral.sweep.member import SweepMember, returned

RECORD = "member.json"
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


class _Traceback(Exception):
    """Another process's, to be printed above the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def begin_record(entrant: SweepMember) -> None:
    """Overwrite an earlier run's outcome: whose folder this is, and that the member has not ended."""
    _write(entrant, {"overrides": entrant.overrides, "status": JobStatus.UNKNOWN.name, "value": None})


def write_record(entrant: SweepMember, outcome: JobReturn) -> None:
    """The outcome into the member's folder, whole or not at all."""
    _write(entrant, _told(entrant, outcome))


def _write(entrant: SweepMember, record: dict[str, Any]) -> None:
    entrant.folder.mkdir(parents=True, exist_ok=True)
    new = entrant.folder / f".{RECORD}"  # renamed when it is whole: a member may be killed at any moment
    with new.open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(entrant.folder / RECORD)


def _told(entrant: SweepMember, outcome: JobReturn) -> dict[str, Any]:
    about = {"overrides": entrant.overrides, **{key: getattr(outcome, key) for key in ABOUT}}
    value = outcome._return_value
    if outcome.status is JobStatus.FAILED:
        return {**about, "status": "FAILED", "value": None, "error": _of_error(MemberFailed.of(value))}
    if not plain(value):
        return {**about, "status": "FAILED", "value": None, "error": _of_error(_refused(value))}
    return {**about, "status": outcome.status.name, "value": value, "error": None}


def _of_error(error: MemberFailed) -> dict[str, str]:
    return {"type": error.kind, "message": error.message, "traceback": error.trace}


def _refused(value: object) -> MemberFailed:
    remedy = "return numbers, strings, lists of them or None"
    return MemberFailed("TypeError", f"it returned {value!r:.200}, which can't be sent to the sweep: {remedy}")


def plain(value: object) -> bool:
    """Return whether JSON keeps the value; a tuple comes back as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(plain, value.values()))
    return all(map(plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, Plain)


def read_record(entrant: SweepMember) -> JobReturn | None:
    """Read the member's outcome from its folder; None: it has not ended.

    Raises:
        ValueError: the folder's member had other overrides, or the record isn't one.
    """
    path = entrant.folder / RECORD
    if not path.exists():
        return None
    overrides, status, value, about = _read(path)
    if overrides != entrant.overrides:
        raise ValueError(
            f"{entrant.folder} holds a member with other overrides ({' '.join(overrides)}), "
            f"not {' '.join(entrant.overrides)}: resume a sweep with its own words; one that draws them needs a seed"
        )
    if status is JobStatus.UNKNOWN:
        return None
    return returned(entrant, status, value, **about)


def _read(path: Path) -> tuple[list[str], JobStatus, object, dict[str, str | None]]:
    """(overrides, status, what was returned or raised, task's name and folder)"""
    try:
        found = json.loads(path.read_text())
        overrides, about = [str(word) for word in found["overrides"]], {key: found.get(key) for key in ABOUT}
        return overrides, JobStatus[found["status"]], _value(found), about
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no record of a member ({reason}): remove it to run the member again") from None


def _value(found: dict[str, Any]) -> object:
    if found["status"] != JobStatus.FAILED.name:
        return found["value"]
    return MemberFailed(*(str(found["error"][key]) for key in ("type", "message", "traceback")))
