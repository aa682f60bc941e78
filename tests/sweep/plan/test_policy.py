"""Policies against their definitions and against the optimum that they claim."""

import math
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.sweep import FIFO, LRTF, SRTF, Complementary, Policy, RoundRobin
from lightning_decentral.sweep.plan.policy import POLICIES as BY_NAME
from lightning_decentral.sweep.plan.policy import Job

POLICIES = tuple(BY_NAME.values())


def rounds(pieces: list[int], devices: int, policy: Policy) -> int:
    """Unit pieces, all devices in step: in how many rounds all are through."""
    left, grants = list(pieces), count()
    served = [-1] * len(pieces)
    for spent in count():
        waiting = [Job(str(i), i, n, 1.0, served[i]) for i, n in enumerate(left) if n]
        if not waiting:
            return spent
        running: list[Job] = []
        for _ in range(min(devices, len(waiting))):
            job = policy.choose([job for job in waiting if job not in running], running)
            running.append(job)
            served[job.arrived] = next(grants)
            left[job.arrived] -= 1
    raise AssertionError


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_longest_first_is_optimal_on_unit_pieces(pieces: list[int], devices: int) -> None:
    assert rounds(pieces, devices, LRTF()) == max(max(pieces), math.ceil(sum(pieces) / devices))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 4), st.sampled_from(POLICIES))
def test_no_policy_beats_the_bound_or_idles_a_device(pieces: list[int], devices: int, policy: Policy) -> None:
    assert max(max(pieces), math.ceil(sum(pieces) / devices)) <= rounds(pieces, devices, policy)
    if devices == 1:
        assert rounds(pieces, devices, policy) == sum(pieces)


def test_each_takes_whom_its_name_says() -> None:
    long = Job("long", 2, remaining_seconds=9, next_seconds=2, served=5)
    short = Job("short", 1, remaining_seconds=3, next_seconds=1, served=6)
    first = Job("first", 0, remaining_seconds=6, next_seconds=6, served=7)
    waiting = [long, short, first]
    assert LRTF().choose(waiting) == long
    assert SRTF().choose(waiting) == short
    assert RoundRobin().choose(waiting) == long
    assert FIFO().choose(waiting) == first
    beside_short = Job("s", 3, 1, next_seconds=1)
    beside_long = Job("l", 4, 9, next_seconds=6)
    assert Complementary().choose(waiting, [beside_short]) == first
    assert Complementary().choose([short, first], [beside_long]) == short


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_equal_jobs_go_by_arrival_and_nobody_is_an_error(policy: Policy) -> None:
    twins = [Job("b", 1, 4.0, 1.0), Job("a", 0, 4.0, 1.0)]
    assert policy.choose(twins).name == "a"
    with pytest.raises(ValueError, match="no job waits"):
        policy.choose([])


@pytest.mark.parametrize("policy", [LRTF(), SRTF()], ids=lambda policy: type(policy).__name__)
def test_who_goes_by_length_wants_to_know_it_first(policy: Policy) -> None:
    jobs = [Job("short", 0, 1.0, 1.0), Job("long", 1, 9.0, 1.0), Job("new", 2, 5.0, 1.0, measured=False)]
    assert policy.choose(jobs).name == "new"
    assert FIFO().choose(jobs).name == "short"
