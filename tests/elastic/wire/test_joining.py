"""An elastic worker that can't take what a member gives ends with why, and is in no view; who can joins."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from lightning_decentral.elastic.plan.view import Times, View, shown
from lightning_decentral.elastic.wire.joining import Endpoint, Refuses
from tests.elastic.wire.lobbies import DEAD, LobbyProcess

pytestmark = pytest.mark.threads
SECONDS = 30.0


def refused(value: Any) -> str:
    return f"this worker has rate=0.1, the run has rate={value['rate']}: give every worker the same"


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore")  # as many scripts do: what is said is no warning
def test_who_was_given_other_things_is_in_no_view_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    ended, views, lines = Event(), list[View](), list[str]()

    def errors() -> str:
        lines.append(capfd.readouterr().err)
        return "".join(lines)

    def start(refuses: Refuses = lambda value: "") -> Endpoint:
        return Endpoint(lobby.place, "127.0.0.1", Times(DEAD), refuses=refuses)

    def train() -> None:
        assert first.healed(SECONDS) is None
        while not ended.is_set():
            try:
                views.append(first.begin(0.02, lambda: {"rate": 1.0}, 2 * DEAD)[0])
            except TimeoutError:
                continue  # it waits for a second worker
            time.sleep(0.02)

    with LobbyProcess(least=2, most=3) as lobby, ThreadPoolExecutor(1) as pool:
        first = start()
        training = pool.submit(train)
        try:
            until(lambda: first.lobby_client.state.acknowledged_at > 0)  # it came first
            names = []
            for _ in range(2):
                other = start(refused)
                names.append(other.name)
                with pytest.raises(ValueError, match=r"this worker has rate=0.1, the run has rate=1.0: give every"):
                    other.healed(SECONDS)
                other.leave()
            until(lambda: f"worker {shown(names[0])} can't join: this worker has rate=0.1" in errors())
            assert errors().count("can't join") == 1, "once for each cause"
            waits = f"waiting at {lobby.place} for 2 workers, 1 is here"
            until(lambda: waits in errors())
            assert not views
            same = start()
            assert same.healed(SECONDS) == {"rate": 1.0}
            until(lambda: bool(views))
            assert set(views[0].members) == {first.name, same.name}
            same.leave()
        finally:
            ended.set()
            training.result(SECONDS)
            first.leave()
