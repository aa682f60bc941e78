"""Values between threads: gathered, collected; what one can't send is an error on all."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.wire import objects
from lightning_decentral.shared.wire.objects import broadcast_world, collect_objects, gather_objects, gather_world
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.world import world

pytestmark = pytest.mark.threads


def value(rank: int) -> dict[Any, Any]:
    """Another length, other tensors and another structure on each worker; sizes that leave nothing aligned."""
    tensors = [torch.full((n,), rank, dtype=dtype) for n, dtype in ((rank, torch.uint8), (3, torch.float64))]
    return {rank: ("x" * rank, tensors[: rank + 1], None)}


def plain(found: Any) -> Any:
    return repr(found)


def test_every_worker_hears_every_value() -> None:
    found = world(3, lambda group: gather_objects(GlooTransport(group), value(group.rank())))
    assert [plain(row) for row in found] == [plain([value(r) for r in range(3)])] * 3


def test_worker_0_collects_what_the_others_send() -> None:
    found = world(3, lambda group: collect_objects(GlooTransport(group), value(group.rank())))
    assert plain(found) == plain([[value(r) for r in range(3)], [], []])


def test_a_second_collection_doesnt_hear_the_first() -> None:
    def worker(group: Any) -> list[Any]:
        over = GlooTransport(group)
        return [collect_objects(over, (n, group.rank(), torch.tensor([n]))) for n in range(3)]

    first, other = world(2, worker)
    assert plain(first) == plain([[(n, r, torch.tensor([n])) for r in range(2)] for n in range(3)])
    assert other == [[]] * 3


@pytest.mark.parametrize("call", [gather_objects, collect_objects])
def test_what_one_worker_cant_send_is_an_error_on_all(call: Any) -> None:
    """Nobody is left waiting, and the next call works."""

    def worker(group: Any) -> tuple[str, list[Any]]:
        over = GlooTransport(group)
        with pytest.raises(TypeError) as caught:
            call(over, [object()] if group.rank() == 1 else 1)
        return str(caught.value), gather_objects(over, group.rank())

    expected = r"worker 1 can't send a value to the others: it[0] is a builtins.object, which isn't sent"
    for line, after in world(3, worker):
        assert line.startswith(expected)
        assert after == [0, 1, 2]


def broadcasting(monkeypatch: pytest.MonkeyPatch, sent: Any, source: int) -> list[Any]:
    """What each of three workers gets; the world is the thread's own."""
    import threading

    here = threading.local()
    monkeypatch.setattr(objects, "connected", lambda: True)
    monkeypatch.setattr(objects, "everyone", lambda: here.over)

    def worker(group: Any) -> Any:
        here.over = GlooTransport(group)
        try:
            return broadcast_world(sent if group.rank() == source else "other", source)
        except TypeError as error:
            return str(error)

    return world(3, worker)


@pytest.mark.parametrize("sent", [None, True, "folder", ("a/b.ckpt", "0f"), {"lr": [0.1], "loss": [2.5]}, []])
@pytest.mark.parametrize("source", [0, 2])
def test_everyone_gets_the_sources_value(monkeypatch: pytest.MonkeyPatch, sent: Any, source: int) -> None:
    assert broadcasting(monkeypatch, sent, source) == [sent] * 3


def test_tensors_are_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [torch.arange(3, dtype=torch.bfloat16), torch.get_rng_state(), torch.empty(0)]
    for found in broadcasting(monkeypatch, sent, 1):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, sent, strict=True))


def test_what_cant_be_broadcast_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(found := broadcasting(monkeypatch, {"a": object()}, 1))) == 1
    assert "worker 1 can't send" in found[0]


def test_without_a_world_there_is_one_value_which_is_not_looked_at() -> None:
    odd = object()
    assert gather_world(odd) == [odd]
    assert broadcast_world(odd) is odd


def test_a_collection_holds_no_tensor_twice() -> None:
    """Bytes go from the sender's tensor into the one that worker 0 gets."""
    seen: list[Tensor] = []

    class Watched(GlooTransport):
        def exchange(self, sends: Any, receives: Any) -> Any:
            seen.extend(m.tensor for m in sends)
            return super().exchange(sends, receives)

    tensor = torch.ones(1000)
    world(2, lambda group: collect_objects(Watched(group), tensor))
    assert [t.data_ptr() for t in seen if len(t) == 4000] == [tensor.data_ptr()]
