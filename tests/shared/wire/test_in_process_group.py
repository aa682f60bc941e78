"""torch.distributed's calls on threads of one process: each answers for its worker, and sums are everybody's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_decentral.shared.wire.in_process import InProcessTransport, Mailboxes
from lightning_decentral.shared.wire.in_process_group import InProcessGroup, ThreadsWorld

SIZE = 3


def world(call: Callable[[int], Any]) -> list[Any]:
    boxes, threads = Mailboxes(), ThreadsWorld()

    def run(rank: int) -> Any:
        threads.join(InProcessGroup(InProcessTransport(boxes, "default", rank, SIZE)))
        return call(rank)

    with threads.installed(), ThreadPoolExecutor(SIZE) as pool:
        assert not dist.is_initialized()  # this thread has joined nothing
        return list(pool.map(run, range(SIZE)))


def test_a_thread_has_its_workers_place() -> None:
    asked = world(lambda rank: (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend()))
    assert asked == [(True, rank, SIZE, "gloo") for rank in range(SIZE)]
    assert not dist.is_initialized()


def test_collectives_are_everybodys() -> None:
    def call(rank: int) -> list[Any]:
        total, most = torch.tensor([1.0 + rank]), torch.tensor([rank])
        dist.all_reduce(total, async_op=True).wait()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        rows, flat, value = [torch.zeros(2) for _ in range(SIZE)], torch.zeros(2 * SIZE), torch.tensor(float(rank))
        dist.all_gather(rows, torch.full((2,), float(rank)))
        dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
        dist.broadcast(value, 1)
        objects, one = [None] * SIZE, [{"rank": rank}]
        dist.all_gather_object(objects, rank)
        dist.broadcast_object_list(one, 2)
        dist.barrier()
        return [float(total), int(most), torch.stack(rows).tolist(), flat.tolist(), float(value), objects, one]

    rows = [[float(rank)] * 2 for rank in range(SIZE)]
    assert world(call) == [[6.0, 2, rows, [n for row in rows for n in row], 1.0, [0, 1, 2], [{"rank": 2}]]] * SIZE


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("reduce_scatter", lambda: dist.reduce_scatter(torch.zeros(1), [torch.zeros(1)] * SIZE)),
        ("send", lambda: dist.send(torch.zeros(1), (dist.get_rank() + 1) % SIZE)),
        ("new_group", lambda: dist.new_group([0, 1])),
        ("by", lambda: dist.all_reduce(torch.zeros(1, dtype=torch.int), dist.ReduceOp.BAND)),
    ],
)
def test_what_isnt_served_is_refused_by_name(name: str, call: Callable[[], Any]) -> None:
    def refused(rank: int) -> str:
        with pytest.raises(ValueError, match="workers of one process") as error:
            call()
        return str(error.value)

    for text in world(refused):
        assert name in text
        assert "\n" not in text
