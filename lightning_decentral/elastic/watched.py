"""Values that callbacks read from an elastic worker: settings as text, traffic of its rounds, and the members."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_decentral.elastic.plan.picture import draw_members
from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.process import OneProcess
from lightning_decentral.elastic.wire.rounds.holding import Holding
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.plan.planned_traffic import Cliques, copies_sent
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.summary import ORDERS, rules
from lightning_decentral.gossip.wire.consensus import Consensus, spread
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.making import parameters_of
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.introduction import adam_hint, coded_bytes, traffic
from lightning_decentral.shared.replica_strategy import Evaluate
from lightning_decentral.shared.updates import Mixed
from lightning_decentral.shared.wire.fsdp import local


class WatchedProcess(OneProcess):
    """The attributes and methods of `GossipStrategy` that callbacks use, for the current members."""

    topology: Topology
    weights: Weights
    combine: Combine
    codec: Codec
    delay: int
    evaluate: Evaluate
    heals: int
    _mixers: Mixers
    _held: Holding

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members of this round, the oldest first; empty outside training."""
        return self._member.view.members if self._member and self._member.view else ()

    def rounds(self) -> list[int]:
        """Return the run's next round, counted since the run began, not since this worker joined."""
        return [self._member.next_round] if self._member else []

    wanted = rounds

    def views(self) -> Sequence[View]:
        """Return the memberships (views) of the whole run so far, from its first round. Empty outside training."""
        return self._member.so_far() if self._member and self._member.view else []

    def draw_members(self, file: Path) -> None:
        """Draw which members trained together in which rounds. ValueError without matplotlib."""
        draw_members(self.views(), self.rounds()[0], file)

    def traffic(self) -> Traffic:
        """Return this worker's rounds, bytes sent, seconds waited and in flight since fit began. No communication."""
        return self._mixers.traffic() + Traffic(left_out=self.health.left_out)

    def mixing(self) -> dict[str, float]:
        """Return this worker's mixing values and the numbers of members. No communication."""
        ruled = next((mixed.mixer.mixing() for mixed in self._mixers), {})
        return {**ruled, "delay": float(self.delay), **(self._member.attendance() if self._member else {})}

    def counted(self) -> list[nn.Parameter]:
        """Return the trained parameters that this device has; no other device of the member counts them."""
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    def replaced(self) -> None:
        """Do nothing: `advance` follows."""

    def mixed(self) -> list[Mixed]:
        # The run's round, not the mixer's: the first device may mix for this one.
        return [(self._member.round, self.counted())] if self._member else []

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._held.mean_of(tensors, super().mean_of)

    def _mean_and_carried(self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the means of `tensors`, then the oldest member's `carried` tensors (sent as bytes; no mean)."""
        as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in carried]  # integers have no mean
        found = self.mean_of([*tensors, *as_bytes])  # one collective for both
        values = zip(found[len(tensors) :], carried, strict=True)  # (bytes,) each
        return [*found[: len(tensors)], *(value.view(t.dtype).view(t.shape) for value, t in values)]

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """Compute the consensus error, the members' distance from their mean. Collective."""
        trained = [p.detach() for p in self.counted() if p.requires_grad]
        own, means = (list(map(local, tensors)) for tensors in (trained, self.mean_of(trained)))
        return spread(own, means, lambda squares: self.mean_of(self._held.sums(squares)), 1)

    def introduction(self) -> Sequence[str]:
        (least, most), size = self.elastic.workers, len(self.members)
        who = f"{size} member{'s' * (size > 1)} of {least} to {most} on {self.topology!r}"
        messages = f"{type(self.codec).__name__ if self.codec.encodes else 'uncompressed'} messages"
        together = max(size, 2)  # a single member sends nothing
        copies = copies_sent(self.topology.placed(1), self.weights, 0, together, Cliques.PEERS)
        message, parameters = coded_bytes(self.codec, self.counted()), sum(p.nbytes for p in self.counted())
        sent = traffic(copies * message * self.combine.form.copies, parameters, together)
        sent = sent if size > 1 else f"with a second one {sent}"
        model = "the mean of the members" if self.evaluate == "mean" else "each worker's own model"
        hint = adam_hint(self.optimizers, most, self.lightning_module)
        return [f"elastic gossip: {who}, {messages}, {sent}, {model} is evaluated", *filter(None, [hint])]

    def hyperparameters(self) -> dict[str, float | str]:
        least, most = self.elastic.workers
        among = {"workers": most, "least_workers": least, "dead_after_seconds": self.elastic.dead_after}
        return {**among, "topology": type(self.topology).__name__, **rules(self)}

    def summary(self) -> dict[str, str]:
        """Describe the run's settings as {topic: text}; the members are known later."""
        least, most = self.elastic.workers
        place = self._member.elastic.lobby if self._member else self.elastic.lobby
        return {
            "workers": f"{least} to {most}, which may come and go; they meet at {place}",
            "a silent worker": f"is dead after {self.elastic.dead_after:g} s",
            "topology": repr(self.topology),
            "rule": f"{self.combine!r}, {self.weights!r}",
            "order": f"{self.elastic.asynchronous!r}: nobody waits"
            if self.elastic.asynchronous
            else ORDERS.get(self.delay, f"landed {self.delay} updates later"),
            "evaluated": "the mean of the members" if self.evaluate == "mean" else "each worker's own model",
            "a worker with NaN": f"takes its neighbours' parameters, {self.heals} times at most"
            if self.heals
            else "ends its training, the others train on",
            **({"hint": hint} if (hint := adam_hint(self.optimizers, most, self.lightning_module)) else {}),
        }
