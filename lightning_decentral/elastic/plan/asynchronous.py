"""Asynchronous gossip: nobody waits; a worker mixes what has come, the older the less.

    x_i   <- x_i + rate sum_j a_j (received_j - sent_i)
    a_j    = w_ij / (1 + damping age_j),     age_j = max(0, r_i - r_j)

r_i is the round in which sent_i left, r_j the message's own, and w_ij the weight of j in that round. Rounds are a
logical clock: a worker more than `behind` rounds later than what it received goes on in the newest of them.

Stable for all ages. A worker's own part is its present x but for the last update, so
x_i + sum_j a_j (received_j - sent_i) is a convex combination of parameters, old and new, and an update. Where each
keeps a share of its own, ages are bounded and news of each reaches all, such combinations contract geometrically to one
value within what they began with. The mean isn't kept: a worker that others receive from less counts less.

Source: partially asynchronous agreement, Bertsekas and Tsitsiklis 1989, section 7.3; logical clocks, Lamport 1978.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.shared.plan.arguments import at_least, checked


class Arrival(NamedTuple):
    """A message that has come."""

    source: int  # its sender's rank
    round: int  # in which it left
    at: Neighbours  # this worker's sources in that round


@checked
@dataclass(frozen=True)
class Asynchronous:
    """Rounds in which nobody waits, as `Elastic(asynchronous=...)` has them.

    Args:
        damping: what a round of age costs a message: at 1 it counts half after one round, a third after two.
        behind: rounds, beyond which a worker leaves out those that it is late by.

    Raises:
        ValueError: one of them is negative.
    """

    damping: float = 1.0
    behind: int = 4

    def __post_init__(self) -> None:
        at_least(0, "0 mixes all messages alike, 1 is usual", damping=self.damping)
        at_least(0, "0 leaves out every round that others have begun, 4 is usual", behind=self.behind)

    def row(self, rank: int, round: int, arrivals: Sequence[Arrival]) -> dict[int, float]:
        """{j: a_j} of what has come, and what is left for this worker itself, first.

        Of several rounds of a graph that changes, messages together weigh at most what one round's do.
        """
        shares = {a.source: a.at.row[a.source] / (1 + self.damping * max(0, round - a.round)) for a in arrivals}
        most, total = max((1 - a.at.own for a in arrivals), default=0.0), sum(shares.values())
        scale = min(1.0, most / total) if total else 1.0
        return {rank: 1 - scale * total, **{j: scale * share for j, share in shares.items()}}

    def next_round(self, round: int, newest: int) -> int:
        """Number of the next round, where it would be `round` and the newest that was received is this."""
        return newest if newest > round + self.behind else round
