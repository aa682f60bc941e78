"""Assembly of a gossip step's exchange (peers, cliques, overlap, islands), with the drawing of a whole round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.traffic import Cliques, Partition, partitions
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.clique import CliqueExchange
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, InFlight, StepLinks, Traffic
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.wire.transport import Transport

# One round with delay 1, from top to bottom; time goes to the right:
#
#   training           update t | forward, backward t+1      | update t+1
#   Mixer              launch t:                             | land t:
#                      launch, depart                        | apply, then launch t+1
#   GatherExchange     this device's part                    | gather the parts          in an island of several devices
#   OverlapExchange    copy, hand over                       | take over                 on a host, with a delay:
#     leaving          | encode, send    \                                               two threads
#     arriving                            wait, decode, mix
#   ExchangeByStep     of step t, whatever that is:
#     CliqueExchange     all-reduce, where the step's graph is groups of equals
#     PeerExchange       send and receive, elsewhere and wherever messages are encoded
#   or CodedCliqueExchange  codes to owners of parts and back, for a rule whose mean may be encoded, too
#   Transport          gloo or NCCL
#
# A device queues the work of a round by itself: no threads, and in an island the whole round goes to a side stream.


def assembled(
    topology: Topology,
    weights: Weights,
    workers: int,
    worker: int,
    member: IslandMember,
    device: torch.device,
    codec: Codec,
    delay: int,
    cliques: Cliques,
) -> Exchange[Any]:
    """The exchange of one mixer. Every device of every worker calls it at the same point: it makes groups.

    Args:
        worker: of all `workers`, the one that this device belongs to.
        member: this device's part in its worker.
        cliques: `link.cliques_of`.
    """
    pool = Pool()  # what one exchange has landed serves the next one's round

    def of_all() -> Transport:
        over = member.peers([range(workers)])
        assert over is not None
        return over

    def among_peers() -> Exchange[Any]:
        return PeerExchange(topology, weights, of_all(), device, codec, pool)

    steps = None if cliques is Cliques.TOLD else partitions(topology, weights, workers)
    if steps is None:
        exchange = among_peers()
    elif cliques is Cliques.OWNERS:  # the rule has seen to it that all receive from all
        from lightning_decentral.gossip.wire.coded_clique import CodedCliqueExchange  # no other run reads it

        exchange = CodedCliqueExchange(topology, weights, of_all(), of_all(), device, codec, pool)
    elif all(steps):
        exchange = _by_cliques([step for step in steps if step], worker, member, device, pool)
    else:
        # A step that peers take has no clique of two, so that no group is made for it.
        alone = tuple((rank,) for rank in range(workers))
        reduced, sent = _by_cliques([step or alone for step in steps], worker, member, device, pool), among_peers()
        exchange = ExchangeByStep([reduced if step else sent for step in steps])
    return member.exchange(member.beside(exchange, device, delay))


def _by_cliques(
    steps: Sequence[Partition], worker: int, member: IslandMember, device: torch.device, pool: Pool
) -> CliqueExchange:
    # All cliques of a step at once, also those without this worker: making them is collective.
    made, own = set[tuple[int, ...]](), dict[tuple[int, ...], Transport]()
    for step in steps:
        if new := [clique for clique in step if len(clique) > 1 and clique not in made]:
            made.update(new)
            over = member.peers(new)
            own |= {clique: over for clique in new if over is not None and worker in clique}
    return CliqueExchange(steps, own, worker, device, pool)


class ExchangeByStep(Exchange[InFlight]):
    """Step t is exchange t mod period's. None of them encodes.

    Args:
        steps: the exchange of each step of a period; one may stand for several. All have one pool.
    """

    def __init__(self, steps: Sequence[Exchange[Any]]) -> None:
        self._steps = tuple(steps)
        # One exchange may stand for several steps: it is admitted and counted once.
        self._parts = tuple({id(exchange): exchange for exchange in steps}.values())
        self.pool, self.coder = steps[0].pool, steps[0].coder
        assert all(part.pool is self.pool for part in self._parts), "a buffer goes back to the pool it came from"

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        for part in self._parts:
            part.admit(buckets, combine)

    def _of(self, step: int) -> Exchange[Any]:
        return self._steps[step % len(self._steps)]

    def neighbours(self, step: int) -> StepLinks:
        return self._of(step).neighbours(step)

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        return self._of(step).copied(x, step, place)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> InFlight:
        launched: InFlight = self._of(step).launch(message, step, place, copied)
        return launched

    def depart(self, launched: Sequence[InFlight], step: int) -> None:
        self._of(step).depart(launched, step)

    def traffic(self) -> Traffic:
        return sum((part.traffic() for part in self._parts), Traffic())
