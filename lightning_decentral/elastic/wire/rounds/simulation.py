"""Simulation of asynchronous gossip in one process: the workers' code on a virtual clock, over links with delays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import groupby

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.elastic.wire.rounds.exchange import CPU, AsynchronousExchange, Post
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.plan.arguments import at_least
from lightning_decentral.shared.wire.transport import Message


@dataclass
class VirtualLinks(Post):
    """Virtual links of one worker to the others."""

    rank: int
    size: int
    transit: Callable[[int, int], float]  # seconds of a message (source, target); then the next one leaves
    all: list["VirtualLinks"] = field(repr=False)
    now: float = 0.0
    round: int = 0
    begun: int = 0

    def __post_init__(self) -> None:
        self._coming: dict[int, list[tuple[float, int, list[bytearray]]]] = {}  # {peer: (arrives, round, messages)}
        self._free_at: dict[int, float] = {}

    def post(self, sends: Sequence[Message]) -> int:
        sent = 0
        for peer, messages in groupby(sorted(sends, key=lambda m: m.peer), lambda m: m.peer):
            if self._free_at.get(peer, 0.0) <= self.now:
                raw = [bytearray(raw_bytes(m.tensor)) for m in messages]
                self._free_at[peer] = arrives = self.now + self.transit(self.rank, peer)
                self.all[peer]._coming.setdefault(self.rank, []).append((arrives, self.round, raw))
                sent += sum(map(len, raw))
        return sent

    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        found = {}
        for peer, rounds in self._coming.items():
            came = [coming for coming in rounds if coming[0] <= self.now]  # in the order of sending
            self._coming[peer] = rounds[len(came) :]
            if came:
                _, round, messages = came[-1]  # the newest counts, older ones are dropped
                found[peer], self.begun = (round, messages), max(self.begun, round)
        return found


@dataclass
class Row:
    """Bucket of one simulated worker's parameters."""

    flat: Tensor  # (dim,): a row of x

    def adopt(self) -> None:
        """Do nothing, as there is no other copy of the parameters."""


def simulate_asynchronous(
    topology: Topology,
    gradient: Callable[[int, Tensor, int], Tensor],  # (worker, (dim,), round) -> (dim,)
    # Row i is where worker i starts.
    x0: Tensor,  # (size, dim)
    seconds: float,  # of the virtual clock
    learning_rate: float,
    pace: Callable[[int, int], float],  # (worker, round) -> seconds of that step, above 0
    # (source, target) -> seconds of a message; a link sends one at a time.
    transit: Callable[[int, int], float] = lambda source, target: 0.0,
    order: Asynchronous | None = None,  # `Asynchronous()` by default
    rate: float = 1.0,  # of `Gossip`
    weights: Weights | None = None,
    codec: Codec | None = None,  # codec of messages, without state
    every: float = 1.0,  # seconds between two rows of the result
) -> Tensor:
    """Simulate x_i <- x_i - learning_rate * gradient(i, x_i, round), then mixing of received messages, at own paces.

    Returns:
        [seconds // every + 1, size, dim]: x0, and the parameters after each further `every` seconds.

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
    heapify(ends)  # the worker whose step ends first comes first
    found = [x0.detach().clone()]  # (size, dim) each
    while len(found) < seconds // every + 1:
        now, worker = ends[0]  # replaced below: heapreplace is one sift
        if now > len(found) * every:
            found.append(x.clone())
            continue
        link, mixer = links[worker], mixers[worker]
        x[worker].sub_(gradient(worker, x[worker], mixer.round), alpha=learning_rate)
        link.now, link.round = now, mixer.round
        mixer.step(learning_rate)  # sends messages, mixes those received by `now` into x[worker]
        mixer.round = order.next_round(mixer.round, link.begun)
        heapreplace(ends, (now + _took(pace, worker, mixer.round), worker))
    return torch.stack(found)  # (rows, size, dim)


def _took(pace: Callable[[int, int], float], worker: int, round: int) -> float:
    seconds = pace(worker, round)
    if not seconds > 0:
        raise ValueError(f"worker {worker}'s step of round {round} takes {seconds} seconds: give more than 0")
    return seconds
