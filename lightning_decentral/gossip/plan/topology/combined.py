"""Topologies made of others or adapted to nodes: `Every` k-th step, `Stream` by model fragments, `PeriodicAverage`, the
alternating exponential ring over nodes, and `Auto`, the default."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, lcm, prod

from lightning_decentral.gossip.plan.topology.one_peer import BaseGraph, Hypercube
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one, others
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True)
class AlternatingExponentialRing(Topology):
    """Half of the pairs of nodes average over both nodes, the other half inside each node; the next step swaps halves.

    The ring takes two steps for each bit b of the node number, with pairs (a, a XOR 2^b): exact consensus after
    2 log2 N steps for N nodes, a power of two. L workers per node send 2 (2L - 1) / (2L) of the parameters' bytes
    through a node's network card in every other step. For other prime factors f of N, digits of base f replace bits and
    groups of f nodes replace pairs; a prime number of nodes averages over all nodes in every other step.

    Args:
        workers_per_node: L; with 1 the half that averages inside nodes is silent.

    Source: Wang et al. 2410.11998, alternating exponential ring; the digits, Takezawa et al. 2305.11420, algorithm 1.
    """

    workers_per_node: int

    def __post_init__(self) -> None:
        at_least_one("workers_per_node", self.workers_per_node, "give the number of workers that share a node")

    def period(self, size: int) -> int:
        """Period: 2 for each prime factor of the number of nodes, 1 for one node. ValueError: a node isn't full."""
        steps = super().period(size)
        if size % self.workers_per_node:
            raise ValueError(
                f"AlternatingExponentialRing has {self.workers_per_node} workers on each node, got {size} workers: "
                "make the number of workers a multiple, or set workers_per_node to one that divides it"
            )
        return steps * max(1, 2 * len(prime_factors(size // self.workers_per_node)))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        per_node = self.workers_per_node
        group = self._group(rank // per_node, size // per_node, step)
        return others(rank, (node * per_node + place for node in group for place in range(per_node)))

    def _group(self, node: int, nodes: int, step: int) -> range:
        factors = prime_factors(nodes)
        if not factors:
            return range(node, node + 1)
        # Two steps for each digit; a group's nodes differ in that digit alone.
        *lower, base = factors[: step // 2 % len(factors) + 1]
        stride = prod(lower)
        above, below = node // (stride * base), node % stride
        # Groups are numbered: in even steps the even groups average over nodes, in odd steps the odd groups.
        talks = (above * stride + below) % 2 == step % 2
        first = above * stride * base + below
        return range(first, first + stride * base, stride) if talks else range(node, node + 1)


@lru_cache(maxsize=256)
def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors of a number, ascending, with repetition; none for 1."""
    if number == 1:
        return ()
    # No divisor up to the root: the number is prime.
    first = next((d for d in range(2, isqrt(number) + 1) if number % d == 0), number)
    return first, *prime_factors(number // first)


class _Spaced(Topology):
    """Base of topologies that use `inner` in some steps only: step t with messages is `inner`'s step t // steps."""

    steps: int
    inner: Topology

    @abstractmethod
    def _talks(self, step: int) -> bool:
        """Return whether any worker sends a message in this step."""

    def period(self, size: int) -> int:
        return self.steps * self.inner.period(size)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return self.inner.sources(rank, size, step // self.steps) if self._talks(step) else ()

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        return self.inner.row(rank, size, step // self.steps) if self._talks(step) else {rank: 1.0}


@checked
@dataclass(frozen=True)
class Every(_Spaced):
    """`inner`'s step t // steps at steps t with (t + 1) % steps == 0, no messages in other steps: local SGD.

    With a delay of `steps` one message is in flight, so that mixing is stable at every rate up to 1."""

    steps: int
    inner: Topology

    def __post_init__(self) -> None:
        at_least_one("Every's steps", self.steps, "1 sends messages in every step, k in every k-th")

    def placed(self, workers_per_node: int) -> Topology:
        return replace(self, inner=self.inner.placed(workers_per_node))

    def label(self, size: int) -> str:
        return f"{self.inner.label(size)} every {self.steps} steps"

    def _talks(self, step: int) -> bool:
        return (step + 1) % self.steps == 0


@checked
@dataclass(frozen=True)
class Stream(_Spaced):
    """`Every(steps, inner)` for each of `parts` parts of the model: one part is sent in every steps / parts steps.

    Each message has one part of the model, so that messages are small and of about the same size. Part p is sent at
    steps t with (t + 1) % steps == (p + 1) steps / parts % steps, in the graph of `inner`'s step t // steps. Parameters
    are assigned in order, each to the part with the fewest bytes so far, so that a part has layers of every depth. As a
    graph (`sources`, drawings) a `Stream` has the messages of all parts.

    Raises:
        ValueError: a number below 1, or parts that don't divide the steps.

    Source: Streaming DiLoCo, Douillard et al. 2501.18512, section 3.1, strided fragments.
    """

    steps: int
    parts: int
    inner: Topology

    def __post_init__(self) -> None:
        at_least_one("Stream's steps", self.steps, "30 sends each part in every 30th step")
        at_least_one("Stream's parts", self.parts, "1 is Every(steps, inner)")
        if self.steps % self.parts:
            raise ValueError(
                f"Stream's parts must divide its steps, got {self.parts} and {self.steps}: one part is sent in every "
                f"steps / parts steps; use steps={-(-self.steps // self.parts) * self.parts}"
            )

    @property
    def fragments(self) -> tuple[Topology, ...]:
        between = self.steps // self.parts
        return tuple(_Part(self.steps, self.inner, self.steps - (p + 1) * between) for p in range(self.parts))

    def placed(self, workers_per_node: int) -> Topology:
        return replace(self, inner=self.inner.placed(workers_per_node))

    def label(self, size: int) -> str:
        return f"{self.inner.label(size)} every {self.steps} steps, in {self.parts} parts"

    def _talks(self, step: int) -> bool:
        return (step + 1) % (self.steps // self.parts) == 0


@dataclass(frozen=True)
class _Part(Every):
    """Schedule of one part of a `Stream`: messages are sent `ahead` steps earlier than in `Every`."""

    ahead: int

    def _talks(self, step: int) -> bool:
        return (step + 1 + self.ahead) % self.steps == 0


@checked
@dataclass(frozen=True)
class Auto(Topology):
    """Chooses a topology with exact consensus in finitely many steps for every number of workers, where no step sends
    more through a node's network card than all-reduce would (`planned_traffic.copies_through_card`).

    With one worker per node, or one node, a worker has one peer per step: a power of two workers get Hypercube, other
    numbers BaseGraph(1). Several nodes of several workers get AlternatingExponentialRing.

    Args:
        workers_per_node: L; by default the strategy's number of workers per node, or 1 without a strategy.
    """

    workers_per_node: int | None = None

    def __post_init__(self) -> None:
        at_least_one("workers_per_node", self.workers_per_node or 1, "leave it out, the strategy fills it in")

    def placed(self, workers_per_node: int) -> Topology:
        return self if self.workers_per_node else Auto(workers_per_node)

    def pick(self, size: int) -> Topology:
        per_node = self.workers_per_node or 1
        # If every worker had a peer on another node, a node's card would send L copies of the parameters.
        if 1 < per_node < size:
            return AlternatingExponentialRing(per_node)
        # Hypercube rather than OnePeerExponential: its matrices are projections with eigenvalues 0 and 1, so
        # that longer delays stay stable at larger rates, and a worker needs one connection per step, in both
        # directions at once.
        return BaseGraph(max_degree=1) if size & (size - 1) else Hypercube()

    def period(self, size: int) -> int:
        return self.pick(size).period(size)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return self.pick(size).sources(rank, size, step)

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        return self.pick(size).row(rank, size, step)

    def label(self, size: int) -> str:
        return f"Auto -> {self.pick(size).label(size)}"


@checked
@dataclass(frozen=True)
class PeriodicAverage(Topology):
    """`inner`, and at steps t with (t + 1) % every == 0 an exact average of all workers, weights 1/n.

    The average is an all-reduce of 2 (n - 1) / n of the parameters' bytes. At delay 0 and rate 1 it makes all workers
    equal; overlapped, equal except for the update that it overlapped. `PeriodicAverage` works with every rule.

    Source: Gossip-PGA, Chen et al. 2105.09080."""

    every: int
    inner: Topology

    def __post_init__(self) -> None:
        at_least_one("PeriodicAverage's every", self.every, "1 averages in every step, k in every k-th step")

    def placed(self, workers_per_node: int) -> Topology:
        return replace(self, inner=self.inner.placed(workers_per_node))

    def period(self, size: int) -> int:
        return lcm(self.every if size > 1 else 1, self.inner.period(size))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, range(size)) if self._averages(step) else self.inner.sources(rank, size, step)

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        return dict.fromkeys(range(size), 1 / size) if self._averages(step) else self.inner.row(rank, size, step)

    def label(self, size: int) -> str:
        return f"{self.inner.label(size)}, exact average every {self.every} steps"

    def _averages(self, step: int) -> bool:
        return (step + 1) % self.every == 0
