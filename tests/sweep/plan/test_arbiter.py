"""The arbiter against closed forms and its own promises, with members that only count."""

import heapq
import math
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.shared.plan.timeline import bubble, makespan
from lightning_decentral.sweep import FIFO, LRTF, Policy, RoundRobin
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction, Phase, TurnReport
from lightning_decentral.sweep.plan.policy import POLICIES as BY_NAME

POLICIES = tuple(BY_NAME.values())


class Play:
    """Members of unit pieces, each returned after one second; who is told to leave has left at once."""

    def __init__(self, arbiter: Arbiter, pieces: Sequence[int], widths: Sequence[int] = (), bytes_: Sequence[int] = ()):
        self.arbiter, self.now, self.orders = arbiter, 0.0, list[tuple[str, Instruction]]()
        self.left = {str(i): n for i, n in enumerate(pieces)}
        self.bytes = {str(i): n for i, n in enumerate(bytes_)}
        self.finishes: list[tuple[float, int, str]] = []
        self.numbers = count()
        for name in self.left:
            arbiter.join(name, widths[int(name)] if widths else 1)
            # What it reported earlier: the closed form is for lengths that are known.
            arbiter.members[name].turn = self.turn(name, measured=False)
            arbiter.request(name)

    def turn(self, name: str, measured: bool = True) -> TurnReport:
        needs = self.bytes.get(name)
        known = (needs, needs // 2) if needs is not None and measured else (None, 0)
        return TurnReport(remaining_seconds=self.left[name], peak_bytes=known[0], kept_bytes=known[1])

    def play(self) -> None:
        self.settle()
        while self.finishes:
            self.now = self.finishes[0][0]
            while self.finishes and self.finishes[0][0] == self.now:
                self.turned(heapq.heappop(self.finishes)[2])
            self.settle()

    def turned(self, name: str) -> None:
        self.left[name] -= 1
        self.arbiter.give_back(name, self.turn(name), self.now)
        if self.left[name]:
            self.arbiter.request(name)
        else:
            self.arbiter.leave(name, self.now)

    def settle(self) -> None:
        new = self.arbiter.settle(self.now)
        while new:
            for name, order in new:
                self.orders.append((name, order))
                if order is Instruction.RUN:
                    heapq.heappush(self.finishes, (self.now + 1.0, next(self.numbers), name))
                if order is Instruction.LEAVE:
                    self.arbiter.left(name)
            self.check()
            new = self.arbiter.settle(self.now)

    def check(self) -> None:
        """No device twice; on none more bytes than it has."""
        running = [m for m in self.arbiter.members.values() if m.phase is Phase.RUNNING]
        used = [device for member in running for device in member.devices]
        assert len(set(used)) == len(used)
        for device in self.arbiter.devices if self.arbiter.memory_bytes else ():
            at_home = [m for m in self.arbiter.members.values() if device in m.home and m.resident]
            there = sum(self.bytes[m.name] if m in running else m.turn.kept_bytes for m in at_home)
            assert there <= self.arbiter.memory_bytes


def devices(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_meets_the_optimum_of_unit_pieces(pieces: list[int], size: int) -> None:
    play = Play(Arbiter(LRTF(), devices(size)), pieces)
    play.play()
    assert play.now == max(max(pieces), math.ceil(sum(pieces) / size))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3), st.sampled_from(POLICIES))
def test_every_policy_ends_within_the_bounds_and_records_what_ran(pieces: list[int], size: int, policy: Policy) -> None:
    arbiter = Arbiter(policy, devices(size))
    play = Play(arbiter, pieces)
    play.play()
    # Graham: no order that never idles a device is worse than this.
    bound = max(max(pieces), math.ceil(sum(pieces) / size))
    assert bound <= play.now <= sum(pieces) / size + (1 - 1 / size) * max(pieces)
    spans = arbiter.spans()
    assert makespan(spans) == play.now
    assert bubble(spans, arbiter.devices[:1]) == pytest.approx(0) or size > 1
    assert sum(member.busy_seconds for member in arbiter.ended.values()) == sum(pieces)


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 100)), min_size=1, max_size=6)


@given(sizes, st.integers(1, 2), st.sampled_from(POLICIES))
def test_memory_is_never_exceeded_and_everyone_comes_through(
    members: list[tuple[int, int]], size: int, policy: Policy
) -> None:
    arbiter = Arbiter(policy, devices(size), memory_bytes=100)
    play = Play(arbiter, [n for n, _ in members], bytes_=[b for _, b in members])
    play.play()
    assert not any(play.left.values())


def test_those_who_fit_together_stay_and_others_make_room() -> None:
    fitting = Play(Arbiter(RoundRobin(), devices(1), memory_bytes=100), [3, 3], bytes_=[60, 60])
    fitting.play()
    # Once each has been measured, alone, nobody leaves again: 60 running beside 30 kept.
    assert fitting.orders.count(("0", Instruction.LEAVE)) == 1
    assert ("1", Instruction.LEAVE) not in fitting.orders
    crowded = Play(Arbiter(RoundRobin(), devices(1), memory_bytes=100), [3, 3], bytes_=[80, 80])
    crowded.play()
    assert sum(order is Instruction.LEAVE for _, order in crowded.orders) == 4


@pytest.mark.parametrize(("memory_bytes", "prepares"), [(120, ["1"]), (119, [])])
def test_the_next_prepares_while_another_runs_if_both_have_room(memory_bytes: int, prepares: list[str]) -> None:
    # The third one's first turn, alone, sent both others away; then 60 run, 30 of the third lie there, 30 come.
    play = Play(Arbiter(RoundRobin(), devices(1), memory_bytes=memory_bytes), [2, 2, 2], bytes_=[60, 60, 60])
    play.play()
    assert [name for name, order in play.orders if order is Instruction.ENTER] == prepares
    if prepares:
        entered = play.orders.index(("1", Instruction.ENTER))
        assert play.orders[entered - 1 : entered + 2] == [
            ("0", Instruction.RUN),
            ("1", Instruction.ENTER),
            ("1", Instruction.RUN),
        ]


def test_a_member_of_two_devices_gets_both_though_others_wait() -> None:
    arbiter = Arbiter(FIFO(), devices(2))
    play = Play(arbiter, [1, 1, 2], widths=[1, 2, 1])
    play.play()
    assert [name for name, _ in play.orders[:3]] == ["0", "1", "2"]
    spans = arbiter.spans()
    assert {span.worker for name, span in spans.items() if name.startswith("1/")} == {"cpu:0", "cpu:1"}


def test_the_ended_and_the_killed_free_their_device() -> None:
    arbiter = Arbiter(FIFO(), devices(1))
    for name in "ab":
        arbiter.join(name)
        arbiter.request(name)
    assert arbiter.settle(0.0) == [("a", Instruction.RUN)]
    arbiter.leave("a", 2.0)
    assert arbiter.settle(2.0) == [("b", Instruction.RUN)]
    assert arbiter.ended["a"].busy_seconds == 2.0


def test_more_devices_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"member x asks for trainer.devices=3, but the sweep has only cpu:0, cpu:1"):
        Arbiter(FIFO(), devices(2)).join("x", 3)


def test_a_long_member_that_comes_last_is_found_at_once() -> None:
    """One turn each, in order of arrival; then the longest is never without a device."""
    arbiter = Arbiter(LRTF(), devices(2))
    play = Play(arbiter, [3, 3, 3, 3, 12])
    for member in arbiter.members.values():
        member.turn = TurnReport()
    play.play()
    assert play.now == 2 + 12
    assert [span.start for span in arbiter.ended["4"].spans] == [2.0]


def test_a_pinned_member_stays_at_home() -> None:
    arbiter = Arbiter(LRTF(), ["cuda:0", "cuda:1"])
    Play(arbiter, [4, 1, 1]).play()
    for name, member in arbiter.ended.items():
        assert {span.worker for span in member.spans} == set(member.home), name
