"""Messages of a gossip step, as a forecast sees them: parameters or a fragment, states of the optimizer, their codec.

talk(parameters) = bytes of the parameters / fragments of the topology        in each step in which anybody talks
talk(state)      = bytes of the state                                         at its own cadence
wire             = what the codec makes of a talk
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.traffic import Cliques, Round
from lightning_decentral.shared.plan.forecast import Floats
from lightning_decentral.shared.plan.profile import Model, RoundWork

AS_THEY_ARE = "Plain()"
UNMEASURED = RoundWork(AS_THEY_ARE)


@dataclass(frozen=True)
class Encoding:
    """Encoding of messages by a codec: bytes on the wire, and work.

    Args:
        codec: its repr, by which the profile knows it.
        wire_bytes: of the payload, by the bytes of what is encoded; padding (up to 128 bytes a parameter) and headers
            (16 bytes a bucket) aside.
        assumed: what it takes more than messages as they are, where the profile doesn't have the codec.
        copies: messages of the model's size that are encoded for one, as a rule may want.
        cliques: how workers exchange it where all of a group receive from all.
    """

    codec: str = AS_THEY_ARE
    wire_bytes: Callable[[float], float] = float
    assumed: RoundWork = UNMEASURED
    copies: float = 1.0
    cliques: Cliques = Cliques.RING

    def work(self, model: Model) -> RoundWork:
        """Work of a round as measured, or that of messages as they are plus what is assumed."""
        known = {work.codec: work for work in model.rounds}
        plain, more = known.get(AS_THEY_ARE, UNMEASURED), self.assumed
        own = plain.own_seconds_per_byte + more.own_seconds_per_byte
        heard = plain.heard_seconds_per_byte + more.heard_seconds_per_byte
        return known.get(self.codec, RoundWork(self.codec, own, heard, plain.round_seconds, plain.message_seconds))


PLAIN = Encoding()


@dataclass(frozen=True)
class Beside:
    """A state of the optimizer that travels with the parameters.

    Args:
        name: as the profile's `states` have it.
        topology: when it travels, and to whom.
    """

    name: str
    topology: Topology
    encoding: Encoding = PLAIN


@dataclass(frozen=True)
class Talk:
    """Message of one step: so many bytes before they are encoded, of a whole worker."""

    topology: Topology
    encoding: Encoding
    bytes: float

    @property
    def wire_bytes(self) -> float:
        return self.encoding.wire_bytes(self.bytes)


def joined(
    plans: Sequence[tuple[Sequence[Floats], Sequence[Round]]],
) -> tuple[list[Floats], tuple[Round, ...]]:
    """Several talks' (exchange seconds, rounds) as one plan: a worker waits for its sources in all of them, and
    their messages share the links, one behind the other. Its period is their least common multiple."""
    if len(plans) == 1:
        return list(plans[0][0]), tuple(plans[0][1])
    period = lcm(*(len(rounds) for _, rounds in plans))
    seconds, steps = [], []
    for step in range(period):
        seconds.append(np.sum([exchange[step % len(exchange)] for exchange, _ in plans], axis=0))
        each = [rounds[step % len(rounds)] for _, rounds in plans]
        steps.append(Round(np.concatenate([one.sources for one in each], axis=1), each[0].loads))
    return seconds, tuple(steps)
