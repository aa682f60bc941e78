"""What an assembled exchange holds: as many buffers after many rounds as after few, and the same groups on all."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import Codec, Combine, Gossip, Int8, Own, Plain
from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.plan.planned_traffic import Cliques
from lightning_decentral.gossip.plan.topology.one_peer import BaseGraph, Hypercube, OnePeerExponential
from lightning_decentral.gossip.plan.topology.static import Complete, Ring
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.assembly import ExchangeByStep, assembled
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import Message, Transport
from tests.gossip.topologies import every_topology
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
        peers=lambda groups: next((Alike(len(g)) for g in groups if 0 in g), None),
        overlaps=True,
        exchange=lambda exchange: exchange,
    )
    return assembled(topology, Own(), workers, 0, member, torch.device("cpu"), Plain(), 0, Cliques.RING)


def groups_of(
    topology: Topology, workers: int, worker: int, codec: Codec, rule: Combine | None = None
) -> list[list[tuple[int, ...]]]:
    """Those of each call, in the order in which this worker makes them."""
    made: list[list[tuple[int, ...]]] = []

    def peers(groups: Sequence[Sequence[int]]) -> Transport | None:
        made.append([tuple(group) for group in groups])
        return next((Alike(len(group)) for group in groups if worker in group), None)

    member: Any = SimpleNamespace(peers=peers, overlaps=True, exchange=lambda exchange: exchange)
    cliques = cliques_of(codec, rule or Gossip(), topology, Own(), workers)
    assembled(topology, Own(), workers, worker, member, torch.device("cpu"), codec, 0, cliques)
    return made


def averaged(topology: Topology, workers: int, step: int) -> set[tuple[int, ...]] | None:
    """Of a step whose matrix is the mean over cliques; those of one are none."""
    matrix = mixing_matrix(topology, workers, step)
    heard = [tuple(j for j in range(workers) if row[j]) for row in matrix]
    means = all(abs(row[j] - 1 / len(mine)) < 1e-12 for row, mine in zip(matrix, heard, strict=True) for j in mine)
    closed = all(heard[j] == mine for mine in heard for j in mine)
    return {mine for mine in heard if len(mine) > 1} if means and closed else None


@pytest.mark.parametrize(("topology", "workers"), every_topology(range(2, 9), most_fragments=1), ids=str)
def test_all_workers_make_the_same_groups_in_one_order(topology: Topology, workers: int) -> None:
    """Else one would wait in a group's making for who is in another's. All are one group for messages; each clique is
    one where a step's cliques, of more than two, are all-reduced."""
    made = groups_of(topology, workers, 0, Plain())
    assert all(groups_of(topology, workers, worker, Plain()) == made for worker in range(1, workers))
    assert groups_of(topology, workers, 0, Int8()) == [[everyone := tuple(range(workers))]]
    assert all(len({j for group in call for j in group}) == sum(map(len, call)) for call in made)  # none is in two
    each = [group for call in made for group in call]
    steps = [averaged(topology, workers, step) for step in range(topology.period(workers))]
    reduced = [cliques for cliques in steps if cliques and any(len(clique) > 2 for clique in cliques)]
    if reduced and all(cliques is not None for cliques in steps):  # then pairs are groups, too
        assert sorted(each) == sorted(set().union(*(cliques or () for cliques in steps)))
    else:
        assert sorted(each) == sorted([*set().union(*reduced), everyone])


@pytest.mark.parametrize(("topology", "calls"), [(Hypercube(), 1), (BaseGraph(max_degree=2), 6)], ids=repr)
def test_groups_are_made_by_the_step_however_many_workers_there_are(topology: Topology, calls: int) -> None:
    """Hundreds of cliques of 3 are made in a few calls; pairs are peers, in one group."""
    workers = 3**6 if calls > 1 else 512
    made = groups_of(topology, workers, 0, Plain())
    assert len(made) == calls
    assert sum(map(len, made)) == (calls * workers // 3 if calls > 1 else 1)


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
