"""Network cost model: seconds of collectives and messages on groups that may not have been measured.

    seconds(bytes) = latency hops(n) / hops(w) + bytes / bandwidth copies(n) / copies(w) max(1, f / g)

for n workers in f flows, from the measurement with w workers in g flows that is nearest in log n and log f, if possible
one whose groups share nodes as these do; of equally near ones for an exchange with several neighbours at once that with
the nearest number of them (the bytes are those of all messages, so a link's seconds don't depend on it).

    operation                     hops(n)        copies(n)
    exchange                      1              1
    all_gather, reduce_scatter    n - 1          (n - 1) / n
    all_reduce                    2 (n - 1)      2 (n - 1) / n
    broadcast                     ceil(log2 n)   1

A ring's numbers, of the whole message's bytes. An operation that wasn't measured is computed from another one's latency
and bandwidth, first of all an exchange's."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, log, log2

from lightning_decentral.shared.plan.profile import LinkCost

Count = Callable[[int], float]

OPERATIONS: dict[str, tuple[Count, Count]] = {
    "exchange": (lambda n: 1, lambda n: 1),
    "all_gather": (lambda n: n - 1, lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n: n - 1, lambda n: (n - 1) / n),
    "all_reduce": (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    "broadcast": (lambda n: ceil(log2(n)), lambda n: 1),
}
"""{operation: (hops, copies)} of n workers: how often latency is paid, and how often a message's bytes pass a link."""


@dataclass(frozen=True)
class Price:
    """seconds(bytes) = latency + bytes / bandwidth of an operation, measured on such a group or extrapolated."""

    latency_seconds: float
    bytes_per_second: float
    extrapolated: bool = False

    def seconds(self, message_bytes: float) -> float:
        """Return the seconds that the operation takes on a message of `message_bytes`; 0 without bytes."""
        return self.latency_seconds + message_bytes / self.bytes_per_second if message_bytes else 0.0


FREE = Price(0.0, inf)


@dataclass(frozen=True)
class Network:
    """Network cost model that prices operations by measured links.

    Args:
        given: the reaches ("inside", "between") whose links were given by hand instead of measured.

    Raises:
        ValueError: in `price`, where nothing was measured between nodes.
    """

    costs: tuple[LinkCost, ...]
    given: tuple[str, ...] = ()

    def price(
        self, operation: str, reach: str, workers: int, flows: int = 1, per_node: int = 1, peers: int = 1
    ) -> Price:
        """Return the price of an operation on a group, `per_node` of which share a node; free for a group of one.

        Inside a node, where only links between nodes were measured, it takes those: too slow, marked as extrapolated.
        """
        if workers < 2:
            return FREE
        cost = self._nearest(operation, reach, workers, flows, per_node, peers)
        (hops_of, copies_of), (measured_hops, measured_copies) = OPERATIONS[operation], OPERATIONS[cost.operation]
        hops = hops_of(workers) / measured_hops(cost.workers)
        # More flows than measured share the card's measured rate; fewer may be no faster, each being limited by itself.
        copies = copies_of(workers) / measured_copies(cost.workers) * max(1.0, flows / cost.flows)
        found = (cost.operation, cost.reach, cost.workers, cost.flows)
        measured_so = found == (operation, reach, workers, flows) and (reach == "inside" or cost.per_node == per_node)
        # A price for more neighbours than an exponential graph has isn't marked as extrapolated.
        as_many = operation != "exchange" or cost.peers >= min(peers, (workers - 1).bit_length())
        return Price(hops * cost.latency_seconds, cost.bytes_per_second / copies, not (measured_so and as_many))

    def _nearest(self, operation: str, reach: str, workers: int, flows: int, per_node: int, peers: int) -> LinkCost:
        def distance(cost: LinkCost) -> tuple[bool, bool, bool, bool, float, float]:
            others = cost.operation != operation
            shared = reach == "between" and (cost.per_node > 1) != (per_node > 1)
            sizes = abs(log(cost.workers / workers)) + abs(log(cost.flows / flows))
            neither = others and cost.operation != "exchange"
            together = abs(log(cost.peers / (peers if operation == "exchange" else 1)))
            return cost.reach != reach, others, neither, shared, sizes, together  # the first difference decides

        known = [cost for cost in self.costs if cost.workers > 1 and cost.operation in OPERATIONS]
        usable = [cost for cost in known if reach in (cost.reach, "inside")]
        if not usable:
            raise ValueError(
                f"nothing was measured {reach} nodes: measure with `torchrun ... -m lightning_decentral.cli.network`, "
                "or give --bandwidth 200mbit --latency 100us"
            )
        return min(usable, key=distance)

    def knows(self, reach: str) -> bool:
        """Return whether any operation was measured at this reach."""
        return any(cost.reach == reach and cost.workers > 1 and cost.operation in OPERATIONS for cost in self.costs)

    def linked(self, reach: str, latency_seconds: float, bytes_per_second: float) -> "Network":
        """Return this network with the given latency and bandwidth in place of measured links at this reach."""
        link = LinkCost("exchange", reach, 2, 1, latency_seconds, bytes_per_second)
        measured = (cost for cost in self.costs if cost.reach != reach)
        return Network((*measured, link), tuple(dict.fromkeys((*self.given, reach))))


NO_NETWORK = Network((LinkCost("exchange", "inside", 2, 1, 0.0, inf), LinkCost("exchange", "between", 2, 1, 0.0, inf)))
