"""What `quality/convergence.py` compares: a rule on a topology, and when its messages land."""

from dataclasses import dataclass

from lightning_decentral.gossip import (
    Auto,
    Combine,
    Complete,
    Every,
    ExactDiffusion,
    Exponential,
    Gossip,
    GradientTracking,
    OnePeerExponential,
    Outer,
    OuterNesterov,
    Own,
    PeriodicAverage,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    RelaySum,
    Ring,
    Topology,
    Tree,
)
from lightning_decentral.gossip.plan.planned_traffic import partition
from lightning_decentral.gossip.plan.topology.topology import step_graph

WORKERS = 16


@dataclass(frozen=True)
class Alone(Topology):
    """W = I: nobody receives anything. No topology for training together, so the strategy refuses it."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    rule: str
    graph: str
    combine: Combine
    topology: Topology
    delay: int

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.rule} | {self.graph} | delay {self.delay}"

    def check(self) -> None:
        """ValueError where the strategy would refuse to start."""
        self.combine.check(self.topology, WORKERS, self.combine.weights, self.delay)

    @property
    def copies_sent(self) -> float:
        """Numbers that a worker sends per step, over the number of parameters; mean over workers and steps."""
        return self.combine.form.copies * copies_sent(self.topology, WORKERS)


def copies_sent(topology: Topology, size: int) -> float:
    """Messages per worker and step. A clique of c workers all-reduces: 2 (c - 1) / c."""
    period = topology.period(size)
    return sum(_copies_sent(topology, size, step) for step in range(period)) / period


def _copies_sent(topology: Topology, size: int, step: int) -> float:
    cliques = partition(topology, Own(), size, step)
    if cliques is None:
        return sum(len(step_graph(topology, size, step).targets[rank]) for rank in range(size)) / size
    return sum(2 * (len(clique) - 1) for clique in cliques) / size


GRAPHS: dict[str, Topology] = {
    "chain": Tree(children=1),
    "binary tree": Tree(),
    "ring": Ring(),
    "exponential": Exponential(),
    "hypercube (Auto)": Auto(),
    "one-peer exponential": OnePeerExponential(),
    "random matching": RandomMatching(),
}


def on(rule: str, combine: Combine, graphs: list[str], delay: int) -> list[Method]:
    """The rule on each of these graphs."""
    return [Method(rule, graph, combine, GRAPHS[graph], delay) for graph in graphs]


SPARSE = {
    "ring, exact average every 8": PeriodicAverage(8, Ring()),
    "complete every 8": Every(8, Complete()),
    "random matching every 8": Every(8, RandomMatching()),
}

METHODS = [
    Method("all-reduce", "complete", Gossip(), Complete(), 0),
    Method("none, each alone", "none", Gossip(), Alone(), 0),
    *on("gossip", Gossip(), [name for name in GRAPHS if name != "binary tree"], 0),
    *on("gossip", Gossip(), ["ring", "exponential", "hypercube (Auto)", "random matching"], 1),
    *[Method("gossip", graph, Gossip(), topology, 0) for graph, topology in SPARSE.items()],
    Method("outer step (DiLoCo)", "complete every 8", OuterNesterov(), SPARSE["complete every 8"], 0),
    Method("outer step (NoLoCo)", "random matching every 8", Outer(), SPARSE["random matching every 8"], 0),
    *on("push-sum", PushSum(), ["chain"], 0),
    *on("relayed sums", RelaySum(), ["chain", "binary tree"], 0),
    *on("quasi-global momentum", QuasiGlobalMomentum(), ["ring", "hypercube (Auto)", "random matching"], 0),
    *on("quasi-global momentum", QuasiGlobalMomentum(), ["hypercube (Auto)"], 1),
    *on("exact diffusion", ExactDiffusion(), ["chain", "ring", "hypercube (Auto)", "random matching"], 0),
    *on("exact diffusion", ExactDiffusion(), ["hypercube (Auto)"], 1),
    *on("gradient tracking", GradientTracking(), ["ring", "hypercube (Auto)", "random matching"], 0),
    *on("gradient tracking", GradientTracking(), ["hypercube (Auto)"], 1),
]
