"""What an assembled exchange holds: as many buffers after many rounds as after few."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import Gossip, Own, Plain
from lightning_decentral.gossip.plan.topology.one_peer import BaseGraph, OnePeerExponential
from lightning_decentral.gossip.plan.topology.static import Complete, Ring
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.wire.assembly import ExchangeByStep, assembled
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import Message, Transport
from tests.gossip.wire.test_exchange import Row

HERE = Together([])


class Alike(Transport):
    """Worker 0 of so many that all send what it sends."""

    def __init__(self, size: int) -> None:
        self.group, self.rank, self.size = None, 0, size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        said = {message.tag: message.tensor for message in sends}
        for message in receives:
            message.tensor.copy_(said[message.tag])
        return [HERE for _ in sends], [HERE for _ in receives]

    def all_reduce(self, tensor: Tensor) -> Pending:
        tensor.mul_(self.size)
        return HERE

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        return HERE, [tensor.clone() for _ in range(self.size)]


def exchange_of(topology: Topology, workers: int) -> Any:
    member: Any = SimpleNamespace(
        peers=lambda group: Alike(len(group)) if 0 in group else None, exchange=lambda exchange: exchange
    )
    return assembled(topology, Own(), workers, 0, member, torch.device("cpu"), Plain(), 0)


@pytest.mark.parametrize(
    ("topology", "workers"), [(BaseGraph(max_degree=2), 5), (OnePeerExponential(), 8), (Ring(), 5), (Complete(), 4)],
    ids=str,
)  # fmt: skip
def test_a_pool_holds_no_more_after_many_periods(topology: Topology, workers: int) -> None:
    exchange = exchange_of(topology, workers)
    mixer = Mixer([Row(torch.zeros(10))], Gossip(), exchange, 1)
    held = []
    for _ in range(4):
        for _ in range(topology.period(workers)):
            mixer.step()
        held.append(sum(map(len, exchange.pool._free.values())))
    assert held[1:] == held[1:2] * 3


def test_the_case_that_alternates_alternates() -> None:
    """`BaseGraph` on 5 workers begins with a clique, so that its peers' pool would be another."""
    exchange = exchange_of(BaseGraph(max_degree=2), 5)
    assert isinstance(exchange, ExchangeByStep)
    kinds = [type(part).__name__ for part in exchange._steps]
    assert kinds[0] == "CliqueExchange"
    assert "PeerExchange" in kinds
