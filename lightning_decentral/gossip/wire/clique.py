"""The mean of a clique by all-reduce, where a step's graph is disjoint cliques."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.integrity import Verdicts, finite, header_of, refuse
from lightning_decentral.gossip.wire.exchange import Exchange, Land, Tally, Traffic, number
from lightning_decentral.shared.compute.buckets import Matrix, Pool
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class _Ready:
    """Between `start`, `depart` and landing."""

    transport: Transport
    row: Tensor
    totals: Sequence[Tensor]
    rows: Sequence[Tensor] = ()
    pending: Sequence[Pending] = ()
    departed: float = 0.0

    def depart(self) -> None:
        gathering, self.rows = self.transport.all_gather(self.row)
        self.pending = [gathering, *map(self.transport.all_reduce, self.totals)]
        self.departed = perf_counter()


@dataclass
class CliqueExchange(Exchange):
    """All-reduce inside disjoint cliques: the mean of this worker's clique, at 2 (c - 1) / c of the parameters' bytes
    for a clique of c workers, where sends and receives would take c - 1.

    A message with NaN or infinity is left out of the mean by its own sender, and counted by the others.

    Args:
        cliques: one partition of the workers for each phase (`cliques.partitions`).
        transports: one for each clique of more than one worker that this worker belongs to.
    """

    cliques: Sequence[Sequence[tuple[int, ...]]]
    transports: Mapping[tuple[int, ...], Transport]
    rank: int
    device: torch.device
    pool: Pool = field(default_factory=Pool, init=False)
    _verdicts: Verdicts = field(init=False)

    def __post_init__(self) -> None:
        self._verdicts = Verdicts(self.rank)
        self._tally = Tally(self.device)
        self._elements = 0
        self._ready: list[_Ready] = []

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Their elements, for the headers."""
        self._elements += sum(bucket.numel() for bucket in buckets)

    def _clique(self, step: int) -> tuple[int, ...]:
        return next(c for c in self.cliques[step % len(self.cliques)] if self.rank in c)

    def silent(self, step: int) -> bool:
        """This worker's clique is itself alone."""
        return len(self._clique(step)) == 1

    def own(self, step: int) -> Tensor:
        """1 / c."""
        return number(1 / len(self._clique(step)), self.device)

    def degree(self, step: int) -> Tensor:
        """c - 1."""
        return number(len(self._clique(step)) - 1, self.device)

    def copies_sent(self, step: int) -> float:
        """2 (c - 1) / c, of a ring all-reduce."""
        clique = self._clique(step)
        return 2 * (len(clique) - 1) / len(clique)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Memory until landed: one copy of the message."""
        clique = self._clique(step)
        transport = self.transports[clique]
        healthy = finite(message)
        header = header_of(step, self._elements, message[0].device)
        row = torch.cat([header, healthy.long().view(1)])
        totals = [torch.div(m, len(clique), out=self.pool.take(m)) for m in message]
        refuse(totals, [torch.zeros((), dtype=m.dtype, device=m.device) for m in message], healthy)
        payload = sum(t.numel() * t.element_size() for t in totals)
        self._tally.bytes_sent += 2 * (len(clique) - 1) * payload // len(clique)
        ready = _Ready(transport, row, totals)
        self._ready.append(ready)

        def land() -> list[Tensor]:
            self._tally.land(ready.pending, ready.departed, first)
            self._verdicts.add(step, dict(zip(clique, ready.rows, strict=True)))
            heard = torch.stack(list(ready.rows))[:, 2].sum()  # all, unless someone's message was refused
            return [total.div_((heard.clamp(min=1) / len(clique)).to(total.dtype)) for total in totals]

        return land

    def depart(self) -> None:
        """See `Exchange.depart`."""
        ready, self._ready = self._ready, []
        for part in ready:
            part.depart()

    def traffic(self) -> Traffic:
        """Counters since construction."""
        return self._tally.traffic(self._verdicts.refused)


class ExchangeByStep(Exchange):
    """Step t is exchange t mod period's.

    Args:
        steps: the exchange of each step of a period; one may stand for several.
    """

    def __init__(self, steps: Sequence[Exchange]) -> None:
        self._steps = tuple(steps)
        self._parts = tuple({id(exchange): exchange for exchange in steps}.values())
        self.pool = steps[0].pool
        for part in self._parts:
            part.pool = self.pool  # what one has landed serves the other

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """To each."""
        for part in self._parts:
            part.admit(buckets, matrices, combine)

    def _of(self, step: int) -> Exchange:
        return self._steps[step % len(self._steps)]

    def silent(self, step: int) -> bool:
        """As the step's."""
        return self._of(step).silent(step)

    @property
    def encodes(self) -> bool:
        """Whether any step's does."""
        return any(part.encodes for part in self._parts)

    def copies_sent(self, step: int) -> float:
        """As the step's."""
        return self._of(step).copies_sent(step)

    def own(self, step: int) -> Tensor:
        """As the step's."""
        return self._of(step).own(step)

    def degree(self, step: int) -> Tensor:
        """As the step's."""
        return self._of(step).degree(step)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """As the step's."""
        return self._of(step).start(message, step, first)

    def depart(self) -> None:
        """Whatever is ready."""
        for part in self._parts:
            part.depart()

    def settle(self) -> None:
        """Each."""
        for part in self._parts:
            part.settle()

    def traffic(self) -> Traffic:
        """The sum."""
        return sum((part.traffic() for part in self._parts), Traffic())
