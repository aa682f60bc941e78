"""Asynchronous successive halving against its rule written again, over whole runs of jobs that report in any order."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.sweep import ASHA, FIFO
from lightning_decentral.sweep.plan.policy import Score, Scoreboard

VALUES = st.one_of(st.integers(0, 5).map(float), st.just(math.nan))  # with ties, and what diverged


def survivors(curves: list[list[float]], order: list[int], sign: float, eta: int, least: int) -> list[int]:
    """How many validations each job makes: by sorting what was told at each rung, in the order of arrival."""
    rungs: dict[int, list[float]] = {least * eta**k: [] for k in range(9)}
    made, ended = [0] * len(curves), set[int]()
    for job in order:
        if job in ended or made[job] == len(curves[job]):
            continue
        value = curves[job][made[job]]
        made[job] += 1
        if made[job] in rungs:
            told = rungs[made[job]]
            told.append(math.inf if math.isnan(value) else sign * value)
            if told[-1] > sorted(told)[max(len(told) // eta, 1) - 1]:
                ended.add(job)
    return made


@given(st.data())
def test_who_goes_on_is_who_the_rule_says(data: st.DataObject) -> None:
    curves = data.draw(st.lists(st.lists(VALUES, min_size=1, max_size=9), min_size=1, max_size=7))
    order = data.draw(st.permutations([job for job, curve in enumerate(curves) for _ in curve]))
    mode = data.draw(st.sampled_from(["min", "max"]))
    eta, least = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    policy, board = ASHA("val_loss", mode, eta, least), Scoreboard()
    for job in order:
        name = str(job)
        history = board.histories.get(name, [])
        if name in board.verdicts or len(history) == len(curves[job]):
            continue
        board.add(name, Score("val_loss", mode, len(history), curves[job][len(history)]))
        if (verdict := policy.verdict(board.histories, name)) is not None:
            board.verdicts[name] = verdict
    made = [len(board.histories[str(job)]) for job in range(len(curves))]
    assert made == survivors(curves, order, 1.0 if mode == "min" else -1.0, eta, least)


def test_jobs_in_step_are_halved_as_by_the_synchronous_rule() -> None:
    """In the order worst to best nobody who stays is wrong: 9, then the last better ones, and the best to the end."""
    policy, board = ASHA(), Scoreboard()
    for number in range(9):
        alive = [name for name in map(str, range(9)) if name not in board.verdicts]
        for name in sorted(alive, key=int):  # the best one comes first
            board.add(name, Score("loss", "min", number, float(name)))
            if (verdict := policy.verdict(board.histories, name)) is not None:
                board.verdicts[name] = verdict
    assert [len(board.histories[str(name)]) for name in range(9)] == [9] + [1] * 8
    assert board.verdicts["8"] == "loss 8 at validation 1 is number 9 of 9, 3 may go on"


def test_a_member_that_repeats_steps_is_heard_again() -> None:
    board = Scoreboard()
    for step, value in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 9.0)):
        board.add("a", Score("loss", "min", step, value))
    assert [(score.step, score.value) for score in board.histories["a"]] == [(1, 5.0), (2, 9.0)]
    assert board.best("a") == Score("loss", "min", 1, 5.0)
    assert board.best("b") is None


def test_scores_of_another_metric_are_not_compared() -> None:
    board = Scoreboard()
    board.add("a", Score("loss", "min", 1, 0.0))
    board.add("b", Score("accuracy", "max", 1, 0.5))
    assert ASHA().verdict(board.histories, "b") is None


def test_other_policies_watch_nothing_and_end_nobody() -> None:
    board = Scoreboard()
    for name in "ab":
        board.add(name, Score("loss", "min", 1, ord(name)))
    assert FIFO().watched is None
    assert FIFO().verdict(board.histories, "b") is None
    assert ASHA().verdict(board.histories, "b") is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "least"}, "mode must be min or max, got least"),
        ({"reduction_factor": 1}, "reduction_factor must be at least 2, got 1"),
        ({"min_validations": 0}, "min_validations must be at least 1, got 0"),
    ],
)
def test_what_cant_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ASHA(**options)
