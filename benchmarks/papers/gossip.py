"""The seed paper's milliseconds, predicted from two numbers of each cluster: all-reduce on its fewest and most GPUs.

    compute(n) = floor + work / n        of a worker, the batch being shared out; a third of it forward, as 12 layers

`work` and the rate of one flow through a node's card are calibrated on these two numbers. The forecasts are the
package's; what a collective costs is given to them as if it had been measured:

    trees        an all-reduce over m nodes sends 2 (m - 1) / m copies through a card, not 2 (n - 1) / n by n GPUs
    own flows    the flows of a node's GPUs are each limited by themselves, they don't share one flow's rate

Without both the order of the methods comes out wrong. `network.py published` prints what this model predicts.

Source: Wang et al. 2410.11998, the authors' table of milliseconds (base transformer, 25,000 tokens in all).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.topology.combined import AlternatingExponentialRing
from lightning_decentral.gossip.plan.topology.one_peer import Hypercube
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, even
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model
from papers.row import Compared, Row, write

PARAMETER_BYTES, LAYERS = 4 * 65_000_000, 12
METHODS = ("all-reduce", "SGP", "exponential", "alternating ring")
Table = Mapping[int, tuple[float, float, float, float]]
"""{GPUs: milliseconds of all-reduce, SGP, exponential, alternating ring}."""


@dataclass(frozen=True, eq=False)
class Published:
    """A cluster and what was measured on it."""

    name: str
    per_node: int
    table: Table


CLUSTERS = (
    Published("T4", 8, {16: (372.5, 425.5, 314.8, 312.3), 32: (225.5, 292.4, 178.8, 178.8),
                        64: (167.3, 235.5, 123.1, 122.2)}),
    Published("A100", 4, {8: (73.0, 69.4, 63.4, 61.7), 16: (54.8, 53.0, 46.8, 45.8), 32: (51.5, 50.7, 44.7, 43.7)}),
    Published("A40", 4, {8: (166.1, 150.5, 122.8, 122.0), 16: (195.5, 99.9, 97.4, 78.9),
                         32: (188.5, 112.4, 110.8, 67.9)}),
)  # fmt: skip
FLOOR = 0.03  # seconds of a step that don't shrink with the batch: launches, the update
FLOORS = (0.0, 0.015)  # others, that show how much it matters
HALVINGS = 24


@dataclass(frozen=True)
class Calibrated:
    """A cluster's model.

    Args:
        work: GPU-seconds of the batch.
        rate: bytes per second of a flow.
    """

    cluster: Published
    work: float = 1.0
    rate: float = 1e9
    trees: bool = True
    own_flows: bool = True
    floor: float = FLOOR

    def setting(self, workers: int) -> Setting:
        share = (self.floor + self.work / workers) / LAYERS
        size, per_node = PARAMETER_BYTES // LAYERS, self.cluster.per_node
        blocks = [BlockCost(f"layer {i}", share / 3, share * 2 / 3, 0.0, size) for i in range(LAYERS)]
        flows = per_node if self.own_flows else 1
        costs = [
            LinkCost("exchange", "inside", 2, 1, 0.0, inf),
            LinkCost("exchange", "between", 2, flows, 0.0, self.rate),
        ]
        # Of all GPUs, and of the ring's pairs of nodes.
        for group in sorted({2 * per_node, workers}):
            copies = 2 * (1 - per_node / group) if self.trees else 2 * (1 - 1 / group)
            costs.append(LinkCost("all_reduce", "between", group, 1, 0.0, self.rate / copies, per_node=per_node))
        model = Model("transformer-base", self.cluster.name, tuple(blocks))
        return Setting(model, Network(tuple(costs)), Cluster(workers, per_node))

    def milliseconds(self, method: Method, workers: int) -> float:
        return 1e3 * float(method.seconds(self.setting(workers), even(workers))[0])

    def all_reduce(self, workers: int) -> float:
        return self.milliseconds(DataParallel(), workers)

    def predicted(self, workers: int) -> tuple[float, ...]:
        """Milliseconds of the methods, in the table's order."""
        ring = AlternatingExponentialRing(self.cluster.per_node)
        gossip = GossipForecast(Hypercube(), delay=0), GossipForecast(Hypercube()), GossipForecast(ring)
        return self.all_reduce(workers), *(self.milliseconds(method, workers) for method in gossip)


def halved(low: float, high: float, is_low: Callable[[float], bool]) -> float:
    """Return the number between these two up to which `is_low` holds, by bisection of the logarithm."""
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low


@cache
def fitted(model: Calibrated) -> Calibrated:
    """The model with `work` and `rate` by which all-reduce on the fewest and most GPUs takes what was published."""
    few, most = min(model.cluster.table), max(model.cluster.table)
    known = {workers: model.cluster.table[workers][0] for workers in (few, most)}

    def at(rate: float) -> Calibrated:
        there = replace(model, rate=rate)
        work = halved(1e-3, 20.0, lambda work: replace(there, work=work).all_reduce(few) < known[few])
        return replace(there, work=work)

    return at(halved(5e8, 5e10, lambda rate: at(rate).all_reduce(most) > known[most]))


def errors(compared: Sequence[Compared]) -> list[float]:
    return [abs(ours / theirs - 1) for _, theirs, ours in compared]


def held_out(models: Sequence[Calibrated]) -> list[Compared]:
    """Every number of the table that nothing was calibrated on."""
    found = []
    for model in models:
        table = model.cluster.table
        for workers, theirs in table.items():
            seen = workers in (min(table), max(table))
            rows = list(zip(METHODS, theirs, model.predicted(workers), strict=True))[int(seen) :]
            found += [(f"{model.cluster.name}, {workers} GPUs: {name}, ms", a, b) for name, a, b in rows]
    return found


def orders(models: Sequence[Calibrated]) -> int:
    """Number of settings with AER no slower than the exponential graph, and the graph no slower than all-reduce."""
    rows = [model.predicted(workers) for model in models for workers in model.cluster.table]
    return sum(ring <= peer * (1 + 1e-6) and peer <= reduced * (1 + 1e-6) for reduced, _, peer, ring in rows)


def ratios(models: Sequence[Calibrated]) -> list[Compared]:
    """All-reduce over the alternating ring, on the most GPUs first."""
    found = []
    for which in (2, 1, 0):
        for model in models:
            workers, theirs = sorted(model.cluster.table.items())[which]
            ours = model.predicted(workers)
            label = f"{model.cluster.name}, {workers} GPUs: all-reduce over ring"
            found.append((label, theirs[0] / theirs[-1], ours[0] / ours[-1]))
    return found


def as_all_reduce() -> list[Compared]:
    """Every method taken to be as slow as all-reduce was measured to be: what a prediction has to beat."""
    rows = [of for cluster in CLUSTERS for of in cluster.table.values()]
    return [("", theirs, of[0]) for of in rows for theirs in of[1:]]


def calibrated(**changes: Any) -> list[Calibrated]:
    return [fitted(replace(Calibrated(cluster), **changes)) for cluster in CLUSTERS]


def row() -> Row:
    models = calibrated()
    predicted, other_floors = held_out(models), {floor: calibrated(floor=floor) for floor in FLOORS}
    forms = {
        "by bytes of rings that share the card": calibrated(trees=False, own_flows=False),
        "by trees, flows share the card": calibrated(own_flows=False),
        "by rings, own flows": calibrated(trees=False),
    }
    of_method = {name: [one for one in predicted if f": {name}, " in one[0]] for name in METHODS}
    return Row(
        name="gossip",
        paper="2410.11998",
        title="Decentralized Adam, AccumAdam: seconds",
        headline="1.18 to 2.78 x shorter iterations than all-reduce on 32 to 64 GPUs (table of milliseconds)",
        compared=(*ratios(models), *predicted),
        kind="formula",
        assumptions=(
            "Each cluster is calibrated on two of its numbers: all-reduce on the fewest and on the most GPUs.",
            "65 million parameters travel as 4 bytes each; messages inside a node and latency cost nothing.",
            "30 ms of a step don't shrink with the batch; the number was chosen with the table in view.",
            "All-reduce sends 2 (m - 1) / m copies through the card of each of m nodes; a node's flows don't slow each "
            "other down. Both were chosen with the table in view.",
            "The exponential graph's pairs are (i, i XOR 2^k); SGP is taken as the same graph without overlap.",
            "Equal predictions agree with any order: on T4 the ring and the exponential graph come out alike.",
        ),
        cannot_compare="How long a step computes, the batches' unequal lengths and what a flow gets weren't published; "
        "two numbers of all-reduce can't show that last one, a measurement of the exchange can.",
        contradicts="On 8 A40, four flows through a card of 25 Gb/s leave 18 ms of computing in the exponential "
        "graph's 123 ms. By nominal bytes all-reduce would be faster than that graph; measured, it never was.",
        further=(
            ("median error of the numbers held out", statistics.median(errors(predicted))),
            ("largest error of these", max(errors(predicted))),
            *((f"median error: {name}", statistics.median(errors(some))) for name, some in of_method.items()),
            ("median error if all took as long as all-reduce", statistics.median(errors(as_all_reduce()))),
            ("order of three methods right, of 9", orders(models)),
            *((f"the same {name}", orders(some)) for name, some in forms.items()),
            *((f"median error {name}", statistics.median(errors(held_out(some)))) for name, some in forms.items()),
            *((f"order with a floor of {1e3 * floor:g} ms", orders(some)) for floor, some in other_floors.items()),
            *(
                (f"median error with a floor of {1e3 * floor:g} ms", statistics.median(errors(held_out(some))))
                for floor, some in other_floors.items()
            ),
            *((f"{m.cluster.name}: a flow's rate, Gb/s", 8e-9 * m.rate) for m in models),
        ),
    )


def main() -> None:
    write(row())
