"""Processes of a starter: who is started again, when it ends, with which code."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from lightning_decentral.elastic.wire.starter import (
    STARTER,
    WORKER,
    Starter,
    follow,
    number_of,
    started_again,
    title,
)

SECONDS = 20.0


@pytest.mark.parametrize(
    ("code", "members", "again"),
    [
        (0, {1, 2}, False),  # it was told to leave, or is through
        (-9, {1, 2}, True),
        (1, {1}, True),
        (-9, set(), False),  # nobody is left to heal it
        (1, set(), False),
        (1, None, False),  # the others would fail, too
        (-9, None, True),
        (-15, {1, 2}, False),  # somebody took it away
        (143, {1, 2}, False),
        (-15, None, False),
    ],
)
def test_who_is_started_again(code: int, members: Collection[int] | None, again: bool) -> None:
    assert started_again(code, members) is again


def test_numbers_of_names() -> None:
    assert number_of(f"{title({WORKER: '12'})}abcd@10.0.0.1:4") == 12
    assert [number_of(name) for name in ("abcd@10.0.0.1:4", "w-@h:1", f"{title({})}ab@h:1")] == [-1, -1, -1]


class Fleet:
    """A starter of shells, on a thread; who is a member is what the test says."""

    def __init__(self, folder: Path, workers: int, script: str) -> None:
        self.folder, self.said = folder, list[str]()
        self.members: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self.starter = Starter(
            workers, lambda n: (["sh", "-c", script], str(folder)), lambda: self.members, {}, self.said.append
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.starter.run()

    def pids(self) -> dict[int, int]:
        """{number: process}, of all that were started."""
        files = self.folder.glob("pid-*")
        return {int(file.name[4:]): int(text) for file in files if (text := file.read_text().strip())}

    def began(self, *numbers: int) -> None:
        names = tuple(f"w{number}-a@h:1" for number in numbers)
        self.members = (self.members[0] + names, names)

    def wait(self, *numbers: int) -> dict[int, int]:
        end = time.monotonic() + SECONDS
        while set(self.pids()) != set(numbers):
            assert time.monotonic() < end, (self.pids(), self.said)
            time.sleep(0.02)
        return self.pids()

    def finish(self) -> int | None:
        self._thread.join(SECONDS)
        return self.code


TELLS = f'echo $$ > part-${WORKER}; mv part-${WORKER} pid-${WORKER}; test "${STARTER}" -gt 1 || exit 9; '
LIVES = "while ! test -e over; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.elastic.wire.starter.HASTY_SECONDS", 0.0)
    monkeypatch.setattr("lightning_decentral.elastic.wire.starter.LOOK_SECONDS", 0.02)


def test_a_lost_one_is_started_again_until_all_are_through(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, TELLS + LIVES)
    pids = fleet.wait(0, 1)
    fleet.began(0, 1)
    os.kill(pids[0], signal.SIGKILL)
    fleet.wait(0, 1, 2)
    assert fleet.said == ["worker 0 ended by SIGKILL: another one is started"]
    fleet.began(1, 2)
    (tmp_path / "over").touch()
    assert fleet.finish() == 0
    assert len(fleet.pids()) == 3


def test_one_that_is_taken_away_before_the_run_began_ends_alone(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, TELLS + LIVES)
    os.kill(fleet.wait(0, 1)[0], signal.SIGTERM)
    (tmp_path / "over").touch()
    assert fleet.finish() == 0
    assert fleet.said == ["worker 0 ended by SIGTERM"]
    assert len(fleet.pids()) == 2


def test_one_that_fails_before_the_run_began_ends_all(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, f"{TELLS} test ${WORKER} = 1 && exit 3; {LIVES}")
    assert fleet.finish() == 3
    assert fleet.said == ["worker 1 ended by code 3"]
    assert len(fleet.pids()) <= 2


def test_who_waits_for_a_member_is_ended_when_none_is_left(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, TELLS + "exec sleep 60")
    pids = fleet.wait(0, 1)
    fleet.began(0, 1)
    os.kill(pids[0], signal.SIGKILL)
    fleet.wait(0, 1, 2)
    os.kill(pids[1], signal.SIGKILL)
    assert fleet.finish() == 1
    assert fleet.said[-1] == "worker 1 ended by SIGKILL"
    assert len(fleet.pids()) == 3


def _follows(starter: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before this one may have left another handler to the fork
    follow({STARTER: str(starter)})
    time.sleep(SECONDS)


def test_a_worker_ends_with_its_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.elastic.wire.starter.FOLLOW_SECONDS", 0.02)
    fork = multiprocessing.get_context("fork")
    starter = fork.Process(target=time.sleep, args=(SECONDS,), daemon=True)
    starter.start()
    worker = fork.Process(target=_follows, args=(starter.pid,), daemon=True)
    worker.start()
    worker.join(0.2)
    assert worker.is_alive()
    starter.kill()
    starter.join()
    worker.join(SECONDS / 2)
    assert worker.exitcode == -signal.SIGTERM


def test_one_that_hardly_lives_is_started_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.elastic.wire.starter.HASTY_SECONDS", 1e9)
    monkeypatch.setattr("lightning_decentral.elastic.wire.starter.LONGEST_PAUSE", 0.1)
    fleet = Fleet(tmp_path, 2, f"{TELLS} test ${WORKER} = 0 || exit 1; {LIVES}")
    fleet.began(0)
    fleet.wait(0, 1, 2)
    (tmp_path / "over").touch()
    assert fleet.finish() == 0
    assert fleet.said[0] == "worker 1 ended by code 1: another one is started in 0.1 s"
