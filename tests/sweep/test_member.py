"""The record that a member leaves: plain values as they are, anything else by name, and nothing in a folder is run."""

import math
import pickle
import traceback
from pathlib import Path

import pytest
from hydra.core.utils import JobStatus

from lightning_decentral.sweep.member import RECORD, MemberFailed, read_record, returned, write_record
from tests.sweep.test_launcher import member


@pytest.mark.parametrize("value", [None, True, 3, -0.1, math.inf, "text ü", [1.0, [2]], {"a": {"b": [None]}}])
def test_plain_values_come_back(value: object, tmp_path: Path) -> None:
    one = member(tmp_path)
    write_record(one, returned(one, JobStatus.COMPLETED, value, task_name="task", working_dir="there"))
    outcome = read_record(one)
    assert outcome is not None
    assert (outcome.status, outcome.return_value) == (JobStatus.COMPLETED, value)
    assert (outcome.task_name, outcome.working_dir, outcome.overrides) == ("task", "there", ["lr=1"])
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize(
    "value", [b"bytes", {1: 2}, [object()], {"a": {1, 2}}, Path("p"), print], ids=lambda v: type(v).__name__
)
def test_other_values_fail_the_member_by_name(value: object, tmp_path: Path) -> None:
    one = member(tmp_path)
    write_record(one, returned(one, JobStatus.COMPLETED, value))
    outcome = read_record(one)
    assert outcome is not None
    with pytest.raises(MemberFailed, match=r"TypeError: it returned .* can't be sent to the sweep: return numbers"):
        _ = outcome.return_value


class Odd(Exception):
    """One that no pickle would bring back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_is_its_type_message_and_traceback(tmp_path: Path) -> None:
    one = member(tmp_path)
    try:
        raise Odd(1, 2)
    except Odd as error:
        write_record(one, returned(one, JobStatus.FAILED, error))
    outcome = read_record(one)
    assert outcome is not None
    with pytest.raises(MemberFailed, match=r"^Odd: 1 and 2$") as caught:
        _ = outcome.return_value
    assert "raise Odd(1, 2)" in "".join(traceback.format_exception(caught.value))


class Runs:
    """What a pickle of somebody else's could do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"overrides": ["lr=1"]}', "[" * 100_000, "\0"])
def test_what_is_no_record_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ValueError, match=r"member\.json is no record of a member .*: remove it") as caught:
        read_record(member(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_pickle_in_a_folder_is_not_read(tmp_path: Path) -> None:
    for name in (RECORD, "member.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Runs(tmp_path / "was-run")))
    with pytest.raises(ValueError, match="no record"):
        read_record(member(tmp_path))
    (tmp_path / RECORD).unlink()
    assert read_record(member(tmp_path)) is None
    assert not (tmp_path / "was-run").exists()
