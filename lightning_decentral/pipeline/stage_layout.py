"""Pipeline layout: which worker is which stage of which pipeline, and the process groups between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_decentral.pipeline.compute.model import StagePlace
from lightning_decentral.pipeline.plan.schedule import Kind
from lightning_decentral.pipeline.wire.channel import Edge, connect
from lightning_decentral.shared.wire.pipeline_replicas import Bond, Replicas
from lightning_decentral.shared.wire.transport import Disjoint, Transport, Wire


@dataclass(frozen=True)
class StageLayout:
    """Worker w is stage w % P of pipeline w // P.

    Args:
        stages: P.
        workers: of all pipelines.
        per_node: workers that share a node.

    Raises:
        ValueError: the workers aren't a multiple of the stages.
    """

    stages: int
    workers: int
    per_node: int

    def __post_init__(self) -> None:
        if self.workers % self.stages:
            raise ValueError(
                f"{self.workers} workers are no multiple of stages={self.stages}: use devices x num_nodes = "
                f"{self.stages} x pipelines, or leave stages out"
            )

    @property
    def pipelines(self) -> int:
        return self.workers // self.stages

    @property
    def pipelines_per_node(self) -> int:
        """1 where a pipeline has several nodes."""
        return max(1, self.per_node // self.stages)


def place_of(counts: Sequence[int], stage: int) -> StagePlace:
    """Position of a stage in the model.

    Args:
        counts: blocks of each stage.
    """
    first = sum(counts[:stage])
    return StagePlace(first, first + counts[stage], stage == 0, stage == len(counts) - 1)


class StageGroups:
    """One worker's groups; collective.

    Attributes:
        over: the stages of its pipeline, for whatever is small.
        hosts: the same between their hosts.
        edges: one group of two stages for each neighbour and direction.
        replicas: the workers that are this stage; None where there is one pipeline.
    """

    def __init__(self, wire: Wire, layout: StageLayout, device: torch.device) -> None:
        self._wire, self._layout, self._device = wire, layout, device
        self.edges: dict[tuple[Kind, int], Edge] = {}
        firsts = range(0, layout.workers, layout.stages)
        pipelines = [range(first, first + layout.stages) for first in firsts]
        over, hosts = wire.group(pipelines), wire.hosts(pipelines)
        assert over is not None
        assert hosts is not None
        self.over: Transport = over
        self.hosts: Transport = hosts
        for lower in range(layout.stages - 1):
            pairs = [range(first + lower, first + lower + 2) for first in firsts]
            self._join(Kind.FORWARD, lower, pairs)
            self._join(Kind.BACKWARD, lower, pairs)
        self.replicas = self.replica_group() if layout.pipelines > 1 else None

    def _join(self, kind: Kind, lower: int, pairs: Sequence[range]) -> None:
        """The edges of this direction between stage `lower` and the next, one for each pipeline. Collective."""
        over = self._wire.group(pairs)
        if over is None:
            return
        peer = 1 - over.rank
        self.edges[kind, lower + peer] = edge = Edge(over, peer)
        connect(edge, sends=over.rank == (kind is Kind.BACKWARD), device=self._device)

    def bond(self, replicas: Replicas) -> Bond:
        """This worker's tie to the other pipelines. Collective."""
        return replicas.join(self.replica_group, self.replica_hosts, self._device, self._layout.pipelines_per_node)

    def replica_group(self) -> Transport:
        """A new group of the workers that are this stage. Collective."""
        return self._of_this_stage(self._wire.group)

    def replica_hosts(self) -> Transport:
        """The same between their hosts."""
        return self._of_this_stage(self._wire.hosts)

    def _of_this_stage(self, make: Callable[[Disjoint | None], Transport | None]) -> Transport:
        workers = range(self._layout.workers)
        own = make([workers[stage :: self._layout.stages] for stage in range(self._layout.stages)])
        assert own is not None
        return own
