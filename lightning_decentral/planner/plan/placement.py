"""Placement of ranks on hosts, such that the messages of a plan cost least.

cost(order) = (mean over steps of the step's slowest message, mean over steps of the sum of its messages), in seconds

Orders are compared by the first number, as a step ends with its slowest message, and if equal by the second. `order[r]`
is the host of rank r."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from math import inf
from operator import add
from random import Random

import numpy as np
import numpy.typing as npt

from lightning_decentral.planner.plan.host_links import Matrix

Order = tuple[int, ...]
Step = Sequence[tuple[int, int]]  # messages as (rank of the source, rank of the target)
MOST_BY_FORCE = 9
MOST_BY_HELD_KARP = 12
CHUNK = 20_000  # number of orders whose costs are computed at once, which bounds the memory


class Graph(ABC):
    """A plan of messages between ranks."""

    most_exact = MOST_BY_FORCE

    @abstractmethod
    def steps(self, size: int) -> Sequence[Step]:
        """Messages of each step of a period."""

    def exact(self, seconds: Matrix) -> Order:
        """Find the best of all orders, here by trying each."""
        steps, orders = self.steps(len(seconds)), permutations(range(len(seconds)))
        chunks = iter(lambda: list(islice(orders, CHUNK)), [])
        return min(_best(steps, seconds, np.array(chunk)) for chunk in chunks)[1]


@dataclass(frozen=True)
class Listed(Graph):
    """Messages of any plan, as a function of the number of workers."""

    plan: Callable[[int], Sequence[Step]]

    def steps(self, size: int) -> Sequence[Step]:
        return self.plan(size)


class ChainPlacement(Graph):
    """Pipeline: rank i exchanges messages with i - 1 and i + 1. Exact by Held and Karp's dynamic program."""

    most_exact = MOST_BY_HELD_KARP
    closed = False

    def steps(self, size: int) -> Sequence[Step]:
        """One step: messages between neighbours in both directions."""
        pairs = [(i, i + 1) for i in range(size - 1)] + ([(size - 1, 0)] if self.closed and size > 2 else [])
        return [[both for i, j in pairs for both in ((i, j), (j, i))]]

    def exact(self, seconds: Matrix) -> Order:
        """Find the orders with the fastest slowest message, and among them the least sum."""
        slower = np.maximum(seconds, seconds.T)
        slowest, _ = held_karp(slower.tolist(), max, self.closed)
        within = np.where(slower <= slowest, seconds + seconds.T, inf)
        return held_karp(within.tolist(), add, self.closed)[1]


class RingPlacement(ChainPlacement):
    """Ring: a chain whose ends are neighbours."""

    closed = True


def held_karp(
    weights: Sequence[Sequence[float]], join: Callable[[float, float], float], closed: bool
) -> tuple[float, Order]:
    """(cost, order) of the cheapest path, or tour, through all places; symmetric weights joined by `add` or `max`.

    best[places, last] = min over the one before of join(best[places - last, before], weights[before][last])

    Source: Held and Karp, A dynamic programming approach to sequencing problems, 1962. Memory 2^n n."""
    size = len(weights)
    best: dict[tuple[int, int], tuple[float, Order]] = {
        (1 << last, last): (0.0, (last,)) for last in (range(1) if closed else range(size))
    }
    for places in range(1, 1 << size):
        for last in range(size):
            if not (places >> last & 1 and places ^ 1 << last):
                continue
            shorter = places ^ 1 << last
            ways = (
                (join(found[0], weights[before][last]), (*found[1], last))
                for before in range(size)
                if (found := best.get((shorter, before)))
            )
            if shortest := min(ways, default=None):
                best[places, last] = shortest
    ends = [best[(1 << size) - 1, last] for last in range(size) if ((1 << size) - 1, last) in best]
    return min((join(c, weights[o[-1]][o[0]]), o) for c, o in ends) if closed else min(ends)


def cost(steps: Sequence[Step], seconds: Matrix, order: Sequence[int]) -> tuple[float, float]:
    return _best(steps, seconds, np.array([order]))[0]


def _best(steps: Sequence[Step], seconds: Matrix, orders: npt.NDArray[np.int64]) -> tuple[tuple[float, float], Order]:
    """(cost, order) of the best row of orders [orders, ranks]."""
    slowest, total = np.zeros(len(orders)), np.zeros(len(orders))
    for step in steps:
        if step:
            sources, targets = np.array(step).T
            messages = seconds[orders[:, sources], orders[:, targets]]
            slowest += messages.max(1) / len(steps)
            total += messages.sum(1) / len(steps)
    first = np.lexsort((total, slowest))[0]
    return (float(slowest[first]), float(total[first])), tuple(orders[first].tolist())


def search(steps: Sequence[Step], seconds: Matrix, seed: int, starts: int) -> Order:
    """Local search from the present order and from random ones. Takes the best of all swaps of two hosts and all
    reversals of a piece (2-opt), until none is better. Not exact. Equal seeds give equal orders."""
    random = Random(seed)
    size = len(seconds)
    firsts = [tuple(range(size)), *(tuple(random.sample(range(size), size)) for _ in range(starts))]
    return min(_descend(steps, seconds, first) for first in firsts)[1]


def _descend(steps: Sequence[Step], seconds: Matrix, order: Order) -> tuple[tuple[float, float], Order]:
    same = np.arange(len(order))
    rows = [same]
    for i, j in combinations(range(len(order)), 2):
        swapped, reversed_ = same.copy(), same.copy()
        swapped[[i, j]] = same[[j, i]]
        reversed_[i : j + 1] = same[i : j + 1][::-1]
        rows += [swapped, reversed_]
    moves = np.array(rows)  # [moves, ranks]: the rank whose host each rank gets
    best = cost(steps, seconds, order), order
    while True:
        orders = np.array(best[1])[moves]
        found = min(_best(steps, seconds, orders[i : i + CHUNK]) for i in range(0, len(orders), CHUNK))
        (slowest, total), (slowest_before, total_before) = found[0], best[0]
        # Lower by more than rounding, so that the search ends.
        same_slowest = abs(slowest - slowest_before) <= 1e-12 * slowest_before
        if not (total < total_before * (1 - 1e-12) if same_slowest else slowest < slowest_before):
            return best
        best = found


@dataclass(frozen=True)
class Placement:
    """Order of ranks on hosts, and its cost before and after."""

    order: Order
    before: tuple[float, float]  # cost of the order before
    after: tuple[float, float]
    exact: bool  # no order is better


def place(graph: Graph, seconds: Matrix, *, seed: int = 0, starts: int = 4) -> Placement:
    """Find the exact order for few hosts, or the best by a local search from 1 + `starts` orders for many."""
    size = len(seconds)
    steps, exact = graph.steps(size), size <= graph.most_exact
    order = graph.exact(seconds) if exact else search(steps, seconds, seed, starts)
    return Placement(order, cost(steps, seconds, range(size)), cost(steps, seconds, order), exact)
