"""Lines of elastic workers on their views: one is killed, and the others' terminals say who and why."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from lightning_decentral.elastic.plan.view import Times, View, shown, waiting_at
from lightning_decentral.elastic.wire.joining import Endpoint
from tests.elastic.wire.lobbies import DEAD, LobbyProcess, ends_with

SECONDS = 30.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w3-ab12cd34@127.0.0.1:4711", "localhost:3"),
        ("w12-ab12cd34*2@10.0.0.7:4711", "10.0.0.7:12"),
        ("gpu-node-7-4242-ab12cd34@10.0.0.7:4711", "gpu-node-7:4242"),
        ("ab12cd34@10.0.0.7:4711", "10.0.0.7:4711"),
        ("", ""),
    ],
)
def test_a_reader_sees_hosts_and_numbers(name: str, text: str) -> None:
    assert shown(name) == text


def test_a_line_for_each_change_of_view() -> None:
    view = View(2, ("a", "e"), 120, ("a", "b", "c", "d"), "a", 4, left=("d",))
    found = "view 2: 2 workers from round 120; joined: e; left: d; lost: b (connection ended), c (silent for 10 s)"
    assert view.line({"b"}, 10.0) == found
    assert View(1, ("a", "b"), 0, ("a", "b"), "a", 2).line((), 10.0) == "view 1: 2 workers from round 0; joined: a, b"
    assert (
        View(3, ("a",), 9, ("a", "b"), "a", 2, left=("b",)).line((), 10.0) == "view 3: 1 worker from round 9; left: b"
    )
    assert waiting_at("h:1", "waiting for 2 workers, 1 is here") == "waiting at h:1 for 2 workers, 1 is here"
    assert waiting_at("h:1", "the network is cut") == "waiting at h:1: the network is cut"


def _train(parent: int, lobby: str) -> None:
    ends_with(parent)
    worker = Endpoint(lobby, "127.0.0.1", Times(DEAD), title=f"host-{os.getpid()}-")
    worker.healed(SECONDS)
    while True:
        with suppress(TimeoutError):
            worker.begin(0.02, dict, 2 * DEAD)
            time.sleep(0.02)


def test_a_killed_one_is_named_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    lines = list[str]()

    def until(holds: Callable[[str], bool]) -> str:
        end = time.monotonic() + SECONDS
        while not holds(text := "".join(lines)):
            assert time.monotonic() < end, text
            lines.extend(capfd.readouterr())
            time.sleep(0.05)
        return text

    fork = multiprocessing.get_context("fork")
    with LobbyProcess(least=2, most=3) as lobby:
        workers = [fork.Process(target=_train, args=(os.getpid(), lobby.place), daemon=True) for _ in range(3)]
        try:
            workers[0].start()
            waits = f"lightning_decentral: waiting at {lobby.place} for 2 workers, 1 is here"
            until(lambda text: waits in text)
            for worker in workers[1:]:
                worker.start()
            text = until(lambda text: text.count("view 1: 3 workers") == 4)  # the lobby's, and each worker's
            names = re.findall(r"host:(\d+)", text.partition("joined: ")[2].partition("\n")[0])
            assert sorted(map(int, names)) == sorted(worker.pid or 0 for worker in workers)
            os.kill(int(names[-1]), signal.SIGKILL)
            lost = rf"decentral: view 2: 2 workers from round \d+; lost: host:{names[-1]} \(connection ended\)"
            text = until(lambda text: bool(re.search(lost, text)))
            assert len(re.findall(lost, text)) == 1, "the oldest's alone"
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
