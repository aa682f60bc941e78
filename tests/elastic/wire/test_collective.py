"""What members compute together: the same for all, also where the oldest ends before or while it answers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lightning_decentral.elastic.compute.gathered import means_of, reduced
from lightning_decentral.elastic.wire import collective
from lightning_decentral.elastic.wire.collective import Collective
from lightning_decentral.elastic.wire.sockets.mesh import Mesh

SECONDS = 20.0


class Company:
    """Members on threads, by the letters of their names; those in `gone` are known to have ended."""

    def __init__(self, names: str) -> None:
        self.gone: set[str] = set()
        self.names = names
        self.parts = {name: Collective(name, self.place) for name in names}
        self.meshes = {
            name: Mesh("127.0.0.1", name, {"meet": part.serve}, threading.Condition())
            for name, part in self.parts.items()
        }
        self.results: dict[str, Any] = {}

    def place(self, name: str) -> str:
        return self.meshes[name].place

    def present(self) -> Sequence[str]:
        return [name for name in self.names if name not in self.gone]

    def end(self, name: str) -> None:
        self.meshes[name].close()
        self.gone.add(name)

    def meets(self, name: str, value: Any, made: Callable[[Sequence[Any]], Any], key: Any = (1, 0)) -> threading.Thread:
        def run() -> None:
            self.results[name] = self.parts[name].meet(key, value, made, self.present, SECONDS)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def company() -> Iterator[Company]:
    made = Company("abc")
    yield made
    for mesh in made.meshes.values():
        mesh.close()


def joined(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_all_have_the_mean_to_the_bit(company: Company) -> None:
    values = {name: [torch.randn(100, 100), torch.tensor(i)] for i, name in enumerate("abc")}
    joined([company.meets(name, value, means_of) for name, value in values.items()])
    mean = torch.stack([value[0] for value in values.values()]).mean(0)
    for name in "abc":
        found, number = company.results[name]
        assert torch.equal(found, company.results["a"][0])
        torch.testing.assert_close(found, mean)
        assert number == 0  # what isn't floating point is the oldest's


def test_without_the_oldest_the_next_one_answers(company: Company) -> None:
    waiting = [company.meets(name, name, list) for name in "bc"]
    time.sleep(0.2)
    assert not company.results  # they wait for the oldest, who lives
    company.end("a")
    joined(waiting)
    assert company.results == {"b": ["b", "c"], "c": ["b", "c"]}


def test_who_lost_the_oldest_as_it_answered_has_what_the_others_have(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, answered = collective.send_value, list[str]()

    def sends(connection: Any, header: dict[str, Any], value: Any) -> None:
        if not header:  # an answer
            answered.append(value)
            if len(answered) == 2:
                company.gone.add("a")
                connection.close()
                return
        send(connection, header, value)

    monkeypatch.setattr(collective, "send_value", sends)
    joined([company.meets(name, name, list) for name in "abc"])
    assert company.results == {name: ["a", "b", "c"] for name in "abc"}
    assert len(answered) >= 2  # by the oldest; a third by the next, unless that is the one who lost its answer


def test_who_comes_after_the_result_gets_it(company: Company) -> None:
    company.gone.add("c")
    joined([company.meets(name, name, list) for name in "ab"])
    company.gone.clear()
    joined([company.meets("c", "late", list)])
    assert company.results["c"] == ["a", "b"]


def test_who_is_asked_for_something_that_is_over_has_no_answer(company: Company) -> None:
    company.gone |= {"b", "c"}
    for nth in range(collective.KEPT + 2):
        joined([company.meets("a", nth, list, (1, nth))])
    company.gone = {"c"}
    joined([company.meets("b", "alone", list, (0, 0))])
    assert company.results["b"] == ["alone"]


def test_who_begins_with_a_view_gets_what_was_kept_for_it_by_one_that_lives(company: Company) -> None:
    found: list[Any] = []

    def asks() -> None:
        found.append(company.parts["c"].kept(3, lambda: [n for n in company.present() if n != "c"], SECONDS))

    company.parts["a"].keep(2, "of another view")
    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    time.sleep(0.1)
    company.end("a")
    company.parts["b"].keep(3, {"best": torch.tensor(0.5), "path": "x.ckpt"})
    joined([thread])
    assert found == [{"best": torch.tensor(0.5), "path": "x.ckpt"}]
    company.end("b")
    asks()
    assert found[1] is None


def test_reductions_equal_torch() -> None:
    rows = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])]
    whole = torch.stack(rows)
    for name in ("sum", "mean", "amin", "amax"):
        assert torch.equal(reduced(name.removeprefix("a"), rows), getattr(whole, name)(0))
    assert reduced("avg", [torch.tensor(1), torch.tensor(2)]) == 1.5
    with pytest.raises(ValueError, match="unknown reduction"):
        reduced("median", rows)


def test_half_precision_is_summed_in_single() -> None:
    rows = [[torch.full((1,), 1.0, dtype=torch.bfloat16)], [torch.full((1,), 1.0078125, dtype=torch.bfloat16)]] * 128
    (mean,) = means_of(rows)
    assert mean.dtype == torch.bfloat16
    assert 1.0 <= float(mean) <= 1.0078125
