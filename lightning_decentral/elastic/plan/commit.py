"""Commit of an outer round: its members decide once whose messages are in its mean, and all that go on decide alike.

Anchors and outer momenta stay equal bit for bit as all apply the same decisions. One round of one view, at one member:

    awaits      messages arrive or are given up; then the member knows which it `has`, and votes
    follows     it sends what it has to the oldest live member, who leads
    leads       it opens a ballot. Once all live members have voted it proposes the messages that all of them have
    accepts     a member accepts a proposal unless it has promised a later ballot to another leader
    committed   a quorum has accepted: the leader sends the decision to all. Without a message that all have, it is to
                drop the round

Ballot b belongs to members[b mod n]; a leader of a later one asks a quorum for what they have accepted and proposes
that. A quorum is more than half of the view's members, or half with the oldest, and in a view's first round all that
stay from the view before. Where too few are left, it is all that a later view keeps, as the others must join anew. So
two decisions can't differ among members that go on, whoever dies, sleeps or is cut off, and a death costs no wait while
a quorum lives. What isn't in a mean stays in its sender's parameters and is sent in the next round.

`chain`, a checksum of all decisions so far, is sent along. Messages with another one aren't mixed, and a member with
another one than the decision's, or without a message that is counted, must join anew.

Members that learn of a view late may be in one round with two views. Each is asked in the other's view, too, where it
has nothing: unless one side is a quorum, both drop the round. A member that has sent to a later round without coming to
this one answers votes about it as having nothing, so that nobody waits for it.

Source: single-decree Paxos, Lamport 1998, a decree for each round."""

import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_decentral.elastic.plan.view import View


class Proposal(NamedTuple):
    """Members whose messages are in the mean, in the view's order, and the checksum of the decisions before."""

    counted: tuple[str, ...]
    before: int

    def chain(self, round: int) -> int:
        """Return the checksum of the decisions up to this one."""
        return zlib.crc32(f"{self.before} {round} {self.counted}".encode())


@dataclass(frozen=True)
class Vote:
    """Message between members about one round."""

    kind: str  # "has" from a follower; "asks", "proposes" from a leader, and answers "promises", "accepts"; "decided"
    sender: str
    has: tuple[str, ...]  # members whose messages the sender has whole
    chain: int
    ballot: int = 0
    accepted: int = -1  # ballot of the proposal below; -1: there is none
    counted: tuple[str, ...] = ()
    before: int = 0
    heirs: tuple[str, ...] = ()  # members that a later view keeps; empty: no later view is known


Sends = list[tuple[str, Vote]]


@dataclass(frozen=True)
class CommitState:
    """A member's state in one round, a value: its methods return the next state and the votes to send."""

    name: str
    members: tuple[str, ...]  # of the view, the oldest first
    has: tuple[str, ...]
    chain: int
    promised: int = 0
    accepted: tuple[int, Proposal] | None = None
    ballot: int = -1  # the one that this member leads; -1: none
    proposal: Proposal | None = None  # of that ballot
    votes: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # {member: (chain, what it has)}
    promises: Mapping[str, tuple[int, Proposal] | None] = field(default_factory=dict)
    accepts: frozenset[str] = frozenset()
    decided: Proposal | None = None
    heirs: tuple[str, ...] = ()
    stay: frozenset[str] = frozenset()  # members that must vote, too
    informed: str = ""  # the leader that has this member's vote

    def received(self, vote: Vote) -> tuple["CommitState", Sends]:
        """Take a vote, and answer it. Votes of members that no later view has don't count."""
        heirs = vote.heirs if vote.heirs and not 0 < len(self.heirs) <= len(vote.heirs) else self.heirs
        if vote.sender not in self.members or (heirs and vote.sender not in heirs):
            return self, []
        state = replace(self, heirs=heirs, votes={**self.votes, vote.sender: (vote.chain, vote.has)})
        if state.decided:
            return state, [] if vote.kind == "decided" else [(vote.sender, state._vote("decided"))]
        if vote.kind == "decided":
            return replace(state, decided=Proposal(vote.counted, vote.before)), []
        found = (vote.accepted, Proposal(vote.counted, vote.before)) if vote.accepted >= 0 else None
        return state._asked(vote, found) if vote.kind in ("asks", "proposes") else (state._answered(vote, found), [])

    def _asked(self, vote: Vote, found: tuple[int, Proposal] | None) -> tuple["CommitState", Sends]:
        """Answer a leader; one whose ballot comes too late hears of the later one."""
        takes = vote.ballot >= self.promised
        accepts = takes and vote.kind == "proposes"
        state = replace(self, promised=vote.ballot) if takes else self
        state = replace(state, accepted=found) if accepts else state
        return state, [(vote.sender, state._vote("accepts" if accepts else "promises", state.promised))]

    def _answered(self, vote: Vote, found: tuple[int, Proposal] | None) -> "CommitState":
        """Take a follower's answer to this leader's ballot."""
        if vote.kind == "promises" and vote.ballot == self.ballot:
            return replace(self, promises={**self.promises, vote.sender: found})
        if vote.kind == "accepts" and vote.ballot == self.ballot:
            return replace(self, accepts=self.accepts | {vote.sender})
        return replace(self, promised=max(self.promised, vote.ballot)) if vote.kind == "promises" else self

    def driven(self, live: Collection[str], heirs: Collection[str], again: bool) -> tuple["CommitState", Sends]:
        """Follow or lead, as far as the votes go. `live`: members that may still vote, this one too; `heirs`: members
        that a later view keeps, if one is known; `again`: repeat what may have been lost."""
        heirs = tuple(name for name in self.members if name in heirs) if heirs else ()
        state = replace(self, heirs=heirs) if heirs and not 0 < len(self.heirs) <= len(heirs) else self
        if state.decided:
            return state, []
        leader = next(name for name in state.members if name in live)
        if leader != state.name:
            sends = [(leader, state._vote("has"))] if again or state.informed != leader else []
            return replace(state, informed=leader, ballot=-1), sends
        state, sends = state._opened() if state.ballot < 0 or (again and state.promised > state.ballot) else (state, [])
        if again and not sends:
            sends = state._to_all("proposes" if state.proposal else "asks")
        # Not where it has promised another leader's later ballot meanwhile.
        may = state.promised == state.ballot and (not state.ballot or state._quorum(state.promises))
        may = may and state._quorum(state.votes)
        if state.proposal is None and may and state.votes.keys() >= set(live):
            state = state._proposed()
            sends = state._to_all("proposes")
        if state.proposal and state._quorum(state.accepts):
            state = replace(state, decided=state.proposal)
            sends = state._to_all("decided")
        return state, sends

    def _opened(self) -> tuple["CommitState", Sends]:
        """Open a ballot: the oldest member's first one needs no promise, as no other is earlier."""
        size, rank = len(self.members), self.members.index(self.name)
        ballot = rank + size * (self.promised // size)
        first = not (ballot or self.promised or self.accepted)
        ballot += size if ballot <= self.promised and not first else 0
        votes = {**self.votes, self.name: (self.chain, self.has)}
        state = replace(self, ballot=ballot, promised=ballot, proposal=None, accepts=frozenset(), votes=votes)
        state = replace(state, promises={self.name: self.accepted})
        return state, state._to_all("asks") if ballot else []

    def _proposed(self) -> "CommitState":
        """Propose what was accepted in the latest ballot, else the messages that all who have voted have, of the chain
        that most of them have (of two, the oldest's)."""
        earlier = [found for found in self.promises.values() if found]
        if earlier:
            _, proposal = max(earlier)
        else:
            voted = [self.votes[name] for name in self.members if name in self.votes]
            # Who has nothing and another chain has committed this round in another view; this one comes too late.
            committed = (chain for chain, has in voted if not has and chain != self.chain)
            most = Counter(chain for chain, _ in voted).most_common(1)[0][0]  # of equals the first counted
            chain = next(committed, most)
            rows = {has for of, has in voted if of == chain or not has}  # mostly one
            common = frozenset(self.members).intersection(*rows)
            proposal = Proposal(tuple(name for name in self.members if name in common), chain)
        return replace(self, proposal=proposal, accepted=(self.ballot, proposal), accepts=frozenset({self.name}))

    def _quorum(self, names: Collection[str]) -> bool:
        twice, size = 2 * len(names), len(self.members)
        most = twice > size or (twice == size and self.members[0] in names)
        return (most and self.stay <= set(names)) or (bool(self.heirs) and set(self.heirs) <= set(names))

    def _to_all(self, kind: str) -> Sends:
        vote = self._vote(kind, self.ballot)
        return [(name, vote) for name in self.members if name != self.name]

    def _vote(self, kind: str, ballot: int = 0) -> Vote:
        number, found = self.accepted or (-1, Proposal((), 0))
        found = self.decided or found
        return Vote(kind, self.name, self.has, self.chain, ballot, number, found.counted, found.before, self.heirs)


Key = tuple[int, int, int]  # (a view's key, round, number of the part of the model)
KEPT = 16  # rounds of each part whose decisions other members may still ask for


class Rounds:
    """One member's rounds by key: their states, and the votes about rounds that it hasn't come to."""

    def __init__(self, name: str) -> None:
        self.states: dict[Key, CommitState] = {}
        self._name, self._early = name, dict[Key, list[tuple[tuple[str, ...], Vote]]]()
        self._flying: dict[int, dict[int, int]] = {}  # {part: {round that this member has sent to: the checksum then}}

    def begins(self, round: int, part: int, chain: int) -> list[tuple[Key, Sends]]:
        """Send a message to a round. Rounds before it that this member never came to don't wait for it any more."""
        self._flying.setdefault(part, {})[round] = chain
        passed = [k for k in self._early if k[2] == part and self._passed(k) is not None]
        votes = [(k, *vote) for k in passed for vote in self._early.pop(k)]
        return [sends for vote in votes for sends in self.received(*vote)]

    def _passed(self, key: Key) -> int | None:
        """Return the checksum with which this member has passed a round that it never sent to; None if it may come."""
        flying = self._flying.get(key[2], {})
        return max(flying.items())[1] if flying and key[1] < max(flying) and key[1] not in flying else None

    def arrives(self, key: Key, view: View, has: Collection[str], chain: int) -> list[tuple[Key, Sends]]:
        """Come to a round with the messages that this member has; return the votes to send, as `received` does."""
        self._flying.get(key[2], {}).pop(key[1], None)
        there = frozenset(has)
        own = tuple(name for name in view.members if name in there)
        begins = not any(k[0] == key[0] and k[2] == key[2] and k != key for k in self.states)
        stay = frozenset(view.members).intersection(view.before) if begins else frozenset[str]()
        past = sorted((k for k in self.states if k[2] == key[2]), key=lambda k: k[1])[:-KEPT]
        self.states = {k: state for k, state in self.states.items() if k not in past}
        self.states[key] = CommitState(self._name, view.members, own, chain, stay=stay)
        early = [k for k in self._early if k[1:] == key[1:]]
        votes = [(k, *vote) for k in early for vote in self._early.pop(k)]
        self._early = {k: found for k, found in self._early.items() if k[2] != key[2] or k[1] > key[1]}
        return [sends for vote in votes for sends in self.received(*vote)]

    def received(self, key: Key, members: tuple[str, ...], vote: Vote) -> list[tuple[Key, Sends]]:
        """Take a vote, or keep it until this member comes to the round."""
        if key not in self.states:
            own = next((state for k, state in self.states.items() if k[1:] == key[1:]), None)
            chain = self._passed(key)
            if own is not None:  # it is there in another view
                mixed = own.decided if own.decided and own.decided.counted else None
                chain = mixed.chain(key[1]) if mixed else own.chain
            if chain is None:
                self._early.setdefault(key, []).append((members, vote))
                return []
            self.states[key] = CommitState(self._name, members, (), chain)
        self.states[key], sends = self.states[key].received(vote)
        return [(key, sends)]
