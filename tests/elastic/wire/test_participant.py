"""What the members of a first view, and its newcomers, are told of the run."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_decentral.elastic.option import Elastic
from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire.collective import Collective
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.sockets.mesh import Mesh

pytestmark = pytest.mark.threads
SECONDS = 20.0


class Crew:
    """Members whose connections are real, and whose views the test makes."""

    def __init__(self, names: str) -> None:
        self.meshes, self.members = dict[str, Mesh](), dict[str, Any]()
        for name in names:
            part = Collective(name, lambda other: self.meshes[other].place)
            self.meshes[name] = Mesh("127.0.0.1", name, {"meet": part.serve}, threading.Condition())
            state = SimpleNamespace(views={}, entered={}, without=lambda view, peer: False)
            there = SimpleNamespace(state=state)
            worker: Any = SimpleNamespace(name=name, lobby_client=there, collective=part, mesh=self.meshes[name])
            self.members[name] = Participant(Elastic(lobby="127.0.0.1:1"), SECONDS, worker)

    def enter(self, view: View) -> None:
        for name in view.members:
            self.members[name].view = self.members[name].entered = view

    def told(self, name: str) -> Any:
        return self.members[name].agreed(lambda: name)


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew("abcd")
    yield made
    for mesh in made.meshes.values():
        mesh.close()


def asks(crew: Crew, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = crew.told(name)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found


def test_in_the_first_view_all_have_what_the_oldest_has(crew: Crew) -> None:
    crew.enter(View(1, ("a", "b", "c"), 0, ("a", "b", "c"), "a", 3))
    assert asks(crew, "c", "b", "a") == {"a": "a", "b": "a", "c": "a"}


def test_where_the_oldest_has_ended_the_next_one_says_it(crew: Crew) -> None:
    crew.enter(View(1, ("a", "b", "c"), 0, ("a", "b", "c"), "a", 3))
    for name in "bc":
        crew.meshes[name].lost.add("a")
    assert asks(crew, "c", "b") == {"b": "b", "c": "b"}


def test_a_newcomer_is_told_by_who_was_there(crew: Crew) -> None:
    crew.enter(View(5, ("b", "a", "d"), 50, ("b", "a"), "a", 3))
    assert asks(crew, "d", "a", "b") in ({"a": None, "b": None, "d": was} for was in "ab")  # who answers first


def test_members_that_live_and_say_nothing_are_named(crew: Crew) -> None:
    crew.enter(View(5, ("b", "d"), 50, ("b",), "a", 3))
    crew.members["d"]._seconds = 0.1
    with pytest.raises(RuntimeError, match=r"b didn't send the run's state within 0.1 s"):
        crew.told("d")
