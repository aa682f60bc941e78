"""An exchange beside the training: nobody waits before landing, errors surface there, threads end with their owner."""

import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import Combine, Gossip
from lightning_decentral.gossip.compute.link import Coder
from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, MessageInFlight
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import OverlapExchange, overlapped
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.device import WorkerThread
from tests.gossip.wire.test_exchange import Row

pytestmark = pytest.mark.threads

SECONDS = 10.0
CPU = torch.device("cpu")


class Slow(Exchange[MessageInFlight]):
    """Encodes as 10 times the message once `encode` is set, and has received as much once `arrive` is, the bucket
    `held` once `release` is."""

    def __init__(self, error: Exception | None = None, held: int | None = None) -> None:
        self.pool = Pool()
        self.coder = Coder(self.pool)
        self.encode, self.arrive, self.release = threading.Event(), threading.Event(), threading.Event()
        self.calls: list[str] = []
        self._error, self._held = error, held

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        return

    def neighbours(self, step: int) -> Neighbours:
        return Neighbours(0, {0: 0.5, 1: 0.5}, {1: 0.5})

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> MessageInFlight:
        assert self.encode.wait(SECONDS)
        if self._error and place == (self._held or 0):
            raise self._error
        self.calls.append(f"launch {place}")
        sent = self._copy(message, copied).mul_(10)
        return Slowly(self, sent, place, self.release if place == self._held else self.arrive)

    def depart(self, launched: Sequence[MessageInFlight], step: int) -> None:
        self.calls.append("depart")


@dataclass
class Slowly(MessageInFlight):
    exchange: Slow
    sent: Tensor
    place: int
    received: threading.Event

    def land(self) -> Tensor:
        assert self.received.wait(SECONDS)
        self.exchange.calls.append(f"land {self.place}")
        return self.sent + 1


def test_a_step_waits_for_nothing_but_what_it_lands() -> None:
    """x <- x + (mixed - sent) = x + 1 one step later; encoding and hearing happen after the step has returned."""
    inner = Slow()
    rows = [Row(torch.ones(33)), Row(torch.ones(2))]
    mixer = Mixer(rows, Gossip(), overlapped(inner, CPU, 1), 1)
    mixer.step()
    assert inner.calls == [], "nothing was encoded yet, and the step is over"
    inner.encode.set()
    inner.arrive.set()
    mixer.drain()
    assert sorted(inner.calls) == ["depart", "depart", "land 0", "land 1", "launch 0", "launch 1"]
    assert inner.calls[:2] == ["launch 0", "depart"]
    assert inner.calls[-1] == "land 1"
    assert [row.flat.tolist() for row in rows] == [[2.0] * 33, [2.0] * 2]
    assert mixer.traffic().in_flight_seconds > 0


def test_a_round_leaves_when_the_one_before_has_landed() -> None:
    """It is ready long before; two on the links at once would meet other hosts' rounds there."""
    inner = Slow()
    mixer = Mixer([Row(torch.ones(3))], Gossip(), overlapped(inner, CPU, 2), 2)
    inner.encode.set()
    mixer.step()
    mixer.step()
    seen(inner, "launch 0", 2)
    time.sleep(0.05)
    assert inner.calls == ["launch 0", "depart", "launch 0"]
    assert mixer.codec_errors() == [], "nothing is encoded: nobody waits to hear that"
    inner.arrive.set()
    mixer.drain()
    assert inner.calls == ["launch 0", "depart", "launch 0", "land 0", "depart", "land 0"]


@pytest.mark.parametrize("delay", [1, 2])
def test_all_but_the_last_bucket_leave_while_the_last_one_is_awaited(delay: int) -> None:
    """Bucket 2 of the first round is held back: 0 and 1 of the second one leave, 2 doesn't, nor the third round."""
    inner = Slow(held=2)
    mixer = Mixer(rows(), Gossip(rate=0.6), overlapped(inner, CPU, delay), delay)
    inner.encode.set()
    inner.arrive.set()
    training = threading.Thread(target=lambda: [mixer.step() for _ in range(delay + 1)])
    training.start()
    seen(inner, "depart", 3)
    time.sleep(0.05)
    assert inner.calls.count("depart") == 3
    assert [inner.calls.count(f"land {place}") for place in range(3)] == [1, 1, 0]
    inner.release.set()
    training.join(SECONDS)
    mixer.drain()
    assert inner.calls.count("depart") == 2 * (delay + 1)
    assert inner.calls.count("land 2") == delay + 1


def test_a_long_last_bucket_leaves_with_the_others() -> None:
    """Two neighbours' messages at once would fill the queues on the way."""
    inner = Slow()
    mixer = Mixer([Row(torch.ones(2)), Row(torch.ones(20))], Gossip(), overlapped(inner, CPU, 1), 1)
    inner.encode.set()
    inner.arrive.set()
    mixer.step()
    mixer.drain()
    assert inner.calls == ["launch 0", "launch 1", "depart", "land 0", "land 1"]


def rows() -> list[Row]:
    """Three, the last one short."""
    return [Row(torch.ones(30)), Row(torch.ones(34)), Row(torch.ones(4))]


def seen(inner: Slow, call: str, times: int) -> None:
    end = time.monotonic() + SECONDS
    while inner.calls.count(call) < times and time.monotonic() < end:
        time.sleep(0.01)


def test_settled_is_what_the_others_decode() -> None:
    exchange = OverlapExchange(inner := Slow())
    launched = exchange.launch(torch.ones(2), 0, 0)
    threading.Timer(0.05, inner.encode.set).start()
    launched.settle()
    assert launched.sent.tolist() == [10.0, 10.0]


def test_an_error_beside_the_training_surfaces_where_the_round_lands() -> None:
    exchange = OverlapExchange(inner := Slow(ConnectionError("lost neighbour 3")))
    launched = exchange.launch(torch.ones(2), 0, 0)
    exchange.depart([launched], 0)
    inner.encode.set()
    with pytest.raises(ConnectionError, match="lost neighbour 3"):
        launched.land()


def test_nothing_leaves_when_a_bucket_could_not_be_made_ready() -> None:
    """The others would take the next bucket for it."""
    exchange = OverlapExchange(inner := Slow(MemoryError("no room")))
    launched = exchange.launch(torch.ones(2), 0, 0)
    exchange.depart([launched], 0)
    inner.encode.set()
    with pytest.raises(MemoryError, match="no room"):
        launched.settle()
    assert inner.calls == []


def test_nothing_leaves_after_a_bucket_that_could_not() -> None:
    """Of a round whose first buckets are under way: whoever would hear a later one would take it for the missing."""
    inner = Slow(MemoryError("no room"), held=2)
    mixer = Mixer(rows(), Gossip(rate=0.6), overlapped(inner, CPU, 2), 2)
    inner.encode.set()
    inner.arrive.set()
    mixer.step()
    mixer.step()
    with pytest.raises(MemoryError, match="no room"):
        mixer.drain()
    with pytest.raises(MemoryError, match="no room"):
        mixer.extend([Row(torch.ones(1))])  # waits for the end of the lane
    assert inner.calls.count("depart") == 1


def test_at_delay_zero_and_on_a_device_the_exchange_stays_as_it_is() -> None:
    inner = Slow()
    assert overlapped(inner, CPU, 0) is inner
    assert overlapped(inner, torch.device("cuda"), 1) is inner
    assert overlapped(inner, CPU, 2) is not inner


def test_a_lane_keeps_the_order_records_no_graph_and_ends_with_its_owner() -> None:
    lane, done = WorkerThread("tested"), []
    errands = [lane.send(lambda i=i: done.append((i, torch.is_grad_enabled()))) for i in range(100)]
    errands[-1].exception()
    assert done == [(i, False) for i in range(100)]
    (thread,) = [t for t in threading.enumerate() if t.name == "tested"]
    assert thread.daemon
    del lane
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()
