"""Asynchronous gossip: no worker waits; each mixes the messages it has received, older ones with less weight.

    x_i   <- x_i + rate sum_j a_j (received_j - sent_i)
    a_j    = w_ij / (1 + damping age_j),     age_j = max(0, r_i - r_j)

r_i is the round in which sent_i left, r_j the message's round, and w_ij the weight of j in round r_j. Rounds are a
logical clock: a worker more than `behind` rounds later than the newest message skips to that message's round.

Mixing is stable for all ages. sent_i is the present x_i without the last update, so
x_i + sum_j a_j (received_j - sent_i) is a convex combination of old and new parameters, plus an update. If every
worker keeps a share of its own, ages are bounded and the graph is connected over time, such combinations contract
geometrically to one value. The mean isn't preserved: a worker from which others receive less counts less.

Source: partially asynchronous agreement, Bertsekas and Tsitsiklis 1989, section 7.3; logical clocks, Lamport 1978."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.shared.plan.arguments import at_least, checked


class Arrival(NamedTuple):
    """A message that this worker has received."""

    source: int  # rank of the sender
    round: int  # round in which the message left
    at: Neighbours  # this worker's sources in that round


@checked
@dataclass(frozen=True)
class Asynchronous:
    """Option of `Elastic(asynchronous=...)`: rounds in which no worker waits for another.

    Args:
        damping: how fast a message's weight falls with its age: at 1 to a half after one round, a third after two.
        behind: number of rounds of delay beyond which a worker skips to the newest round.

    Raises:
        ValueError: a negative number.
    """

    damping: float = 1.0
    behind: int = 4

    def __post_init__(self) -> None:
        at_least(0, "0 mixes all messages alike, 1 is usual", damping=self.damping)
        at_least(0, "0 skips every round that others have begun, 4 is usual", behind=self.behind)

    def row(self, rank: int, round: int, arrivals: Sequence[Arrival]) -> dict[int, float]:
        """Return the mixing weights {j: a_j} of received messages, after this worker's own weight (the rest to 1).

        Messages of several rounds of a changing graph together weigh at most as much as those of one round."""
        shares = {a.source: a.at.row[a.source] / (1 + self.damping * max(0, round - a.round)) for a in arrivals}
        most, total = max((1 - a.at.own for a in arrivals), default=0.0), sum(shares.values())
        scale = min(1.0, most / total) if total else 1.0
        return {rank: 1 - scale * total, **{j: scale * share for j, share in shares.items()}}

    def next_round(self, round: int, newest: int) -> int:
        """Return the next round: `round`, or the newest received one if that is more than `behind` rounds later."""
        return newest if newest > round + self.behind else round
