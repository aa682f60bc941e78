"""Commits of outer rounds on sockets: one member's votes over its connections, and the mean of what is counted.

    Commits.decide       runs `plan.commit` until a round is decided; the training thread waits
    CommittedExchange    each sends its displacement to all, and all add up those that are counted, in the view's order

Codes aren't encoded a second time: what a codec loses stays in its sender's parameters, so that no member keeps
anything of another one's."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.commit import Key, Proposal, Rounds, Sends, Vote
from lightning_decentral.elastic.plan.messages import read_message
from lightning_decentral.elastic.plan.view import View, place_of
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.gossip.plan.topology.topology import step_graph
from lightning_decentral.gossip.plan.weights import Neighbours
from lightning_decentral.gossip.wire.exchange import Copied, Dropped
from lightning_decentral.gossip.wire.peer import PeerExchange, PeerMessage
from lightning_decentral.shared.compute.health import judged

AGAIN_SECONDS = 0.25  # seconds until votes are repeated
LEAVE_SECONDS = 5.0  # seconds within which the last votes leave


class Commits:
    """One member's votes about the rounds of all its exchanges."""

    def __init__(self, worker: Endpoint, seconds: float) -> None:
        self.rounds = Rounds(worker.name)
        self._worker, self._seconds = worker, seconds  # after which a round ends with an error
        self._leaving: list[Any] = []
        worker.mesh.on_vote = self._on_vote

    def begins(self, round: int, part: int, chain: int) -> int:
        """Answer votes about earlier rounds to which it never came: it has no messages there. Return `chain`."""
        with self._worker.lobby_client.changed:
            self._send(self.rounds.begins(round, part, chain))
        return chain

    def decide(self, view: View, round: int, part: int, chain: int, has: Collection[str]) -> Proposal:
        """Return the round's decision, when the other members of its view vote, too. RuntimeError if this member can't
        go on with them, TimeoutError if there is none in time."""
        key, client = (view.key, round, part), self._worker.lobby_client
        end, again = time.monotonic() + self._seconds, 0.0
        with client.changed:
            self._send(self.rounds.arrives(key, view, has, chain))
            while (decision := self.rounds.states[key].decided) is None:
                now, newer = time.monotonic(), self._later(view)
                if now > end:
                    raise TimeoutError(f"round {round} wasn't decided in {self._seconds:g} s: are the others reached?")
                live = [name for name in view.members if self._votes(view, round, name)]
                heirs = [name for name in view.members if newer and name in newer.members]
                self.rounds.states[key], sends = self.rounds.states[key].driven(live, heirs, now > again)
                self._send([(key, sends)])
                again = now + AGAIN_SECONDS if now > again else again
                if self.rounds.states[key].decided is None:
                    client.changed.wait(AGAIN_SECONDS)
        if decision.before != chain or not set(decision.counted) <= set(has):
            raise RuntimeError(
                f"the members committed round {round} without this worker, which was cut off from some of them: start "
                "it again, it joins as a new worker"
            )
        return decision

    def close(self) -> None:
        """Wait until the last votes have left, which others may need."""
        end = time.monotonic() + LEAVE_SECONDS
        for sent in self._leaving:
            sent.over.wait(max(0.0, end - time.monotonic()))

    def _later(self, view: View) -> View | None:
        """Return a later view, if one is known. RuntimeError if this member isn't in it."""
        state = self._worker.lobby_client.state
        newer = state.mine.view if state.mine.view and state.mine.view.number > view.number else None
        if state.out or (newer and self._worker.name not in newer.members):
            why = state.out or "the run continued without this worker"
            raise RuntimeError(f"{why}: start this worker again, it joins as a new worker")
        return newer

    def _votes(self, view: View, round: int, name: str) -> bool:
        mesh, state = self._worker.mesh, self._worker.lobby_client.state
        return name == self._worker.name or (name not in mesh.lost and state.expects(view, round, name))

    def _on_vote(self, found: Any) -> None:
        key = int(found["view"]), int(found["round"]), int(found["part"])
        self._send(self.rounds.received(key, tuple(map(str, found["members"])), read_message(Vote, found["vote"])))

    def _send(self, found: Sequence[tuple[Key, Sends]]) -> None:
        for (view, round, part), sends in found:
            members = self.rounds.states[view, round, part].members
            head = {"view": view, "round": round, "part": part, "members": members}
            for to, vote in sends:
                self._leaving.append(self._worker.mesh.vote(to, place_of(to), {**head, "vote": asdict(vote)}))
        self._leaving = [sent for sent in self._leaving if not sent.done()]


@dataclass
class CommittedMessage(PeerMessage):
    """Message in flight of a round that is decided for all buckets together."""

    exchange: "CommittedExchange"
    came: dict[int, bool] = field(default_factory=dict)  # {rank: whether its message is whole and sound}
    complaint: str = ""  # why the own message isn't sound

    def land(self, judged: bool = False) -> Tensor:
        return self.exchange.mean(self)


@dataclass
class CommittedExchange(PeerExchange):
    """mixed = (1 / |S|) sum of sent_j over j in S, the members that `decide` counts, in order of rank: the same bits on
    all. A message that isn't counted is taken as 0, so that it stays in its sender's parameters.

    Where one member is alone it counts itself: outer steps go on."""

    decide: Callable[[int, Collection[int]], Sequence[int]] = field(kw_only=True)  # (round, ranks it has) -> S
    begins: Callable[[int], int] = field(kw_only=True)  # round -> checksum of the decisions so far, sent along
    made = CommittedMessage

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rounds: dict[int, list[CommittedMessage]] = {}  # in flight
        self._counted: dict[int, Sequence[int]] = {}

    def neighbours(self, step: int) -> Neighbours:
        if self.transport.size > 1 or not step_graph(self.topology, 2, step).degree:
            return super().neighbours(step)
        return _Alone(0, {0: 1.0}, {})

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> PeerMessage:
        launched = super().launch(message, step, place, copied)
        assert isinstance(launched, CommittedMessage)
        launched.headers[0, 0] = self.begins(step) << 31 | step
        self._rounds.setdefault(step, []).append(launched)
        return launched

    def mean(self, message: CommittedMessage) -> Tensor:
        """Return the mean of the counted messages. Dropped if there is none."""
        if message.step not in self._counted:
            self._counted = {message.step: self._decided(message.step)}
        counted, own = self._counted[message.step], message.sent
        # Sums of numbers with fewer bits are computed in float32.
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))  # (elements,)
        for rank in counted:
            if rank == self.transport.rank:
                total.add_(own)
            else:
                (part,) = self.coder.decode({rank: message.buffers[rank]}, own, message.place).values()
                total.add_(part)
                self.pool.give([part])
        self.pool.give(b for rank, buffers in message.buffers.items() if rank not in counted for b in buffers)
        message.release()  # before the message itself is overwritten
        if self.transport.rank not in counted:
            own.zero_()
        mixed = self.pool.take(own).copy_(total.div_(max(1, len(counted))))
        if message.complaint:
            if not counted:
                mixed.fill_(torch.inf)  # no outer step that this worker could continue with
            self.verdicts.complaint = message.complaint
            self.verdicts.refuse_own(torch.zeros_like(own), mixed)
        if not counted:
            self.pool.give([mixed])
            raise Dropped
        return mixed

    def _decided(self, step: int) -> Sequence[int]:
        """Wait for the round's messages, all buckets, and for the decision which are counted."""
        launched = self._rounds.pop(step)
        for message in launched:
            self.waited.during(pending.wait for pending in message.incoming)
            self._judge(message)
        ranks = launched[0].came
        return self.decide(step, [rank for rank in ranks if all(message.came[rank] for message in launched)])

    def _judge(self, message: CommittedMessage) -> None:
        arrived = zip(message.receives(), message.incoming, strict=True)
        lost = {tensor.peer for tensor, pending in arrived if not pending.done()}
        sources = [*message.buffers]
        rows = [0, *(n for n, j in enumerate(sources, 1) if j not in lost)]
        rows = [n for n in rows if message.headers[n, 0] == message.headers[0, 0]]  # of the same decisions
        ranks = [self.transport.rank, *(sources[n - 1] for n in rows[1:])]
        headers = message.headers[rows]  # (1 + whole messages, HEADER)
        headers[:, 0] = message.step
        sane = judged(headers)
        self.verdicts.judge(message.step, ranks, headers, sane)
        message.complaint, self.verdicts.complaint = self.verdicts.complaint, ""
        found = dict(zip(ranks, sane.tolist(), strict=True))
        message.came = {rank: found.get(rank, False) for rank in (self.transport.rank, *sources)}


class _Alone(Neighbours):
    silent = False
