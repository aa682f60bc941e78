"""Pipeline layout: which worker is which stage of which pipeline, and the process groups between them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_decentral.pipeline.plan.schedule import Kind
from lightning_decentral.pipeline.wire.executor import Edge
from lightning_decentral.shared.plan.units import shown_bytes
from lightning_decentral.shared.wire.pipeline_replicas import Bond, Replicas
from lightning_decentral.shared.wire.transport import Disjoint, Message, Transport, Wire


@dataclass(frozen=True)
class StageLayout:
    """Worker w is stage w % P of pipeline w // P. ValueError: the number of workers isn't a multiple of the stages."""

    stages: int  # P
    workers: int  # number in all pipelines
    per_node: int  # workers that share a node

    def __post_init__(self) -> None:
        if self.workers % self.stages:
            raise ValueError(
                f"{self.workers} workers aren't a multiple of stages={self.stages}: use devices x num_nodes = "
                f"{self.stages} x pipelines, or leave stages out"
            )

    @property
    def pipelines(self) -> int:
        return self.workers // self.stages

    @property
    def pipelines_per_node(self) -> int:
        """Number of pipelines on a node; 1 if a pipeline spans several nodes."""
        return max(1, self.per_node // self.stages)


def introduced(layout: StageLayout, microbatches: int, replicas: Replicas, module: nn.Module, drifts: bool) -> str:
    """Describe the pipelines in one line; `module` keeps this stage's parameters."""
    count, stages = layout.pipelines, layout.stages
    who = f"{count} pipeline{'s' * (count > 1)} of {stages} stage{'s' * (stages > 1)}"
    cut = f"{microbatches} micro-batch{'es' * (microbatches > 1)} of a batch"
    own = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    average = f", averaging by {replicas!r} of {shown_bytes(own)} on stage 0" if count > 1 else ""
    model = "the mean of the pipelines" if drifts else "the model"
    line = f"{who}, {cut}, hidden states and their gradients between stages{average}, {model} is evaluated"
    return f"token_pipeline: {line}"


class StageGroups:
    """Process groups of one worker. Collective. `over`: the stages of its pipeline, for small messages; None: a single
    stage. `hosts`: the same over CPU tensors. `edges`: for each neighbour and direction, a group of two stages.
    `replicas`: all workers with this stage; None if there is one pipeline."""

    def __init__(self, wire: Wire, layout: StageLayout, device: torch.device) -> None:
        self._wire, self._layout, self._device = wire, layout, device
        self.edges: dict[tuple[Kind, int], Edge] = {}
        firsts = range(0, layout.workers, layout.stages)
        pipelines = [range(first, first + layout.stages) for first in firsts]
        alone = layout.stages == 1
        self.over, self.hosts = (None, None) if alone else (wire.group(pipelines), wire.hosts(pipelines))
        for lower in range(layout.stages - 1):
            pairs = [range(first + lower, first + lower + 2) for first in firsts]
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                if (pair := wire.group(pairs)) is not None:
                    self.edges[kind, lower + 1 - pair.rank] = edge = Edge(pair, 1 - pair.rank)
                    connect(edge, sends=pair.rank == (kind is Kind.BACKWARD), device=device)
        self.replicas = self.replica_group() if layout.pipelines > 1 else None

    def bond(self, replicas: Replicas) -> Bond:
        """Connect this worker to equal stages of the other pipelines. Collective."""
        hosts = partial(self._of_this_stage, self._wire.hosts)
        return replicas.join(self.replica_group, hosts, self._device, self._layout.pipelines_per_node)

    def replica_group(self) -> Transport:
        """Make a new process group of all workers with this stage. Collective."""
        return self._of_this_stage(self._wire.group)

    def _of_this_stage(self, make: Callable[[Disjoint | None], Transport | None]) -> Transport:
        workers = range(self._layout.workers)
        own = make([workers[stage :: self._layout.stages] for stage in range(self._layout.stages)])
        assert own is not None
        return own


def connect(edge: Edge, sends: bool, device: torch.device) -> None:
    """Send one number over a new edge, which sets up its connection. Both ends call it, for all edges in one order.

    In NCCL's first message of a pair the hosts wait for each other and allocate memory: not during a step."""
    messages = [Message(edge.peer, torch.zeros(1, device=device), 0)]
    outgoing, incoming = edge.over.exchange(messages, []) if sends else edge.over.exchange([], messages)
    for pending in (*outgoing, *incoming):
        pending.wait()
