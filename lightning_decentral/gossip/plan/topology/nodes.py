"""Node-aware topologies: which workers share a node and its network card (alternating exponential ring)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one, others
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True)
class AlternatingExponentialRing(Topology):
    """Half of the pairs of nodes average over both nodes, the other half inside each node; in the next step swapped.

    Two steps for each bit of the node's number, pairs (a, a XOR 2^b): exact consensus after 2 log2 N steps for N nodes,
    a power of two. L workers per node move 2 (2L - 1) / (2L) of the parameters' bytes through a node's card in every
    other step. A number of nodes with other prime factors f has digits of base f in place of bits, and groups of f
    nodes in place of pairs; a prime number of nodes averages over all of them in every other step.

    Args:
        workers_per_node: L; with 1 the half that stays inside is silent.

    Source: Wang et al. 2410.11998, alternating exponential ring; the digits, Takezawa et al. 2305.11420, algorithm 1.
    """

    workers_per_node: int

    def __post_init__(self) -> None:
        at_least_one("workers_per_node", self.workers_per_node, "give the number of workers that share a node")

    def period(self, size: int) -> int:
        """Two for each prime factor of the number of nodes, 1 for one node; ValueError where nodes aren't full."""
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
        stride = _product(lower)
        above, below = node // (stride * base), node % stride
        # Groups are numbered: in even steps the even ones talk, in odd steps the others.
        talks = (above * stride + below) % 2 == step % 2
        first = above * stride * base + below
        return range(first, first + stride * base, stride) if talks else range(node, node + 1)


@lru_cache(maxsize=256)
def prime_factors(number: int) -> tuple[int, ...]:
    """Ascending, with repetition; none of 1."""
    return tuple(_divided(number))


def _divided(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        if divisor * divisor > number:
            # No divisor up to the root: what is left is prime.
            divisor = number
        if number % divisor:
            divisor += 1
        else:
            number //= divisor
            yield divisor


def _product(numbers: list[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
