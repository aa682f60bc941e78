"""Asynchronous rounds in one process, on a virtual clock: the code of every worker, over links that take their time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import groupby

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.elastic.wire.rounds.asynchronous import AsynchronousExchange
from lightning_decentral.elastic.wire.rounds.links import Post
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.deterministic import Plain
from lightning_decentral.shared.plan.arguments import at_least
from lightning_decentral.shared.wire.transport import Message

CPU = torch.device("cpu")


@dataclass
class Letter:
    """A round of one worker on its way to another."""

    round: int
    arrives: float
    messages: list[bytearray]


@dataclass
class VirtualLinks(Post):
    """One worker's links.

    Args:
        transit: seconds that a round takes to another worker; the next one leaves after them.
    """

    rank: int
    size: int
    transit: Callable[[int, int], float]
    all: list["VirtualLinks"] = field(repr=False)
    now: float = 0.0
    round: int = 0
    begun: int = 0

    def __post_init__(self) -> None:
        self._coming: dict[int, list[Letter]] = {}
        self._free_at: dict[int, float] = {}

    def post(self, sends: Sequence[Message]) -> int:
        sent = 0
        for peer, messages in groupby(sorted(sends, key=lambda m: m.peer), lambda m: m.peer):
            if self._free_at.get(peer, 0.0) <= self.now:
                raw = [bytearray(raw_bytes(m.tensor)) for m in messages]
                self._free_at[peer] = arrives = self.now + self.transit(self.rank, peer)
                self.all[peer]._coming.setdefault(self.rank, []).append(Letter(self.round, arrives, raw))
                sent += sum(map(len, raw))
        return sent

    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        found = {}
        for peer, letters in self._coming.items():
            came = [letter for letter in letters if letter.arrives <= self.now]
            self._coming[peer] = letters[len(came) :]
            if came:
                found[peer] = came[-1].round, came[-1].messages
                self.begun = max(self.begun, came[-1].round)
        return found


@dataclass
class Row:
    """Bucket of one worker's parameters."""

    flat: Tensor

    def adopt(self) -> None:
        """Do nothing: nothing else holds them."""


def simulate_asynchronous(
    topology: Topology,
    gradient: Callable[[int, Tensor, int], Tensor],
    x0: Tensor,
    seconds: float,
    learning_rate: float,
    pace: Callable[[int, int], float],
    transit: Callable[[int, int], float] = lambda source, target: 0.0,
    order: Asynchronous | None = None,
    rate: float = 1.0,
    weights: Weights | None = None,
    codec: Codec | None = None,
    every: float = 1.0,
) -> Tensor:
    """x_i <- x_i - learning_rate * gradient(i, x_i, round), then what has come is mixed; each worker at its own pace.

    Args:
        gradient: (worker, x_i [dim], round) -> [dim].
        x0: [size, dim], row i where worker i starts.
        seconds: of the virtual clock.
        pace: (worker, round) -> seconds of that step, above 0.
        transit: (source, target) -> seconds of a message between them; a link carries one at a time.
        order: `Asynchronous()` by default.
        rate: of `Gossip`.
        codec: of messages, one that keeps nothing.
        every: seconds between two rows of the result.

    Returns:
        [seconds // every + 1, size, dim]: x0, and the parameters after so many seconds each.

    Raises:
        ValueError: a step takes no time, or `every` isn't positive.
    """
    at_least(1e-9, "give seconds between two rows", every=every)
    order, size, x = order or Asynchronous(), len(x0), x0.detach().clone()
    links: list[VirtualLinks] = []
    links += [VirtualLinks(rank, size, transit, links) for rank in range(size)]
    plan = topology, weights or Own()
    exchanges = [AsynchronousExchange(*plan, link, CPU, codec or Plain(), order=order) for link in links]
    mixers = [Mixer([Row(row)], Gossip(rate=rate), exchange, 1) for row, exchange in zip(x, exchanges, strict=True)]
    ends = [(_took(pace, worker, 0), worker) for worker in range(size)]
    heapify(ends)
    found = [x0.detach().clone()]
    while len(found) < seconds // every + 1:
        now, worker = ends[0]
        if now > len(found) * every:
            found.append(x.clone())
            continue
        link, mixer = links[worker], mixers[worker]
        x[worker].sub_(gradient(worker, x[worker], mixer.round), alpha=learning_rate)
        link.now, link.round = now, mixer.round
        mixer.step(learning_rate)
        mixer.round = order.next_round(mixer.round, link.begun)
        heapreplace(ends, (now + _took(pace, worker, mixer.round), worker))
    return torch.stack(found)


def _took(pace: Callable[[int, int], float], worker: int, round: int) -> float:
    seconds = pace(worker, round)
    if not seconds > 0:
        raise ValueError(f"worker {worker}'s step of round {round} takes {seconds} seconds: give more than 0")
    return seconds
