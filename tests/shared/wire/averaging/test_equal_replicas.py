"""What equal replicas need in addition to their average: updates counted, buffers looked at, changes compared."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_decentral.shared.wire.averaging import equal_replicas
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.meeting.comparison import Unasked, unasked


class Shared:
    """Records whether buffers were looked at, and how many updates were counted meanwhile."""

    equal: EqualReplicas
    looks: list[tuple[bool, list[int]]]

    def __init__(self, *_: Any) -> None:
        Shared.looks = []

    def changed(self) -> bool:
        return False

    def share(self, look: bool) -> None:
        self.looks.append((look, self.equal.rounds()))


class Compared(Unasked):
    """Records what it is asked."""

    def __init__(self, *_: Any) -> None:
        self.calls: list[str] = []

    def changed(self) -> None:
        self.calls.append("changed")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def equal(monkeypatch: pytest.MonkeyPatch) -> EqualReplicas:
    monkeypatch.setattr(equal_replicas, "RunningBuffers", Shared)
    Shared.equal = EqualReplicas()
    return Shared.equal


WIRE: Any = SimpleNamespace(group=lambda _: object())


def test_updates_count_from_the_beginning_to_the_end(equal: EqualReplicas) -> None:
    for _ in range(2):
        assert equal.rounds() == [], "outside of training"
        equal.begin(nn.Linear(1, 1), None, unasked, list)
        equal.advance(0)
        equal.advance(0)
        assert equal.rounds() == [2]
        equal.close()


def test_buffers_are_looked_at_in_each_period_and_where_some_worker_has_news(equal: EqualReplicas) -> None:
    equal.begin(nn.Linear(1, 1), WIRE, unasked, list)
    equal.advance(0)
    average: Any = SimpleNamespace(heard=lambda: equal.updates == 2)
    equal.join(average)
    assert average.news() is False
    for period in (0, 0, 0, 1):
        equal.advance(period)
    looks = [True, False, True, False, True]  # the first, another's news, a new period
    assert Shared.looks == [(look, [before]) for before, look in enumerate(looks)], "who waits waits for this update"


def test_what_is_trained_is_compared_until_the_end(equal: EqualReplicas) -> None:
    compared: Any = Compared()
    equal.begin(nn.Linear(1, 1), WIRE, lambda _: compared, list)
    equal.replaced()
    average: Any = SimpleNamespace(heard=bool)
    equal.join(average)
    assert average.layouts is compared
    equal.close()
    equal.replaced()
    assert compared.calls == ["changed", "close"]
