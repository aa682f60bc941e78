"""All-reduce exchange: the mean of a clique, where a step's graph is disjoint cliques of equal weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.integrity import Verdicts, refuse
from lightning_decentral.gossip.compute.link import Direct
from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.gossip.wire.exchange import Exchange, Started, Tally, Traffic
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.health import scales_in, sound, stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class CliqueMessages(Started):
    """Buckets that a clique sums up."""

    exchange: "CliqueExchange"
    clique: tuple[int, ...]
    step: int
    first: int
    row: Tensor
    message: Sequence[Tensor]
    totals: Sequence[Tensor]
    rows: Sequence[Tensor] = ()
    pending: Sequence[Pending] = ()
    departed: float = 0.0

    def land(self) -> list[Tensor]:
        return self.exchange.landed(self)


@dataclass
class CliqueExchange(Exchange[CliqueMessages]):
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
        self._verdicts = Verdicts(self.rank)
        self._tally = Tally(self.device)
        self._elements = 0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.coder.admit(buckets, combine)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def _clique(self, step: int) -> tuple[int, ...]:
        return next(c for c in self.cliques[step % len(self.cliques)] if self.rank in c)

    def neighbours(self, step: int) -> Neighbours:
        clique = self._clique(step)
        row = dict.fromkeys(clique, 1 / len(clique))
        return Neighbours(self.rank, row, {j: w for j, w in row.items() if j != self.rank})

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> CliqueMessages:
        """Memory until landed: one copy of the message."""
        clique = self._clique(step)
        row = stated([step, self._elements], message, self.device)
        # Divided before the sum, which in half precision could overflow.
        totals = [torch.div(m, len(clique), out=self.pool.take(m)) for m in message]
        # The sender itself leaves out a message with NaN: nobody could take it out of the sum.
        nothing = [torch.zeros((), dtype=m.dtype, device=m.device) for m in message]
        refuse(totals, nothing, torch.isfinite(scales_in(row)))
        return CliqueMessages(self, clique, step, first, row, message, totals)

    def depart(self, started: Sequence[CliqueMessages], step: int) -> None:
        for part in started:
            transport, size = self.transports[part.clique], len(part.clique)
            gathering, part.rows = transport.all_gather(part.row)
            part.pending = [gathering, *map(transport.all_reduce, part.totals)]
            part.departed = perf_counter()
            self._tally.bytes_sent += 2 * (size - 1) * sum(t.numel() * t.element_size() for t in part.totals) // size

    def landed(self, part: CliqueMessages) -> list[Tensor]:
        """The mean of those whose messages were finite; this worker's own where one was absurd."""
        self._tally.land(part.pending, part.departed, part.first)
        said = torch.stack(list(part.rows))
        sane, finite = sound(scales_in(said)), torch.isfinite(scales_in(said))
        self._verdicts.hear(part.step, part.clique, said, sane)
        heard = finite.sum()  # all, unless someone's message was refused
        # A device isn't asked.
        for total in part.totals if self.device.type != "cpu" or int(heard) < len(part.clique) else ():
            total.div_((heard.clamp(min=1) / len(part.clique)).to(total.dtype))
        # Nor where all were refused: a sum of nobody is no model.
        taken = (sane == finite).all() & finite.any()
        refuse(part.totals, part.message, taken)
        if self._verdicts.complaint:
            # Nothing to be healed by: NaN instead, which the next round's sum leaves out.
            nothing = [] if bool(taken) else part.totals
            mixed = [total.fill_(torch.nan) for total in nothing] or part.totals
            late = bool(taken) and bool(sane[part.clique.index(self.rank)])
            self._verdicts.refuse_own([total.clone() for total in mixed], mixed, late)
        return list(part.totals)

    def traffic(self) -> Traffic:
        return self._tally.traffic(self._verdicts.refused)
