"""Messages between workers of one process: who waits lets others go on, and what is lent is copied where it must be."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.wire.in_process import InProcessTransport, Lent, Mailboxes
from lightning_decentral.shared.wire.pending import PeerLost
from lightning_decentral.shared.wire.transport import Message

pytestmark = pytest.mark.threads
SIZE = 4


def each(call: Callable[[InProcessTransport], Any], boxes: Mailboxes | None = None, size: int = SIZE) -> list[Any]:
    """What the call gives on every worker, in a thread of its own, one at a time."""
    boxes = boxes or Mailboxes(wait_seconds=20)

    def one(rank: int) -> Any:
        with boxes.turn:
            return call(InProcessTransport(boxes, "all", rank, size))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def own(rank: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank))


def test_sums_are_taken_in_the_order_of_ranks() -> None:
    def summed(over: InProcessTransport) -> tuple[Tensor, Tensor]:
        whole, part = own(over.rank), own(over.rank)
        for pending in (over.all_reduce(whole), over.reduce(part, 2)):
            pending.wait()
        return whole, part

    found, expected = each(summed), ((own(0) + own(1)) + own(2)) + own(3)
    assert all(torch.equal(whole, expected) for whole, _ in found)
    assert torch.equal(found[2][1], expected)
    assert torch.equal(found[0][1], own(0))


def test_what_was_sent_may_be_overwritten_after_the_wait() -> None:
    def passed(over: InProcessTransport) -> list[Tensor]:
        given, heard, told = own(over.rank), [torch.empty(1000) for _ in range(2)], own(over.rank)
        others = [(over.rank + k) % SIZE for k in (1, SIZE - 1)]
        leaving, coming = over.exchange(
            [Message(other, given, 0) for other in others],
            [Message(other, tensor, 0) for other, tensor in zip(others, heard, strict=True)],
        )
        for pending in leaving:  # nobody has read it yet
            pending.wait()
        given.zero_()
        gathering, rows = over.all_gather(told)
        gathering.wait()
        told.zero_()
        for pending in coming:
            pending.wait()
        first = own(over.rank)
        over.broadcast(first, 1).wait()
        return [*heard, *rows, first]

    for rank, (after, before, *rows, first) in enumerate(each(passed)):
        assert torch.equal(after, own((rank + 1) % SIZE))
        assert torch.equal(before, own((rank - 1) % SIZE))
        assert all(torch.equal(row, own(k)) for k, row in enumerate(rows))
        assert torch.equal(first, own(1))


def test_who_comes_in_time_reads_the_very_tensor() -> None:
    tensor, read = torch.ones(3), list[int]()
    lent = Lent(tensor, 2)
    lent.read(lambda there: read.append(there.data_ptr()))
    lent.settle()
    tensor.zero_()
    lent.read(lambda there: read.append(there.data_ptr()))
    lent.read(lambda there: read.append(int(there.sum())))
    assert read[0] == tensor.data_ptr() != read[1]
    assert read[2] == 3


def test_one_worker_runs_at_a_time_and_who_waits_lets_others_go_on() -> None:
    running, most = [0], [0]

    def crowded(over: InProcessTransport) -> None:
        for _ in range(3):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.002)
            running[0] -= 1
            over.all_reduce(torch.ones(1)).wait()

    each(crowded)
    assert most == [1]


def test_who_waits_in_vain_hears_of_it() -> None:
    boxes = Mailboxes(wait_seconds=20)

    def lonely(over: InProcessTransport) -> str:
        if over.rank:
            boxes.close()
            return ""
        with pytest.raises(PeerLost, match="another worker of this rehearsal has ended"):
            over.all_reduce(torch.ones(1)).wait()
        return "heard"

    assert each(lonely, boxes, 2) == ["heard", ""]
