"""Exchange of gossip messages in an elastic run: each round uses the peer exchange of the view in force.

    enter(view, round)     sets the members from this round on
    mixer.step(...)        a gossip round: neighbours follow from the view's size and this member's rank in it

The message of a neighbour that ended is replaced by this member's own: the neighbour's weight stays here until the next
view. With symmetric weights the mean of the remaining members is preserved: either both members of a pair exchange, or
(if one is lost or in another view) neither does. While a view stays, rounds equal those of `PeerExchange` bit for bit.
With an `order` no member waits, and each mixes what it has received (`AsynchronousExchange`). With `commits` all mix
the same messages (`commits.CommittedExchange`).

Messages are CPU tensors, point to point (`ViewTransport`). Rounds are numbered, so a member in another view, or that
skipped a round, isn't awaited; a message that never comes is no error."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from statistics import fmean

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.asynchronous import Arrival, Asynchronous
from lightning_decentral.elastic.plan.view import View, place_of
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.rounds.commits import Commits, CommittedExchange
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.elastic.wire.sockets.mesh import Slot
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.error_feedback import coder_of
from lightning_decentral.gossip.compute.link import Coder
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Neighbours, Weights
from lightning_decentral.gossip.wire.exchange import HEADER, Copied, Exchange, Traffic
from lightning_decentral.gossip.wire.peer import PeerExchange, PeerMessage
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.health import stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport

ROUND, ELEMENTS = 0, 1  # indices in a header
LANE_BITS = 20  # an exchange has fewer messages in a round than 2 to this power


@dataclass
class IncomingMessage:
    """A message to this member, received into `tensor`, which stays unchanged if the message is lost."""

    worker: Endpoint
    view: View
    slot: Slot
    tensor: Tensor
    came: bool = False

    def wait(self) -> None:
        client, (sender, _, round, _) = self.worker.lobby_client, self.slot
        found = self.worker.mesh.take(self.slot, lambda: client.state.expects(self.view, round, sender))
        # Otherwise the message is lost, or of another model.
        if found is not None and len(found) == self.tensor.numel() * self.tensor.element_size():
            self.tensor.copy_(torch.frombuffer(found, dtype=self.tensor.dtype).view(self.tensor.shape))
            self.came = True

    def done(self) -> bool:
        """Return whether the message has arrived; False after `wait` means that it is lost."""
        return self.came


class Post(ABC):
    """Interface to asynchronous messages: no member waits, and only a sender's newest messages count."""

    rank: int
    size: int

    @abstractmethod
    def post(self, sends: Sequence[Message]) -> int:
        """Send a copy of a round's messages to each member whose earlier messages have left; others get a later
        round's. Return the number of bytes sent."""

    @abstractmethod
    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        """Return {rank: (round, its messages)} of the senders of which a whole new round has arrived."""


class ViewTransport(Transport, Post):
    """Transport among the members of a view, point to point only, without collectives."""

    def __init__(self, worker: Endpoint, view: View, lane: int = 0) -> None:
        self.group = None  # no process group, but sockets
        self._first = lane << LANE_BITS
        self.rank, self.size = view.members.index(worker.name), len(view.members)  # the oldest has rank 0
        self.round = 0
        self._worker, self._view = worker, view

    def close(self) -> None:
        return  # the connections belong to the worker

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """Send and receive all messages of the round `self.round`."""
        leaving: list[Pending] = [self._send(m, slot) for m, slot in self._numbered(sends)]
        key, members = self._view.key, self._view.members
        slots = [(Slot(members[m.peer], key, self.round, nth), m.tensor) for m, nth in self._numbered(receives)]
        return leaving, [IncomingMessage(self._worker, self._view, slot, tensor) for slot, tensor in slots]

    def post(self, sends: Sequence[Message]) -> int:
        free = {m.peer for m in sends if self._worker.mesh.idle(self._view.members[m.peer])}  # slow links get fewer
        leaving = [(m, slot) for m, slot in self._numbered(sends) if m.peer in free]
        for message, slot in leaving:
            self._send(Message(message.peer, message.tensor.clone(), message.tag), slot)
        return sum(m.tensor.numel() * m.tensor.element_size() for m, _ in leaving)

    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        found = {
            rank: self._worker.mesh.newest(name, self._view.key, slots)
            for rank, name in enumerate(self._view.members)
            if rank != self.rank
        }
        return {rank: round for rank, round in found.items() if round is not None}

    def _send(self, message: Message, slot: int) -> Pending:
        to = self._view.members[message.peer]
        raw = raw_bytes(message.tensor)  # without a copy: the tensor isn't written until it has left
        return self._worker.mesh.send(to, place_of(to), self._view.key, self.round, slot, raw)

    def _numbered(self, messages: Sequence[Message]) -> list[tuple[Message, int]]:
        """Number the messages of each peer, the same on both ends."""
        places: dict[int, count[int]] = defaultdict(partial(count, self._first))
        return [(m, next(places[m.peer])) for m in messages]


@dataclass
class AsynchronousExchange(PeerExchange):
    """`PeerExchange` over each member's newest whole message that has arrived when a round ends; each is mixed once."""

    transport: Post  # type: ignore[assignment]  # methods that wait for messages aren't called
    order: Asynchronous = Asynchronous()  # noqa: RUF009 - a frozen value; how much each counts
    age: float = field(default=0.0, init=False)  # mean age, in rounds, of the messages mixed last

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes: dict[int, list[int]] = {}  # {a bucket's index: bytes of each of its tensors}
        self._came: dict[int, list[bytearray]] = {}
        self._weights: Mapping[int, float] = {}

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> PeerMessage:
        sent, rank = self._copy(message, copied), self.transport.rank
        if place not in self._sizes:
            like = self.coder.buffers([rank], sent, place)[rank]
            self._sizes[place] = [HEADER * 8, *(t.numel() * t.element_size() for t in like)]
            self.pool.give(like)
        packets = self.coder.encode(sent, self.neighbours(step).targets, step, place)
        header = stated([step, self._elements], [sent], self.device).view(1, HEADER)  # (1, HEADER): its own alone
        return PeerMessage(self, step, place, {}, sent, header, packets, {})

    def depart(self, launched: Sequence[PeerMessage], step: int) -> None:
        self._bytes_sent += self.transport.post([*chain(*(message.sends() for message in launched))])

    def receive(self, message: PeerMessage) -> tuple[Mapping[int, Tensor], Tensor]:
        if not message.place:
            self._take(message.step)
        begins = sum(len(sizes) for place, sizes in self._sizes.items() if place < message.place)
        message.buffers, message.row = self.coder.buffers(self._came, message.sent, message.place), self._weights
        headers = [message.headers]  # (1, HEADER) each: its own, then the received ones
        for j, buffers in message.buffers.items():
            raw_header, *payload = self._came[j][begins : begins + len(self._sizes[message.place])]
            headers.append(torch.frombuffer(raw_header, dtype=torch.int64).clone().view(1, HEADER))
            headers[-1][0, ROUND] = message.step  # its age is already in the weight
            for tensor, raw in zip(buffers, payload, strict=True):
                tensor.copy_(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape))  # into a buffer of the pool
        message.headers = torch.cat(headers)  # (1 + senders, HEADER)
        return super().receive(message)

    def _take(self, step: int) -> None:
        """Take the whole rounds that have arrived, and set the weight of each sender."""
        sizes = [size for _, bucket in sorted(self._sizes.items()) for size in bucket]
        found = {
            j: (round, came)
            for j, (round, came) in self.transport.newest(len(sizes)).items()
            # A sender with other trained parameters, or another neighbour's, is skipped.
            if [*map(len, came)] == sizes
            and torch.frombuffer(came[0], dtype=torch.int64)[ELEMENTS] == self._elements
            and j in self.neighbours(round).row
        }
        arrivals = [Arrival(j, round, self.neighbours(round)) for j, (round, _) in found.items()]
        self._weights = self.order.row(self.transport.rank, step, arrivals)
        self._came = {j: came for j, (_, came) in found.items()}
        self.age = fmean([max(0, step - a.round) for a in arrivals] or [0.0])


CPU = torch.device("cpu")
KEPT_VIEWS = 4  # views whose rounds may not be complete


class ForgivingExchange(PeerExchange):
    """Exchange that replaces a lost or incomplete message by this member's own message, as others decode it."""

    def _decoded(self, message: PeerMessage) -> Mapping[int, Tensor]:
        arrived = zip(message.receives(), message.incoming, strict=True)
        lost = {tensor.peer for tensor, pending in arrived if not pending.done()}
        for j, header in zip(message.buffers, message.headers[1:], strict=True):
            if j in lost:
                header.copy_(message.headers[0])
                self.pool.give(message.buffers[j])
        whole = {j: payload for j, payload in message.buffers.items() if j not in lost}
        received, own = self.coder.decode(whole, message.sent, message.place), message.sent
        # Always in the sources' order, in which they are summed.
        return {j: received[j] if j in received else self.pool.take(own).copy_(own) for j in message.buffers}


@dataclass
class ElasticExchange(Exchange[PeerMessage]):
    """Exchange with one `PeerExchange` for each view, on the host."""

    topology: Topology
    weights: Weights
    worker: Endpoint
    codec: Codec = Plain()  # noqa: RUF009 - frozen and stateless, as a link's ends share no history
    pool: Pool = field(default_factory=Pool)
    order: Asynchronous | None = None  # asynchronous rounds; None: a round waits for the live members of its view
    commits: Commits | None = None  # decides each round once for all; None: each member mixes what it has received
    part: int = 0  # number of this exchange among the worker's; tells its messages from others' of the same round
    chain: int = 0  # checksum of the decisions so far, equal on all members
    coder: Coder = field(init=False)

    def __post_init__(self) -> None:
        self.coder = coder_of(self.codec, self.topology, 0, 1, self.pool)  # until the first view
        self._admitted: list[tuple[Sequence[Tensor], Combine]] = []
        self._since: list[tuple[int, PeerExchange]] = []
        self._view: View | None = None
        self._earlier = Traffic()

    def enter(self, view: View, round: int) -> None:
        """Put a view in force from this round on. Rounds rise, and may skip some."""
        if view == self._view:
            return
        self.worker.mesh.awaited = self.order is None
        # Asynchronous rounds have one exchange.
        links = ViewTransport(self.worker, view, 0 if self.order else self.part)
        plan = self.topology, self.weights, links, CPU, self.codec, self.pool
        exchange: PeerExchange = AsynchronousExchange(*plan, self.order) if self.order else ForgivingExchange(*plan)
        if commits := self.commits:
            decide = partial(self._decide, commits, view)
            # Called later: the checksum rises.
            begins = partial(lambda commits, round: commits.begins(round, self.part, self.chain), commits)
            exchange = CommittedExchange(*plan, decide=decide, begins=begins)
        for admitted in self._admitted:
            exchange.admit(*admitted)  # rules that were admitted before the first view
        self.coder = exchange.coder
        self._view = view
        self._since.append((round, exchange))
        for _, old in self._since[:-KEPT_VIEWS]:
            self._earlier += old.traffic()
        self._since = self._since[-KEPT_VIEWS:]

    def _decide(self, commits: Commits, view: View, round: int, ranks: Collection[int]) -> list[int]:
        decision = commits.decide(view, round, self.part, self.chain, {view.members[rank] for rank in ranks})
        self.chain = decision.chain(round)
        return [view.members.index(name) for name in decision.counted]

    @property
    def age(self) -> float:
        """Mean age, in rounds, of the messages mixed last; 0 if rounds aren't asynchronous."""
        exchange = self._since[-1][1] if self._since else None
        return exchange.age if isinstance(exchange, AsynchronousExchange) else 0.0

    def _of(self, step: int) -> PeerExchange:
        return next(exchange for round, exchange in reversed(self._since) if round <= step)

    def neighbours(self, step: int) -> Neighbours:
        return self._of(step).neighbours(step)

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        if reason := combine.recovery.tied:
            raise ValueError(f"{type(combine).__name__} isn't compatible with elastic: {reason}; use Gossip()")
        self._admitted.append((buckets, combine))
        if not self._since:
            self.coder.admit(buckets, combine)
        for _, exchange in self._since:
            exchange.admit(buckets, combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> PeerMessage:
        return self._of(step).launch(message, step, place, copied)

    def depart(self, launched: Sequence[PeerMessage], step: int) -> None:
        exchange = self._of(step)
        exchange.transport.round = step  # type: ignore[attr-defined]  # sent in this round's frames
        exchange.depart(launched, step)

    def traffic(self) -> Traffic:
        return sum((exchange.traffic() for _, exchange in self._since), self._earlier)
