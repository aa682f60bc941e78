"""Seconds to a loss: the steps to it by a method times the seconds of its steps, against each peer's."""

from pathlib import Path
from typing import Any

from loss_per_second import METHODS, RECIPES, TIMED, Table, report
from quiet_recipe import composed


def run(scores: list[float]) -> dict[str, Any]:
    return {"steps": [10, 20, 30], "scores": scores, "bytes_sent": 2.5e6}


RESULTS = {
    "curves": {
        "gpt 4 0": {"ddp": run([3, 2, 1.5]), "ddp, Muon": run([2, 1.5, 1.0]), "gossip": run([2.2, 1.6, 1.2])},
        "gpt 4 1": {"ddp": run([3, 2, 1.7]), "ddp, Muon": run([2, 1.5, 1.2]), "gossip": run([2.2, 1.4, 1.4])},
        "gpt 8 0": {"ddp": run([9, 9, 9]), "ddp, Muon": run([9, 9, 9]), "gossip": run([9, 9, 9])},
    },
    "seconds": {"gpt 4 10mbit": {"ddp": 1.0, "ddp, Muon": 1.2, "gossip": 0.2}},
}


def test_a_loss_counts_from_the_first_mark_of_the_mean_curve() -> None:
    table = Table(RESULTS, "gpt", 4)
    assert table.last("ddp") == 1.6
    assert table.steps("gossip", 1.6) == 20
    assert table.steps("gossip", 1.1) is None
    assert table.sooner("gossip", "ddp", "10mbit") == "7.50"  # 30 steps of 1 s against 20 of 0.2 s
    assert table.sooner("gossip", "ddp, Muon", "10mbit") == "not reached"


def test_the_page_names_the_soonest_of_ours_for_each_peer(tmp_path: Path) -> None:
    page = report(RESULTS, tmp_path / "page.json")
    assert "| gossip | 2.500 | 1.300 ± 0.141 | 0.200 |" in page
    assert "| ddp | 1.600 | 7.50 (gossip) |" in page
    assert "| ddp, Muon | 1.100 | none of ours reaches it |" in page
    assert page == (tmp_path / "page.md").read_text()


def test_a_longer_schedule_may_come_to_a_peers_loss_sooner() -> None:
    longer = {"gpt-1440-steps 4 0": {"gossip": {"steps": [20, 40, 60], "scores": [2.0, 1.1, 0.9]}}}
    table = Table({**RESULTS, "curves": {**RESULTS["curves"], **longer}}, "gpt", 4)
    assert table.against_each_peer()[3] == ["ddp, Muon", "1.100", "4.50 (gossip; 60 steps)"]  # 30 x 1.2 s, 40 x 0.2 s
    assert table.against_each_peer()[2] == ["ddp", "1.600", "7.50 (gossip)"]


def test_every_method_is_one_that_the_command_line_takes() -> None:
    for name, words in METHODS.items():
        strategy = composed([*RECIPES["gpt"].words, *(w for w in words if not w.startswith("hook="))], 0).strategy
        assert ("DDP" in strategy._target_) == name.startswith("ddp"), name


def test_what_is_timed_holds_whole_outer_rounds() -> None:
    assert all((steps - 10) % 8 == 0 for steps in [*TIMED.values(), 74])
