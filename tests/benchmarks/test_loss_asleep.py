"""Seconds to a loss where accelerators sleep: stretched time, the quietest turn, and the account of what is missing."""

from typing import Any

import pytest

from loss import asleep_tables
from loss.asleep import LONGER, STEPS, slower, stretched, timed
from loss.asleep_tables import BUCKETS, Asleep, page, stands_for
from loss.methods import METHODS, plain, tuned_alone
from loss.per_second import RECIPES
from loss.tables import STRONGEST
from network.accuracy import WARM_UP
from network.cluster import bits_per_second


def test_time_is_stretched_until_a_host_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [stretched(hosts, 0.5) for hosts in (2, 4, 8, 16)] == [1, 1, 2, 4]
    for rate in ("10mbit", "50mbit", "200mbit", "1gbit"):
        assert 4 * bits_per_second(slower(rate, 4)) == bits_per_second(rate)


def test_what_is_timed_holds_whole_outer_rounds() -> None:
    assert (STEPS - WARM_UP) % 8 == 0
    assert all(RECIPES[name].words[:-1] == RECIPES["gpt"].words for name in LONGER)


def record(method: str, step: float, others: float) -> dict[str, Any]:
    """What two hosts keep of a run, the second behind."""
    ends = [[late + step * at for at in range(1, STEPS + 1)] for late in (0.0, 0.25)]
    rows = [
        {"ends": row, "busy": [end / 4 for end in row], "waited": [0.0] * STEPS, "sent": 5.0, "others": others}
        for row in ends
    ]
    return {"hosts": [{**row, "method": method} for row in rows]}


def test_of_several_turns_the_quietest_counts() -> None:
    turns = [record("ddp", 0.5, 0.4), record("ddp", 0.25, 0.02), record("ddp", 0.75, 0.2), record("gossip", 0.5, 0.9)]
    found = timed(turns, 2)
    whole = {"seconds": 0.125, "busy": 0.03125, "waited": 0.0, "others": 0.02, "sent": 5.0, "turns": 3}
    assert found["ddp"] == whole
    assert (found["gossip"]["seconds"], found["gossip"]["turns"]) == (0.25, 1)


def run(scores: list[float], sent: float = 2e6) -> dict[str, Any]:
    return {"steps": [10, 20, 30], "scores": scores, "bytes_sent": sent, "bytes": 1_018_368}


CURVES = {
    "gpt 4 0": {
        "ddp": run([3, 2, 1.5]),
        STRONGEST: run([2, 1.5, 1.0], 1e6),
        "gossip, int8, Muon": run([2.2, 1.5, 1.1]),
    },
    "gpt-60-steps 4 0": {"gossip, int8, Muon": {**run([1.5, 1.2, 1.0]), "steps": [20, 40, 60]}},
}


def row(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "busy": 0.01, "waited": 0.002, "others": 0.0, "sent": 1e5, "turns": 1}


RESULTS = {
    "hardware": {"processor": "one"},
    "places": {"gpt 4": {"alone": 0.125, "sleep": 0.1, "stretched": 1.0, "share": 0.5}},
    "rows": {"gpt 4 10mbit": {"ddp": row(1.0), STRONGEST: row(0.5), "gossip, int8, Muon": row(0.25)}},
}


REAL_CURVES = asleep_tables.curves


@pytest.fixture(autouse=True)
def some_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asleep_tables, "curves", lambda: CURVES)


def test_the_share_is_that_of_the_loss_per_step_times_that_of_the_exposed_seconds() -> None:
    found = Asleep(RESULTS, "gpt", 4).account(1.0, "10mbit")
    assert found is not None
    assert (found.peer.seconds, found.nothing.seconds) == (30 * 0.5, 30 * 0.125)
    assert (found.ours.steps, found.ours.seconds) == (60, 60 * 0.25), "in its longer schedule"
    assert (found.most, found.gain) == (4.0, 1.0)
    assert (found.by_steps, found.by_exposed) == (0.5, 0.5)
    assert found.share == found.by_steps * found.by_exposed == 0.25


def test_the_page_says_what_is_missing_at_both_losses_and_what_was_computed() -> None:
    text = page(RESULTS)
    cells = "10mbit | ddp, Muon, fp16 hook | 15.0 | 4.00 | gossip, int8, Muon; 60 steps, one seed | 1.00 | 0.25"
    assert f"| {cells} | 0.50 | 0.50 | 0.250 | 0.125 | 0.100 |" in text
    assert "at the 1.500 of `ddp`" in text
    assert "| gossip, int8, Muon | 0.010, 0.002, 0.0 |" in text


def test_hosts_that_send_nothing_take_no_longer_than_those_that_send() -> None:
    rows = {"gpt 4 10mbit": {**RESULTS["rows"]["gpt 4 10mbit"], "gossip, int8, Muon": row(0.1)}}
    found = Asleep({**RESULTS, "rows": rows}, "gpt", 4).account(1.0, "10mbit")
    assert found is not None
    assert (found.alone, found.by_exposed) == (0.1, 1.0)


def test_a_loss_that_none_of_ours_reaches_has_an_empty_row() -> None:
    assert "| 10mbit | - |" in Asleep(RESULTS, "gpt", 4).missing("another", 0.5)


def test_rates_stand_for_those_of_a_device_in_the_proportion_of_bytes_and_seconds() -> None:
    """GPT-2 small has 489 times the bytes of `gpt`, and took 53 ms on an H100, about half of the sleep."""
    said = stands_for(Asleep(RESULTS, "gpt", 4).table, 0.1)
    assert "GPT-2 small, 8 x 1024 tokens on an NVIDIA H100 80GB HBM3, 53 ms a step, at 924 times the rate" in said


def test_a_hook_and_smaller_buckets_have_the_losses_of_the_method_without() -> None:
    assert plain(STRONGEST) == "ddp, Muon"
    for place, runs in REAL_CURVES().items():
        for of in BUCKETS:
            small = f"{of}, small buckets"
            assert small in METHODS
            assert not tuned_alone(small)
            assert (small in runs) == (of in runs), place
            assert small not in runs or runs[small]["scores"] == runs[of]["scores"]
        if STRONGEST in runs and "ddp, Muon" in runs:
            assert runs[STRONGEST]["bytes_sent"] == runs["ddp, Muon"]["bytes_sent"] / 2
