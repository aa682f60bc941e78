"""Rounds over views: the peer exchange of whichever view is in force in a round.

    enter(view, round)     who takes part from this round on
    mixer.step(...)        as ever: neighbours by the view's size and this member's place in it

What a neighbour that ended would have said is this member's own: its weight stays here until the next view. With
symmetric weights the mean of those that go on is kept: a pair hears each other or, where one of them is lost or in
another view, neither does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.link import Coder, Direct
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Neighbours, Weights
from lightning_decentral.gossip.wire.exchange import Exchange, Traffic
from lightning_decentral.gossip.wire.peer import PeerExchange, PeerMessages
from lightning_decentral.shared.compute.buckets import Matrix, Pool
from lightning_decentral.shared.plan.elastic.view import View
from lightning_decentral.shared.wire.elastic.links import Links
from lightning_decentral.shared.wire.elastic.worker import ElasticWorker

Admitted = tuple[Sequence[Tensor], Sequence[Sequence[Matrix]], Combine]
KEPT_VIEWS = 4
"""Whose rounds may still be under way."""


class ForgivingExchange(PeerExchange):
    """What doesn't come was there before: the own message, in the place of every source's."""

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> PeerMessages:
        part = super().start(message, step, first)
        for source, header in part.headers.items():
            header.copy_(part.header)
            for arriving, own in zip(part.buffers[source], message, strict=True):
                arriving.copy_(own)
        return part


@dataclass
class ElasticExchange(Exchange[PeerMessages]):
    """One `PeerExchange` for each view, on the host; messages travel as they are."""

    topology: Topology
    weights: Weights
    worker: ElasticWorker
    pool: Pool = field(default_factory=Pool)
    coder: Coder = field(init=False)

    def __post_init__(self) -> None:
        self.coder = Direct(self.pool)
        self._admitted: list[Admitted] = []
        self._since: list[tuple[int, PeerExchange, Links]] = []
        self._views: list[View] = []
        self._left_out = 0
        self._earlier = Traffic()

    def enter(self, view: View, round: int) -> None:
        """This view is in force from this round on. Rounds rise, and may leave some out."""
        if self._views[-1:] == [view]:
            return
        links = Links(self.worker, view, self._lose)
        exchange = ForgivingExchange(self.topology, self.weights, links, torch.device("cpu"), pool=self.pool)
        for admitted in self._admitted:
            exchange.admit(*admitted)
        self._views = [*self._views, view][-KEPT_VIEWS:]
        self._since.append((round, exchange, links))
        for _, old, _ in self._since[:-KEPT_VIEWS]:
            self._earlier += old.traffic()
        self._since = self._since[-KEPT_VIEWS:]

    def _lose(self) -> None:
        self._left_out += 1

    @property
    def lost(self) -> int:
        """Tensors so far that didn't come."""
        return self._left_out

    def _of(self, step: int) -> tuple[PeerExchange, Links]:
        return next((exchange, links) for round, exchange, links in reversed(self._since) if round <= step)

    def neighbours(self, step: int) -> Neighbours:
        return self._of(step)[0].neighbours(step)

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        if combine.init(buckets[0] if buckets else torch.zeros(1)):
            raise ValueError(
                f"{type(combine).__name__} keeps numbers that belong to all workers together, which none may leave: "
                "use Gossip() where workers come and go"
            )
        self._admitted.append((buckets, matrices, combine))
        self.coder.admit(buckets, matrices, combine)
        for _, exchange, _ in self._since:
            exchange.admit(buckets, matrices, combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> PeerMessages:
        return self._of(step)[0].start(message, step, first)

    def depart(self, started: Sequence[PeerMessages], step: int) -> None:
        exchange, links = self._of(step)
        links.round = step
        exchange.depart(started, step)

    def traffic(self) -> Traffic:
        return sum((exchange.traffic() for _, exchange, _ in self._since), self._earlier)
