"""Exchanges of one member, one for each fragment of the model, and what a newcomer copies of the rounds.

That is each rule's state (for outer rounds anchors and momenta) and the checksum of the decisions so far (`commits`).
"""

from collections.abc import Iterable
from typing import Any

from lightning_decentral.elastic import loops
from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.commits import Commits
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.codec.codec import Codec


class Exchanges:
    """All exchanges of a member. `commits`: the member's votes; None: rounds aren't committed."""

    def __init__(
        self,
        topology: Topology,  # of one worker per node
        weights: Weights,
        worker: Endpoint,
        codec: Codec,
        order: Asynchronous | None,
        commits: Commits | None,
    ) -> None:
        self._commits = commits
        self.each = [
            ElasticExchange(fragment, weights, worker, codec, order=order, commits=commits, part=part)
            for part, fragment in enumerate(topology.fragments)
        ]

    def enter(self, member: Participant) -> None:
        """Use the member's view from now on."""
        for exchange in self.each:
            member.enter(exchange)

    def rule(self, mixers: Mixers) -> dict[str, Any]:
        """Copy the rule's state and the checksums of decisions, for a newcomer."""
        kept = loops.copied(mixers.state_dict(lambda each: each.mixer.kept()))
        return {**kept, "chains": [exchange.chain for exchange in self.each]}

    def continue_from(self, rule: dict[str, Any]) -> None:
        """Take the checksums that a member has sent."""
        for exchange, chain in zip(self.each, rule.get("chains", ()), strict=False):
            exchange.chain = chain

    def begin_at(self, rule: dict[str, Any], mixers: Iterable[Any], leads: bool) -> None:
        """Begin at the members' anchors, which may have moved since this worker was healed. `leads`: this device has
        the rule's state."""
        for own, given in zip(mixers, rule["mixers"], strict=True):
            own.adopt()
            for bucket in own.buckets:
                bucket.adopt()
            if leads:
                own.mixer.begin_at(given["states"])
            own.store()
        self.continue_from(rule)

    def close(self) -> None:
        """Wait until this member's last votes have left."""
        if self._commits is not None:
            self._commits.close()
