"""All workers in one process where messages are encoded: link by link, by the code that encodes on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix, Pool
from lightning_decentral.gossip.coders import coder
from lightning_decentral.gossip.coding import Coding, check_codec
from lightning_decentral.gossip.combine.rule import Combine
from lightning_decentral.gossip.plan import Topology
from lightning_decentral.gossip.weights import Weights, links
from lightning_decentral.gossip.wire import Exchange, Land, degree_column, own_column


@dataclass
class LinkExchange(Exchange):
    """What `MatrixExchange` is for messages as they are: every link of every worker in turn."""

    topology: Topology
    weights: Weights
    size: int
    codec: Coding
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        everyone = range(self.size)
        self._coders = [coder(self.codec, self.topology, rank, self.size, self.pool) for rank in everyone]

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Estimates start at worker 0's parameters."""
        for worker in self._coders:
            worker.admit([bucket[0].clone() for bucket in buckets], matrices, combine)

    def silent(self, step: int) -> bool:
        """Whether nobody talks at this step."""
        return not any(self.topology.sources(rank, self.size, step) for rank in range(self.size))

    def own(self, step: int) -> Tensor:
        """The diagonal of W_t as a column."""
        return own_column(self.topology, self.weights, self.size, step)

    def degree(self, step: int) -> Tensor:
        """Of every worker, as a column."""
        return degree_column(self.topology, self.size, step)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Encode at once, decode and mix when it lands; nothing travels."""
        plans = [links(self.topology, self.weights, rank, self.size, step) for rank in range(self.size)]
        sent = [[m[rank] for m in message] for rank in range(self.size)]
        coders = list(zip(self._coders, sent, plans, strict=True))
        packets = [worker.encode(own, heard_by, step, first) for worker, own, (_, heard_by) in coders]

        def land() -> list[Tensor]:
            mixed = [self.pool.take(m) for m in message]
            for rank, (worker, own, (row, _)) in enumerate(coders):
                for total, m in zip(mixed, own, strict=True):
                    torch.mul(m, row[rank], out=total[rank])
                for j in sorted(set(row) - {rank}):
                    heard = worker.decode(j, [t.clone() for t in packets[j][rank]], own, first)
                    worker.remember(j, heard, torch.ones((), dtype=torch.bool), first)
                    for total, tensor in zip(mixed, heard, strict=True):
                        total[rank].add_(tensor, alpha=row[j])
            return mixed

        return land

    def state_dict(self) -> dict[str, Any]:
        """Of every worker."""
        return {"codec": repr(self.codec), "workers": [worker.state_dict() for worker in self._coders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where they had another codec."""
        check_codec(state, repr(self.codec))
        for worker, own in zip(self._coders, state["workers"], strict=True):
            worker.load_state_dict(own)
