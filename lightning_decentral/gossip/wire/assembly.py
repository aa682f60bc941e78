"""Makes the exchange of a gossip run from its parts (peers, cliques, overlap, islands), with a drawing of a round.

`CliqueExchange` is the all-reduce for steps whose graph is disjoint cliques of equal weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.link import Coder
from lightning_decentral.gossip.compute.mixing import Verdicts, refuse
from lightning_decentral.gossip.plan.planned_traffic import Cliques, Partition, partitions
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Neighbours, Weights
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, MessageInFlight, StepLinks, Traffic
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.device import stopwatch
from lightning_decentral.shared.compute.health import scales_in, sound, stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class CliqueMessage(MessageInFlight):
    """Message in flight: one bucket that a clique sums up."""

    exchange: "CliqueExchange"
    clique: tuple[int, ...]
    step: int
    sent: Tensor  # [elements]
    header: Tensor  # int64 [HEADER]
    total: Tensor  # [elements]: this worker's term, then the sum
    headers: Sequence[Tensor] = ()
    pending: Sequence[Pending] = ()

    def land(self) -> Tensor:
        """Return the mean over workers with finite messages, or the own message if one was far too large."""
        exchange, total = self.exchange, self.total
        exchange.waited.during(pending.wait for pending in self.pending)
        headers = torch.stack(list(self.headers))
        sane, finite = sound(scales_in(headers)), torch.isfinite(scales_in(headers))
        exchange.verdicts.judge(self.step, self.clique, headers, sane)
        received = finite.sum()  # all workers, unless a message was refused
        # On a GPU always: a test on the host would wait for the device.
        if total.device.type != "cpu" or int(received) < len(self.clique):
            total.div_((received.clamp(min=1) / len(self.clique)).to(total.dtype))
        # The sum isn't used either if all messages were refused: an empty sum is no model.
        taken = (sane == finite).all() & finite.any()
        refuse(total, self.sent, taken)
        if exchange.verdicts.complaint:
            # No message can heal this worker: NaN instead, which the next round's sum leaves out.
            mixed = total if bool(taken) else total.fill_(torch.nan)
            late = bool(taken) and bool(sane[self.clique.index(exchange.rank)])
            exchange.verdicts.refuse_own(mixed.clone(), mixed, late)
        return total


@dataclass
class CliqueExchange(Exchange[CliqueMessage]):
    """All-reduces the mean inside disjoint cliques of workers. A clique of c workers sends 2 (c - 1) / c of the
    parameters' bytes per worker, where sends and receives would take c - 1. A message with NaN or infinity is left out
    of the mean and counted. A message with far too large numbers is in the sum before any worker can know: all refuse
    the sum, and each keeps its own parameters in that round."""

    cliques: Sequence[Sequence[tuple[int, ...]]]  # for each phase a partition of the workers
    transports: Mapping[tuple[int, ...], Transport]  # one for each clique of several workers with this worker
    rank: int
    device: torch.device
    pool: Pool = field(default_factory=Pool)  # as in `PeerExchange`
    coder: Coder = field(init=False)

    def __post_init__(self) -> None:
        self.coder = Coder(self.pool)
        self.verdicts, self.waited = Verdicts(self.rank), stopwatch(self.device)
        self._bytes_sent = self._elements = 0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.coder.admit(buckets, combine)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def _clique(self, step: int) -> tuple[int, ...]:
        return next(c for c in self.cliques[step % len(self.cliques)] if self.rank in c)

    def neighbours(self, step: int) -> Neighbours:
        clique = self._clique(step)
        row = dict.fromkeys(clique, 1 / len(clique))
        return Neighbours(self.rank, row, {j: w for j, w in row.items() if j != self.rank})

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> CliqueMessage:
        """Launch a message. Memory until mixed: two copies of the message, one of which becomes the sum."""
        clique, sent = self._clique(step), self._copy(message, copied)
        header = stated([step, self._elements], [sent], self.device)
        # Divided before the sum, which could overflow in half precision.
        total = torch.div(sent, len(clique), out=self.pool.take(sent))
        # The sender leaves out its own message with NaN, which no worker could remove from the sum.
        nothing = torch.zeros((), dtype=sent.dtype, device=sent.device)
        refuse(total, nothing, torch.isfinite(scales_in(header)))
        return CliqueMessage(self, clique, step, sent, header, total)

    def depart(self, launched: Sequence[CliqueMessage], step: int) -> None:
        for message in launched:
            transport, size, total = self.transports[message.clique], len(message.clique), message.total
            gathering, message.headers = transport.all_gather(message.header)
            message.pending = [gathering, transport.all_reduce(total)]
            self._bytes_sent += 2 * (size - 1) * total.numel() * total.element_size() // size

    def traffic(self) -> Traffic:
        waited, refused = self.waited.seconds(), self.verdicts.refused
        return Traffic(bytes_sent=self._bytes_sent, wait_seconds=waited, refused=refused)


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
    worker: int,  # worker of this device
    member: IslandMember,  # this device as a member of its island
    device: torch.device,
    codec: Codec,
    delay: int,
    cliques: Cliques,  # `link.cliques_of`
) -> Exchange[Any]:
    """Make the exchange of one mixer and its process groups. Collective: every device of every worker calls it."""
    pool = Pool()  # buffers of one exchange are used by the next round's exchange

    def of_all() -> Transport:
        over = member.peers([range(workers)])
        assert over is not None
        return over

    def among_peers() -> Exchange[Any]:
        return PeerExchange(topology, weights, of_all(), device, codec, pool)

    steps = None if cliques is Cliques.PEERS else partitions(topology, weights, workers)
    if steps is None:
        exchange = among_peers()
    elif cliques is Cliques.OWNERS:  # the rule has checked that all receive from all
        from lightning_decentral.gossip.wire.coded_clique import CodedCliqueExchange  # no other run reads it

        exchange = CodedCliqueExchange(topology, weights, of_all(), device, codec, pool, back=of_all())
    elif all(steps):
        exchange = _by_cliques([step for step in steps if step], worker, member, device, pool)
    else:
        # A step of peers has no cliques, so that no process group is made for it.
        alone = tuple((rank,) for rank in range(workers))
        reduced, sent = _by_cliques([step or alone for step in steps], worker, member, device, pool), among_peers()
        exchange = ExchangeByStep([reduced if step else sent for step in steps])
    return member.exchange(overlapped(exchange, device, delay) if member.overlaps else exchange)


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


class ExchangeByStep(Exchange[MessageInFlight]):
    """Uses exchange t mod period in step t; all exchanges share a pool, and none encodes messages."""

    def __init__(self, steps: Sequence[Exchange[Any]]) -> None:
        self._steps = tuple(steps)
        # An exchange may serve several steps: it is counted once.
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

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> MessageInFlight:
        launched: MessageInFlight = self._of(step).launch(message, step, place, copied)
        return launched

    def depart(self, launched: Sequence[MessageInFlight], step: int) -> None:
        self._of(step).depart(launched, step)

    def traffic(self) -> Traffic:
        return sum((part.traffic() for part in self._parts), Traffic())
