"""Exchanges and mixers of one member, and what a newcomer copies of the rounds.

Each optimizer has an exchange for each fragment of the model, and one for each of its states that travel. A newcomer
copies each rule's state (for outer rounds anchors and momenta), which states travel, and the checksum of the decisions
so far (`commits`).
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.elastic import loops
from lightning_decentral.elastic.compute.gathered import means_of_sound
from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.commits import Commits
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.rounds.holding import Holding
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.healing import sound_alone
from lightning_decentral.gossip.compute.travel import Travel, pack_states
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import OptimizerMixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.wire.health import REMEDY


class Making(MixerFactory):
    """Makes a member's mixers. Parameters that are newly trained stay as they are, as members may unfreeze them in
    different rounds."""

    def equalize(self, new: Sequence[nn.Parameter]) -> None:
        """Do nothing, so that no member waits for another."""


class Exchanges:
    """All exchanges of a member. `commits`: the member's votes; None: rounds aren't committed."""

    def __init__(
        self,
        topology: Topology,  # of one worker per node
        weights: Weights,
        worker: Participant,
        codec: Codec,
        order: Asynchronous | None,
        commits: Commits | None,
    ) -> None:
        self._plan, self._member, self._commits = (topology, weights, codec, order), worker, commits
        self._entered = False
        self.each: list[ElasticExchange] = []

    def making(self, run: Any, held: Holding, rule: Combine) -> Making:
        """Return the factory of the mixers of an elastic run's strategy."""

        def made(rule: Combine, exchange: ElasticExchange) -> Mixer:
            mixer = held.mixer(rule, exchange, run.delay)
            mixer.healing = held.healing(run.heals, run._module)
            return mixer

        def mixers() -> list[Mixer]:
            return [made(rule, self._made(part, self._plan[2], self._commits)) for part in self._plan[0].fragments]

        def states(optimizer: Optimizer) -> list[StateMixer]:
            return [
                StateMixer(optimizer, name, made(travel.combine, self._beside(travel)), pack_state, self._everyone)
                for name, travel in run.states.items()
            ]

        def pack_state(optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int]) -> list[Bucket]:
            run.model_layout.restore(chosen)
            return pack_states(optimizer, name, chosen, run.bucket_bytes, 1)

        pack = partial(held.pack, bucket_bytes=run.bucket_bytes)
        exact = int(run.exact_steps), self._mean
        return Making(mixers, pack, states, *exact, known=run.model_layout, meet=loops.refuse_others)

    def _beside(self, travel: Travel) -> ElasticExchange:
        """Make the exchange of a state, whose rounds aren't committed: each member keeps a state of its own."""
        return self._made(travel.along(self._plan[0]), travel.codec, None)

    def _made(self, topology: Topology, codec: Codec, commits: Commits | None) -> ElasticExchange:
        _, weights, _, order = self._plan
        part = len(self.each)
        lane = 0 if order else part  # asynchronous rounds have one exchange
        worker = self._member.worker
        plan: Any = {"codec": codec, "order": order, "commits": commits, "part": part, "lane": lane}
        self.each.append(ElasticExchange(topology, weights, worker, **plan))
        if self._entered:
            self._member.enter(self.each[-1])
        return self.each[-1]

    def _everyone(self, row: list[int]) -> list[list[int]]:
        rows: list[list[int]] = self._member.meet(row, list)
        return rows

    def _mean(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], str]:
        """Mean over the members, as `health.mean_of_sound`. Members cut off from each other may have two: then their
        checksums differ, and one side joins anew."""
        sound = sound_alone(tensors)
        means = self._member.meet([sound, list(tensors)], means_of_sound)
        if not sound_alone(means):
            raise FloatingPointError(f"no member has sound parameters. {REMEDY}")
        for exchange in self.each:
            for mean in means:
                exchange.chain = zlib.crc32(raw_bytes(mean), exchange.chain)
        return means, "" if sound else f"a parameter isn't finite, or far too large; the others are averaged. {REMEDY}"

    def enter(self, member: Participant) -> None:
        """Use the member's view from now on."""
        self._entered = True
        for exchange in self.each:
            member.enter(exchange)

    def rule(self, mixers: Mixers) -> dict[str, Any]:
        """Copy the rule's state and the checksums of decisions, for a newcomer."""
        exact = mixers.exact_steps or 0

        def kept(own: OptimizerMixer) -> dict[str, Any]:
            # After an exact step all members have the same parameters.
            flats = [bucket.flat for bucket in own.mixer.buckets] if 0 < own.mixer.steps < exact else []
            beside = {state.name: state.state_dict(Mixer.kept) for state in own.states}
            return {**own.mixer.kept(), "beside": beside, "flats": flats}

        return {**loops.copied(mixers.state_dict(kept)), "chains": [exchange.chain for exchange in self.each]}

    def continue_from(self, rule: dict[str, Any]) -> None:
        """Take the checksums that a member has sent."""
        for exchange, chain in zip(self.each, rule.get("chains", ()), strict=False):
            exchange.chain = chain

    def begin_at(self, rule: dict[str, Any], mixers: Iterable[Any], leads: bool) -> None:
        """Begin at the members' anchors, which may have moved since this worker was healed, with the states that travel
        by now. `leads`: this device has the rule's state."""
        for own, given in zip(mixers, rule["mixers"], strict=True):
            own.adopt()
            for bucket in own.buckets:
                bucket.adopt()
            if leads:
                own.mixer.begin_at(given["states"], given["flats"])
            for state in own.states:
                state.load_state_dict(given["beside"][state.name])
            own.store()
        self.continue_from(rule)

    def close(self) -> None:
        """Wait until this member's last votes have left."""
        if self._commits is not None:
            self._commits.close()
