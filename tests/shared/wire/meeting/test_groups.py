"""A stranger who says a pair's number to a new group's port: the group is made again, by all."""

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_decentral.shared.wire.meeting import groups
from lightning_decentral.shared.wire.meeting.groups import TRIES, connected_to_all, make_world
from lightning_decentral.shared.wire.meeting.notices import Notices
from lightning_decentral.shared.wire.pending import PeerLost
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.world import world

SIZE = 3
TIMEOUT = timedelta(seconds=2)


def listening() -> set[int]:
    """This process's ports."""
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has just closed it
            links.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


class Watched(dist.Store):
    """Through which workers tell each other their ports; strangers are at the new ones first, as everybody's end."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self.strangers: list[socket.socket] = []
        self._before = listening()

    def set(self, key: str, value: Any) -> None:
        for port in listening() - self._before:
            for pair in range(SIZE):  # of two workers, either may be the one that listens
                self.strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                self.strangers[-1].sendall(pair.to_bytes(8, "little"))
        self._before = listening()
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))


def gloo(store: Any, rank: int) -> GlooTransport:
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], TIMEOUT * 10
    return GlooTransport(dist.ProcessGroupGloo(store, rank, SIZE, options))


@pytest.mark.sampled
@pytest.mark.threads
@pytest.mark.parametrize("disturbed", [0, 1, TRIES])
def test_a_group_with_a_stranger_is_made_again(disturbed: int) -> None:
    store, strangers = dist.HashStore(), []

    def worker(group: dist.ProcessGroupGloo) -> tuple[bool, int]:
        board, tries = Notices(dist.PrefixStore("board", store), group.rank(), SIZE), [0]

        def make() -> GlooTransport:
            tries[0] += 1
            place: Any = dist.PrefixStore(f"try{tries[0]}", store)
            if tries[0] <= disturbed:
                place = Watched(place)
                strangers.append(place)
            made = gloo(place, group.rank())
            made.close = lambda: None  # type: ignore[method-assign]  # registered nowhere
            return made

        try:
            made = connected_to_all(make, TIMEOUT, lambda fine: board.agree(fine, TIMEOUT * 5))
        except PeerLost:
            return False, tries[0]
        assert made is not None
        return made.greet(TIMEOUT), tries[0]

    found = world(SIZE, worker)
    assert found == [(disturbed < TRIES, min(disturbed + 1, TRIES))] * SIZE
    assert any(watched.strangers for watched in strangers) == bool(disturbed)


def test_each_world_begins_at_keys_that_nobody_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = iter([False, False, True])
    made = [GlooTransport.__new__(GlooTransport) for _ in range(3)]
    for one in made:
        one.greet = lambda timeout: next(heard)  # type: ignore[method-assign]
        one.close = lambda: None  # type: ignore[method-assign]
    left, used, store = iter(made), [], dist.HashStore()
    monkeypatch.setattr(groups, "everyone", lambda: next(left))

    def init(store: Any) -> None:
        store.set("port", "1")
        used.append(store)

    make_world(store, init, lambda heard: heard, TIMEOUT)
    assert [store.check([f"world/{n}/port"]) for n in range(4)] == [True, True, True, False]
    assert len(used) == 3
