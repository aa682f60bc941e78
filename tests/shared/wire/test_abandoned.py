"""Groups that are left with messages under way: deleted in a while, and not while the program ends."""

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_decentral.shared.wire import pending
from lightning_decentral.shared.wire.pending import Opened
from tests import ports


class Group:
    """Whose end takes as long as gloo's waits."""

    def __init__(self, ended: threading.Event, go_on: threading.Event) -> None:
        self.begun, self.ended, self.go_on = threading.Event(), ended, go_on

    def __del__(self) -> None:
        self.begun.set()
        self.go_on.wait(20)
        self.ended.set()


class Link:
    queued = False

    def __init__(self, group: Group) -> None:
        self.group: Any = group

    def close(self) -> None:
        self.group = None


class Clock:
    """Whose sleepers wake when a test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def sleep(self, seconds: float) -> None:
        assert seconds == pending.GRACE
        self.over.wait(20)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pending, "time", made)
    return made


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would be called when the program ends."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    monkeypatch.setattr(atexit, "unregister", calls.remove)
    monkeypatch.setattr(pending, "PATIENCE", 0.3)
    return calls


def abandoned() -> tuple[threading.Event, threading.Event, threading.Event]:
    """(the group's end has begun, it may go on, it has ended)."""
    ended, go_on = threading.Event(), threading.Event()
    opened, group = Opened(), Group(ended, go_on)
    begun = group.begun
    opened.add(Link(group))
    del group
    opened.abandon()
    return begun, go_on, ended


def test_they_are_deleted_in_a_while(at_exit: list[Callable[[], None]], clock: Clock) -> None:
    begun, go_on, ended = abandoned()
    assert not begun.wait(0.2)
    go_on.set()
    clock.over.set()
    assert ended.wait(10)
    for _ in range(100):
        if not at_exit:
            return
        time.sleep(0.1)
    raise AssertionError("the end of the program would still wait")


@pytest.mark.threads  # one of its own stays, as in a program that ends
def test_none_is_deleted_once_the_program_ends(at_exit: list[Callable[[], None]], clock: Clock) -> None:
    begun, go_on, _ = abandoned()
    at_exit[0]()
    go_on.set()
    clock.over.set()
    assert not begun.wait(0.5)


def test_the_end_waits_for_a_deletion_but_not_for_ever(at_exit: list[Callable[[], None]], clock: Clock) -> None:
    begun, go_on, ended = abandoned()
    clock.over.set()
    assert begun.wait(10)
    at_exit[0]()
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(10)


SCRIPT = """
import lightning_decentral
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Broken(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("a mistake of the user's")
        return super().training_step(batch, batch_idx)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(strategy="gossip", accelerator="cpu", devices=2, max_steps=4, **quiet).fit(Broken())
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_mistake_ends_a_program_with_its_error_and_not_with_an_abort(tmp_path: Path) -> None:
    """The interpreter's own end, so no fork of the tests will do; nor a launcher, which kills one when another ends."""
    (tmp_path / "script.py").write_text(SCRIPT)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    same = {**os.environ, **world, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a mistake"}
    workers = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**same, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, said in zip(workers, ends, strict=True):
        assert "RuntimeError: a mistake of the user's" in said
        assert "terminate called" not in said
        assert worker.returncode == 1
