"""All-reduce exchange: the mean of a clique, where a step's graph is disjoint cliques of equal weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.link import Direct
from lightning_decentral.gossip.compute.mixing import Verdicts, refuse
from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, InFlight, Traffic
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.device import stopwatch
from lightning_decentral.shared.compute.health import scales_in, sound, stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class CliqueMessage(InFlight):
    """One bucket that a clique sums up."""

    exchange: "CliqueExchange"
    clique: tuple[int, ...]
    step: int
    sent: Tensor  # [elements]
    header: Tensor  # int64 [HEADER]
    total: Tensor  # [elements], of this worker's part first
    headers: Sequence[Tensor] = ()
    pending: Sequence[Pending] = ()

    def land(self) -> Tensor:
        """The mean of those whose messages were finite; this worker's own where one was absurd."""
        exchange, total = self.exchange, self.total
        exchange.waited.during(pending.wait for pending in self.pending)
        headers = torch.stack(list(self.headers))
        sane, finite = sound(scales_in(headers)), torch.isfinite(scales_in(headers))
        exchange.verdicts.judge(self.step, self.clique, headers, sane)
        received = finite.sum()  # all, unless someone's message was refused
        # A device isn't asked.
        if total.device.type != "cpu" or int(received) < len(self.clique):
            total.div_((received.clamp(min=1) / len(self.clique)).to(total.dtype))
        # Nor where all were refused: a sum of nobody is no model.
        taken = (sane == finite).all() & finite.any()
        refuse(total, self.sent, taken)
        if exchange.verdicts.complaint:
            # Nothing to be healed by: NaN instead, which the next round's sum leaves out.
            mixed = total if bool(taken) else total.fill_(torch.nan)
            late = bool(taken) and bool(sane[self.clique.index(exchange.rank)])
            exchange.verdicts.refuse_own(mixed.clone(), mixed, late)
        return total


@dataclass
class CliqueExchange(Exchange[CliqueMessage]):
    """All-reduce inside disjoint cliques: the mean of this worker's clique. It takes 2 (c - 1) / c of the parameters'
    bytes for a clique of c workers, where sends and receives would take c - 1.

    A message with NaN or infinity is left out of the mean and counted. One with numbers absurd next to the others' was
    in the sum before anybody could know: all refuse the sum, and each keeps its own parameters in that round.

    Args:
        cliques: one partition of the workers for each phase (`traffic.partitions`).
        transports: one for each clique of more than one worker that this worker belongs to.
        pool: as of `PeerExchange`.
    """

    cliques: Sequence[Sequence[tuple[int, ...]]]
    transports: Mapping[tuple[int, ...], Transport]
    rank: int
    device: torch.device
    pool: Pool = field(default_factory=Pool)
    coder: Direct = field(init=False)

    def __post_init__(self) -> None:
        self.coder = Direct(self.pool)
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
        """Memory until landed: two copies of the message, one of which becomes the sum."""
        clique, sent = self._clique(step), self._copy(message, copied)
        header = stated([step, self._elements], [sent], self.device)
        # Divided before the sum, which in half precision could overflow.
        total = torch.div(sent, len(clique), out=self.pool.take(sent))
        # The sender itself leaves out a message with NaN: nobody could take it out of the sum.
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
