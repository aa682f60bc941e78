"""Mixing matrices W (row i: what i receives): weights, spectral gap, steps to exact consensus."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_decentral.gossip.plan.topology.topology import Topology, completed, step_graph

EXACT = 1e-12
FAR = 1e-6


@dataclass(frozen=True, eq=False)  # no two instances of a user's class without fields are equal, for caches of plans
class Weights(ABC):
    """Base of mixing weights: row(topology, rank, size, step) -> {j: w_ij}, i = rank included, summing to one."""

    @abstractmethod
    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        """Weights of `rank`'s received messages at `step`: exactly one for each source, and its own."""


@dataclass(frozen=True)
class Own(Weights):
    """The topology's own weights, `Topology.row`."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        return topology.row(rank, size, step)


@dataclass(frozen=True)
class MetropolisHastings(Weights):
    """w_ij = 1 / (1 + max(d_i, d_j)): doubly stochastic on every symmetric graph. Source: Xiao and Boyd 2004."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        return step_graph(topology, size, step).metropolis_hastings(rank)


@dataclass(frozen=True)
class Uniform(Weights):
    """w_ij = 1 / (1 + d_i): the mean of received messages. Keeps the mean of all workers only if degrees are equal."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        sources = step_graph(topology, size, step).sources[rank]
        return completed(rank, dict.fromkeys(sources, 1 / (1 + len(sources))))


@dataclass(frozen=True)
class Dyadic(Weights):
    """w_ij = 2^-ceil(log2(1 + d_i)), powers of two, so that products are exact. For `RelaySum`."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        sources = step_graph(topology, size, step).sources[rank]
        return completed(rank, dict.fromkeys(sources, 0.5 ** len(sources).bit_length()))


@dataclass(frozen=True)
class OutDegree(Weights):
    """p_ij = 1 / (1 + number of j's targets): columns sum to one on every graph, rows need not. For `PushSum`."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        graph = step_graph(topology, size, step)
        return {j: 1 / (1 + len(graph.targets[j])) for j in sorted({rank, *graph.sources[rank]})}


Matrix = NDArray[np.float64]


def mixing_matrix(topology: Topology, size: int, step: int, weights: Weights | None = None) -> Matrix:
    """Mixing matrix W, W[i, j] = w_ij, float64 [size, size]: mixed = W @ sent. `weights` default to `Own()`."""
    return entries(topology, size, step, weights).dense()


@dataclass(frozen=True)
class Entries:
    """Mixing matrix in compressed rows: W[i, columns[e]] = values[e] for starts[i] <= e < starts[i + 1].

    Shapes: starts [size + 1], columns [edges], values [edges]. Within a row columns keep the order of the dict."""

    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def size(self) -> int:
        return len(self.starts) - 1

    @property
    def mostly_zero(self) -> bool:
        """Return whether so few values aren't zero that a sparse product pays."""
        return len(self.values) < DENSE_FRACTION * self.size**2

    @property
    def silent(self) -> bool:
        return len(self.values) == self.size

    @cached_property
    def own(self) -> NDArray[np.float64]:
        """w_ii of every worker, [size, 1]."""
        rows = np.repeat(np.arange(self.size), np.diff(self.starts))
        own = rows == self.columns
        found = np.zeros((self.size, 1))
        found[rows[own], 0] = self.values[own]
        return found

    @property
    def degree(self) -> NDArray[np.float64]:
        """Number of sources of each worker, [size, 1]."""
        return np.diff(self.starts)[:, None] - 1.0

    def dense(self) -> Matrix:
        matrix = np.zeros((self.size, self.size))
        matrix[np.repeat(np.arange(self.size), np.diff(self.starts)), self.columns] = self.values
        return matrix

    def __matmul__(self, other: Matrix) -> Matrix:
        """W @ other, [size, n]."""
        return self._gathered(other) if self.mostly_zero else self.dense() @ other

    def _gathered(self, other: Matrix) -> Matrix:
        # The first entries of all rows, then the second ones, and so on: as many passes as the longest row has.
        counts, product = np.diff(self.starts), np.zeros_like(other)
        for place in range(counts.max()):
            rows = np.flatnonzero(counts > place)
            entries = self.starts[rows] + place
            product[rows] += self.values[entries, None] * other[self.columns[entries]]
        return product


def entries(topology: Topology, size: int, step: int, weights: Weights | None = None) -> Entries:
    """Mixing matrix W in compressed rows, as `mixing_matrix` dense."""
    return compressed([(weights or Own()).row(topology, rank, size, step) for rank in range(size)])


@dataclass(frozen=True)
class Neighbours:
    """One worker's neighbours at one step: row = {j: w_ij}, i = rank included; targets = {k: w_ki} for the workers
    that receive from it."""

    rank: int
    row: Mapping[int, float]
    targets: Mapping[int, float]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Sorted ranks from which the worker receives."""
        return tuple(sorted(set(self.row) - {self.rank}))

    @cached_property
    def silent(self) -> bool:
        """Return whether the worker neither sends nor receives a message."""
        return not self.sources and not self.targets

    @property
    def own(self) -> float:
        return self.row[self.rank]

    @property
    def degree(self) -> int:
        return len(self.sources)


def neighbours(topology: Topology, weights: Weights, rank: int, size: int, step: int) -> Neighbours:
    targets = step_graph(topology, size, step).targets[rank]
    row = weights.row(topology, rank, size, step)
    return Neighbours(rank, row, {k: weights.row(topology, k, size, step)[rank] for k in targets})


def _products(topology: Topology, size: int, steps: int, weights: Weights | None) -> Iterator[Matrix]:
    """Yield the products W_t ... W_1 W_0 for t = 0, 1, ..., steps - 1."""
    period = topology.period(size)
    matrices: list[Entries] = []
    product = np.eye(size)
    for step in range(steps):
        if step < period:
            matrices.append(entries(topology, size, step, weights))
        product = matrices[step % period] @ product
        yield product


@lru_cache(maxsize=64)
def consensus_steps(topology: Topology, size: int, weights: Weights | None = None) -> int | None:
    """Steps to exact consensus: smallest m with W_(m-1) ... W_1 W_0 = 1 1^T / n to 1e-12; None if over two periods."""
    if size == 1:
        return 0
    before = 1.0
    for steps, product in enumerate(_products(topology, size, 2 * topology.period(size), weights), 1):
        error = float(np.abs(product - 1 / size).max())
        if error < EXACT:
            # An error that shrinks to 1e-12 gradually isn't exact consensus: the last step must start far away.
            return steps if before > FAR else None
        before = error
    return None


def gap_per_step(topology: Topology, size: int, weights: Weights | None = None) -> float:
    """Spectral gap per step: 1 - rho^(1/p), rho the second largest |eigenvalue| of the product of a period's p W_t."""
    period = topology.period(size)
    *_, product = _products(topology, size, period, weights)
    # Rounding may make the gap larger than 1.
    rho = max(0.0, 1 - spectral_gap(product))
    return float(1 - rho ** (1 / period))


def talking_steps(topology: Topology, size: int) -> list[int]:
    """Steps of a period in which any worker sends a message."""
    return [step for step in range(topology.period(size)) if step_graph(topology, size, step).degree]


def local_steps(topology: Topology, size: int) -> int:
    """Mean number of training steps per step with messages, rounded; at least 1."""
    return max(1, round(topology.period(size) / max(1, len(talking_steps(topology, size)))))


def most_in_flight(topology: Topology, size: int, delay: int) -> int:
    """Largest number of steps with messages among `delay` consecutive steps; at least 1."""
    period, talking = topology.period(size), talking_steps(topology, size)
    return max(1, *(sum((start + i) % period in talking for i in range(delay)) for start in talking or [0]))


def describe(topology: Topology, size: int, weights: Weights | None = None) -> str:
    """Describe the topology for the start-up summary, e.g. "Auto -> Hypercube, exact consensus every 2 steps"."""
    if size == 1:
        return f"{topology.label(size)}, one worker without neighbours"
    steps = consensus_steps(topology, size, weights)
    if steps is not None:
        return f"{topology.label(size)}, exact consensus every {'step' if steps == 1 else f'{steps} steps'}"
    per_step = " per step" if topology.period(size) > 1 else ""
    return f"{topology.label(size)}, spectral gap {gap_per_step(topology, size, weights):.2g}{per_step}"


DENSE_FRACTION = 0.25  # of entries; from there on a dense product is as fast as a sparse one


def compressed(rows: Sequence[Mapping[int, float]]) -> Entries:
    """Compress rows[i] = {j: w_ij}, j = i included, to `Entries`."""
    starts = [0, *accumulate(map(len, rows))]
    columns = [column for row in rows for column in row]
    values = [value for row in rows for value in row.values()]
    return Entries(np.array(starts), np.array(columns), np.array(values, dtype=np.float64))


def spectrum(matrix: Matrix) -> NDArray[np.complex128]:
    """Eigenvalues of a mixing matrix [size, size], in any order."""
    graph = nx.from_numpy_array(matrix != 0)
    # Workers that aren't linked make separate blocks, and blocks of one size are solved together: a
    # thousand workers that exchange in pairs cost five hundred tiny problems, not one large one.
    by_size: dict[int, list[list[int]]] = {}
    for component in nx.connected_components(graph):
        by_size.setdefault(len(component), []).append(sorted(component))
    solve = np.linalg.eigvalsh if np.array_equal(matrix, matrix.T) else _eigenvalues
    blocks = [np.array(members) for members in by_size.values()]
    return np.concatenate([solve(matrix[m[:, :, None], m[:, None, :]]).ravel() for m in blocks]).astype(np.complex128)


def _eigenvalues(blocks: Matrix) -> NDArray[np.complex128]:
    """Eigenvalues of matrices [count, size, size]."""
    place = np.arange(blocks.shape[-1])
    circulant = blocks[:, 0, (place[None, :] - place[:, None]) % len(place)]
    # Eigenvalues of a circulant matrix, where each row is the row above shifted by one, are the Fourier transform of
    # its first row.
    found = np.fft.fft(blocks[:, 0]) if np.array_equal(blocks, circulant) else np.linalg.eigvals(blocks)
    return found.astype(np.complex128)


def without_mean(matrix: Matrix) -> NDArray[np.complex128]:
    """Eigenvalues of a doubly stochastic matrix [size, size] except the eigenvalue 1 of the mean."""
    eigenvalues = spectrum(matrix)
    return np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1)))


def spectral_gap(matrix: Matrix) -> float:
    """Spectral gap: 1 - max |lambda| over the eigenvalues `without_mean`.

    One step of mixing shrinks the distance to the mean by at least the factor 1 - gap if the matrix is symmetric, else
    in the long run. With gap 0 this matrix alone never reaches the mean. One worker has gap 1."""
    return float(1 - np.abs(without_mean(matrix)).max(initial=0.0))
