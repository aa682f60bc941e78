"""Stability of delayed mixing: the largest stable mixing rate for a delay, from eigenvalues of mixing matrices."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf, pi
from typing import NamedTuple

import numpy as np

from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import (
    Matrix,
    Weights,
    mixing_matrix,
    most_in_flight,
    spectrum,
    talking_steps,
    without_mean,
)

CONTRACTS = 1 - 1e-9  # A spectral radius, or a share of the largest rate, below it is below 1 in spite of rounding.


def stable_rate(matrix: Matrix, flights: int) -> float:
    """Mixing rate below which x(t+1) = x(t) + rate (W - I) x(t-k+1) contracts, k = flights >= 1 messages in flight.

    Along an eigenvector with eigenvalue lambda, mu = rate (1 - lambda), a solution z^t has z^k - z^(k-1) + mu = 0. At
    mu = 0 the roots are 1 and 0 (k - 1 times); for small mu the first moves inwards, as Re(1 - lambda) > 0. Stability
    is lost where a root meets the unit circle: z = e^(ia) gives

        mu = z^(k-1) (1 - z) = 2 sin(a/2) e^(i ((2k-1) a/2 - pi/2)),        0 < a < 2 pi,

    so at |arg mu| = pi/2 - (2k-1) a/2 first (e^(-ia) belongs to the conjugate mu). Hence mixing is stable iff

        |mu| < 2 sin((pi/2 - |arg mu|) / (2k - 1))            for every lambda != 1,

    which for real lambda is rate (1 - lambda) < 2 sin(pi / (2 (2k - 1))): 2, 1, 0.618, 0.445 for k = 1, 2, 3, 4.
    The rate is infinite if the matrix mixes nothing."""
    mu = 1 - spectrum(matrix)
    # Without the eigenvalue 1 of the mean, which mixing keeps.
    mu = mu[np.abs(mu) > 1e-9]
    limits = 2 * np.sin((pi / 2 - np.abs(np.angle(mu))) / (2 * flights - 1)) / np.abs(mu)
    return float(limits.min(initial=inf))


def rate_for_any_order(matrix: Matrix, flights: int) -> float:
    """1 / ((1 - w) (2k - 1)), w the smallest W[i, i]: mixing rates below are stable for doubly stochastic matrices in
    any order.

    Let L = I - W. |L y|^2 <= 2 (1 - w) y^T L y, since (W - w I) / (1 - w) is doubly stochastic, too. Sum over t

        |x(t+1)|^2 - |x(t)|^2 = -2 rate x(t)^T L x(t-k+1) + rate^2 |L x(t-k+1)|^2,

    write x(t) as x(t-k+1) plus k - 1 increments rate L x, and bound each product of two terms |L x| by half the sum of
    their squares: the sum is negative if rate (1 - w) (2k - 1) < 1."""
    smallest = float(np.diagonal(matrix).min())
    return inf if smallest == 1 else 1 / ((1 - smallest) * (2 * flights - 1))


class RepeatedCorrection(NamedTuple):
    """Repetition of a correction d by a rule: gain keep^j d is added j steps after d, from j = 0 on."""

    gain: float
    keep: float


def growth(blocks: Sequence[Matrix], delay: int, rate: float, echo: RepeatedCorrection | None = None) -> float:
    """Spectral radius of one period of mixing whose corrections d(t) = rate B_t x(t-k+1), k = max(1, delay), come back:

        e(t) = keep e(t-1) + gain d(t);  x(t+1) = x(t) + d(t) + e(t).

    `blocks`: B_t = W_t - I of all steps of the period, [m, m], without the mean. The state is the last k values of x,
    and e if there is an echo: k m rows, or (k + 1) m."""
    m, kept = len(blocks[0]), max(1, delay) * len(blocks[0])
    state = np.eye(kept + (m if echo else 0))
    for block in blocks:
        newest, oldest, before = state[:m], state[kept - m : kept], state[kept:]
        correction = rate * (block @ oldest)
        again = echo.keep * before + echo.gain * correction if echo else before
        newest = newest + correction + again if echo else newest + correction
        state = np.concatenate([newest, state[: kept - m], again])
    return float(np.abs(np.linalg.eigvals(state)).max())


def blocks_without_mean(matrices: Sequence[Matrix]) -> list[Matrix]:
    """W - I of each matrix, restricted to the complement of the mean, which mixing keeps: [size - 1, size - 1]."""
    size = len(matrices[0])
    rows = np.linalg.svd(np.ones((1, size)))[2][1:]  # orthonormal basis of the vectors with mean 0
    return [rows @ (matrix - np.eye(size)) @ rows.T for matrix in matrices]


def first_unstable(blocks: Sequence[Matrix], delay: int, below: float, above: float) -> float:
    """Lowest unstable mixing rate from `below`, which is stable, to `above`; `above` if all are stable."""
    if below >= above:
        return above
    # A scan before the bisection: a period may grow, and contract again at larger rates; or not contract at 1 alone.
    scan = sorted([*map(float, np.linspace(below, above, 17)[1:] * (1 - 1e-4)), *[1.0] * (below < 1 < above)])
    unstable = next((i for i, rate in enumerate(scan) if growth(blocks, delay, rate) >= CONTRACTS), None)
    if unstable is None:
        return above
    below, above = (scan[unstable - 1] if unstable else below), scan[unstable]
    while above - below > 1e-3 * above:
        middle = (below + above) / 2
        below, above = (below, middle) if growth(blocks, delay, middle) >= CONTRACTS else (middle, above)
    return below


LARGEST_STATE = 1024  # rows of the largest system; about a second for each rate that is tried


@lru_cache(maxsize=64)
def largest_rate_with_echo(
    topology: Topology, size: int, delay: int, weights: Weights, echo: RepeatedCorrection
) -> float:
    """Largest mixing rate up to 1 at which mixing with repeated corrections contracts; 2 if it contracts at 1.
    ValueError: the sequence of matrices is too large to compute its stability."""
    periods = list(_periods(topology, size, delay, weights))

    def contracts(rate: float) -> bool:
        return all(growth(blocks, delay, rate, echo) < CONTRACTS for blocks in periods)

    if contracts(1.0):
        return 2.0
    stable, unstable = 0.0, 1.0
    while unstable - stable > 1e-3:
        middle = (stable + unstable) / 2
        stable, unstable = (middle, unstable) if contracts(middle) else (stable, middle)
    return stable


def _periods(topology: Topology, size: int, delay: int, weights: Weights) -> Iterator[list[Matrix]]:
    """W_t - I of a period's steps without the mean: a scalar system for each eigenvalue, or one system of matrices."""
    talking = talking_steps(topology, size)
    steps = range(topology.period(size))
    # One matrix, perhaps in every k-th step only: each eigenvalue by itself.
    if len(talking) <= 1:
        values = without_mean(mixing_matrix(topology, size, talking[0] if talking else 0, weights))
        for value in dict.fromkeys(complex(v) for v in np.round(values, 9)):  # each eigenvalue once
            yield [np.full((1, 1), value - 1 if step in talking else 0.0) for step in steps]
        return
    # A sequence of matrices with other eigenvectors each: one period as a linear map.
    if (size - 1) * (max(1, delay) + 1) > LARGEST_STATE:
        raise ValueError(
            f"{topology.label(size)} changes over {len(steps)} steps, which is too large to judge for {size} workers "
            f"with delay {delay}: use a topology of one matrix, such as Ring(), Torus() or Exponential()"
        )
    yield blocks_without_mean([mixing_matrix(topology, size, step, weights) for step in steps])


ABOVE_ALL_RATES = 1.25  # rates are up to 1
LARGEST_PERIOD_STATE = 256  # rows; about 0.1 s for each rate that is tried


def stable_at_one(topology: Topology, size: int, delay: int, weights: Weights) -> bool:
    """Return whether doubly stochastic mixing contracts at every rate up to 1 for a reason that needs no eigenvalues.
    With one message in flight and every w_ii > 0 mixing contracts: |W x| < |x|, unless x is equal on all workers that
    exchange messages. So over a period that connects all workers, x without its mean becomes shorter."""
    talking = talking_steps(topology, size)
    rows = ((weights.row(topology, rank, size, step), rank) for step in talking for rank in range(size))
    return most_in_flight(topology, size, delay) == 1 and all(row.get(rank, 0.0) > 0 for row, rank in rows)


def largest_stable_rate(topology: Topology, size: int, delay: int, weights: Weights | None = None) -> float:
    """Mixing rate below which mixing with this delay contracts.

    For one matrix the rate is `stable_rate`, which is exact. For a sequence of matrices it is the rate at which one
    period as a whole stops contracting, or `rate_for_any_order` if the period is too large for that.

    k, messages in flight, is `most_in_flight`: Every(k, topology) with delay k has one. Infinite for one worker."""
    window, period, talking = max(1, delay), topology.period(size), talking_steps(topology, size)
    flights = most_in_flight(topology, size, delay)

    def lowest(limit: Callable[[Matrix, int], float]) -> float:
        return min((limit(mixing_matrix(topology, size, step, weights), flights) for step in talking), default=inf)

    by_eigenvalue = lowest(stable_rate)
    if flights == 1 or len(talking) == 1:
        return by_eigenvalue
    # The smallest stable rate of the single matrices isn't always safe: seven workers in five random pairings with
    # delay 2 diverge at rates below 1.
    in_any_order = lowest(rate_for_any_order)
    if (size - 1) * window > LARGEST_PERIOD_STATE:
        return min(by_eigenvalue, in_any_order)
    blocks = blocks_without_mean([mixing_matrix(topology, size, step, weights) for step in range(period)])
    # A sequence may contract at rates at which none of its matrices alone does.
    return first_unstable(blocks, window, below=in_any_order, above=max(by_eigenvalue, ABOVE_ALL_RATES))
