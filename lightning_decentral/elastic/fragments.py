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
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.commits import Commits
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.rounds.holding import Holding
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.healing import sound_alone
from lightning_decentral.gossip.compute.travel import pack_states
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import OptimizerMixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.wire.health import REMEDY


class Making(MixerFactory):
    """Makes a member's mixers. Newly trained parameters stay as they are: members may unfreeze in different rounds."""

    def equalize(self, new: Sequence[nn.Parameter]) -> None:
        """Do nothing, so that no member waits for another."""


class Exchanges:
    """All exchanges of a member of a strategy's `run`. `commits`: its votes; None: rounds aren't committed."""

    def __init__(self, run: Any, member: Participant, commits: Commits | None) -> None:
        self._run, self._member, self._commits = run, member, commits
        self._topology: Topology = run.topology.placed(1)  # of one worker per node
        self._entered = False
        self.each: list[ElasticExchange] = []

    def making(self, held: Holding, rule: Combine) -> Making:
        """Return the factory of the member's mixers."""
        run = self._run

        def mixer(rule: Combine, exchange: ElasticExchange) -> Mixer:
            made = held.mixer(rule, exchange, run.delay)
            made.healing = held.healing(run.heals, run._module)
            return made

        def mixers() -> list[Mixer]:
            return [mixer(rule, self._made(part, run.codec, self._commits)) for part in self._topology.fragments]

        def states(optimizer: Optimizer) -> list[StateMixer]:
            # Their rounds aren't committed, as each member keeps states of its own.
            made = {n: self._made(t.along(self._topology), t.codec, None) for n, t in run.states.items()}
            own = {name: mixer(run.states[name].combine, exchange) for name, exchange in made.items()}
            everyone = partial(self._member.meet, made=list)
            return [StateMixer(optimizer, name, mixer, pack_state, everyone) for name, mixer in own.items()]

        def pack_state(optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int]) -> list[Bucket]:
            run.model_layout.restore(chosen)
            return pack_states(optimizer, name, chosen, run.bucket_bytes, 1)

        pack, exact = partial(held.pack, bucket_bytes=run.bucket_bytes), int(run.exact_steps)
        return Making(mixers, pack, states, exact, self._mean, run.model_layout, meet=loops.refuse_others)

    def _made(self, topology: Topology, codec: Codec, commits: Commits | None) -> ElasticExchange:
        plan: Any = {"order": self._run.elastic.asynchronous, "commits": commits, "part": len(self.each)}
        self.each.append(ElasticExchange(topology, self._run.weights, self._member.worker, codec, **plan))
        if self._entered:
            self._member.enter(self.each[-1])
        return self.each[-1]

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

    def enter(self) -> None:
        """Use the member's view from now on."""
        self._entered = True
        for exchange in self.each:
            self._member.enter(exchange)

    def rule(self, mixers: Mixers) -> dict[str, Any]:
        """Copy the rule's state and the checksums of decisions, for a newcomer."""
        exact = mixers.exact_steps or 0

        def kept(own: OptimizerMixer) -> dict[str, Any]:
            # After an exact step all members have the same parameters.
            flats = [bucket.flat for bucket in own.mixer.buckets] if 0 < own.mixer.steps <= exact else []
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
