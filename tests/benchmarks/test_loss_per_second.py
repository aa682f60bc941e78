"""Seconds to a loss: the steps to it by a method times the seconds of its steps, against each peer's."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.quiet_recipe import composed
from loss import peers
from loss.methods import METHODS
from loss.per_second import RECIPES, TIMED, about, keep, recipe_for
from loss.rehearsed import can_be_rehearsed, rehearsed
from loss.tables import PEERS, Table, page
from network.accuracy import mean_rows, scores
from network.accuracy_worker import OWN, train
from tests import ports
from tests.tiny import in_processes


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


def test_the_page_names_the_soonest_of_ours_for_each_peer() -> None:
    text = page(RESULTS)
    assert "| gossip | 2.500 | 1.300 ± 0.141 | 0.200 |" in text
    assert "| ddp | 1.600 | 7.50 (gossip) |" in text
    assert "| ddp, Muon | 1.100 | none of ours reaches it |" in text


def test_another_text_in_the_same_batches_has_the_seconds_of_the_first() -> None:
    curves = {"sympy 4 0": {"ddp": run([3, 2, 1.5]), "gossip": run([2.0, 1.5, 1.2])}}
    text = page({**RESULTS, "curves": curves})
    assert "sympy, 4 hosts: 1 seed(s), 30 steps. Seconds of a step are those of `gpt`." in text
    assert "| ddp | 1.500 | 7.50 (gossip) |" in text


def test_nothing_is_said_of_a_peer_that_was_not_timed() -> None:
    seconds = {"gpt 4 10mbit": {"ddp": 1.0, "gossip": 0.2}}
    assert Table({**RESULTS, "seconds": seconds}, "gpt", 4).against_each_peer()[3] == ["ddp, Muon", "1.100", "-"]


def test_a_longer_schedule_may_come_to_a_peers_loss_sooner() -> None:
    longer = {"gpt-1440-steps 4 0": {"gossip": {"steps": [20, 40, 60], "scores": [2.0, 1.1, 0.9]}}}
    table = Table({**RESULTS, "curves": {**RESULTS["curves"], **longer}}, "gpt", 4)
    assert table.against_each_peer()[3] == [
        "ddp, Muon",
        "1.100",
        "4.50 (gossip; 60 steps, one seed)",
    ]  # 30 x 1.2 s, 40 x 0.2 s
    assert table.against_each_peer()[2] == ["ddp", "1.600", "7.50 (gossip)"]


def test_a_peer_has_its_soonest_schedule_against_a_longer_one_of_ours() -> None:
    both = {"gossip": {"steps": [20, 40, 60], "scores": [2.0, 1.1, 0.9]}, "ddp, Muon": run([2, 1.1, 0.9])}
    longer = {"gpt-1440-steps 4 0": both}
    table = Table({**RESULTS, "curves": {**RESULTS["curves"], **longer}}, "gpt", 4)
    cell = "3.00 (gossip; 60 steps, one seed)"  # 20 x 1.2 s of a longer schedule in place of 30, 40 x 0.2 s
    assert table.against_each_peer()[3] == ["ddp, Muon", "1.100", cell]


def test_a_schedule_is_as_long_as_its_name_says() -> None:
    recipe = recipe_for("gpt-1620-steps", 4, ["ddp"])
    assert (recipe.steps, recipe.steps % recipe.every) == (1620, 0)
    assert recipe.methods == recipe_for("gpt", 4, ["ddp"]).methods


def test_batches_of_another_size_may_come_to_a_peers_loss_sooner() -> None:
    results = {kind: dict(of) for kind, of in RESULTS.items()}
    results["curves"]["gpt-1024-tokens 4 0"] = {"gossip": {"steps": [2, 4, 6], "scores": [2.0, 1.1, 1.0]}}
    results["seconds"]["gpt-1024-tokens 4 10mbit"] = {"gossip": 0.6}
    rows = Table(results, "gpt", 4).against_each_peer()
    assert rows[3] == ["ddp, Muon", "1.100", "15.00 (gossip; gpt-1024-tokens)"]  # 30 x 1.2 s, 4 x 0.6 s


def test_the_soonest_peer_may_have_batches_of_another_size_and_a_longer_schedule() -> None:
    strongest, ours = "ddp, Muon, fp16 hook", "gossip"
    curves = {
        "gpt 4 0": {"ddp": run([3, 2, 1.5]), strongest: run([2, 1.5, 1.0]), ours: run([2.2, 1.6, 1.2])},
        "gpt-1440-steps 4 0": {ours: {"steps": [20, 40, 60], "scores": [2.0, 1.0, 0.9]}},
        "gpt-1024-tokens 4 0": {"ddp": run([3, 2, 1.8]), strongest: run([2, 1.8, 1.4]), ours: run([2, 1.9, 1.7])},
        "gpt-1024-tokens-400-steps 4 0": {strongest: {"steps": [10, 20], "scores": [1.4, 0.9]}},
    }
    step = {"ddp": 1.0, strongest: 0.8, ours: 0.1}
    seconds = {f"{recipe} 4 10mbit": step for recipe in ("gpt", "gpt-1024-tokens")}
    table = Table({"curves": curves, "seconds": seconds}, "gpt", 4)
    rows = {(loss, who): cell for loss, who, cell in table.at_each_loss()[2:]}
    assert (
        rows["1.000", "peer"] == f"16.0 s ({strongest}; gpt-1024-tokens; 20 steps, one seed)"
    )  # 20 x 0.8 s, own 30 x 0.8 s
    assert rows["1.000", "of ours"] == "4.0 s (gossip; 60 steps, one seed)"
    assert rows["1.000", "times sooner"] == "4.00"
    assert rows["1.400", "peer"] == f"8.0 s ({strongest}; gpt-1024-tokens; 20 steps, one seed)"
    assert [*dict.fromkeys(loss for loss, _ in rows)] == ["1.800", "1.500", "1.400", "1.000"]


@pytest.mark.thorough
def test_every_method_is_one_that_the_command_line_takes() -> None:
    for name, words in METHODS.items():
        strategy = composed([*RECIPES["gpt"].words, *(w for w in words if not w.startswith(OWN))], 0).strategy
        assert strategy._target_.endswith(("DDPStrategy", "Apart")) == name.startswith(PEERS), name


def test_what_is_timed_holds_whole_outer_rounds() -> None:
    assert all((steps - 10) % 8 == 0 for steps in [*TIMED.values(), 74])


def test_a_method_that_only_some_seeds_and_rates_have_is_shown_with_what_there_is(tmp_path: Path) -> None:
    curves = {"gpt 4 0": RESULTS["curves"]["gpt 4 0"], "gpt 4 1": {"ddp": run([3, 2, 1.7])}}
    table = Table({"curves": curves, "seconds": {"gpt 4 10mbit": {"ddp": 1.0}}}, "gpt", 4)
    assert table.losses()[-1] == ["gossip", "2.500", "1.200", "-"]
    assert table.to_the_loss_of("ddp")[-1] == ["gossip", "20", "-"]


def test_results_keep_the_order_of_the_methods(tmp_path: Path) -> None:
    results: dict[str, Any] = {"curves": {}}
    for method in ("ddp, Muon", "ddp"):
        keep(results, tmp_path / "r.json", ("curves", "gpt 4 0", method), {})
    assert [*results["curves"]["gpt 4 0"]] == ["ddp", "ddp, Muon"]


def test_seconds_of_two_processors_are_not_mixed() -> None:
    results: dict[str, Any] = {"seconds": {"gpt 4 10mbit": {}}, "hardware": {"processor": "another"}}
    about(results, timed=False)
    assert results["hardware"] == {"processor": "another"}
    assert len(results["losses also on"]) == 1
    with pytest.raises(SystemExit, match="the seconds there are of another: give --results another file"):
        about(results, timed=True)


def test_more_hosts_have_words_of_their_own() -> None:
    assert recipe_for("gpt", 8).methods["gossip, int8, Muon"][-1] == "optimizer.lr=3e-2"
    assert [*recipe_for("gpt", 4, ["ddp"]).methods] == ["ddp"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("hosts", [4, 8, 16])
def test_the_last_mark_is_after_the_last_step(name: str, hosts: int) -> None:
    recipe = recipe_for(name, hosts)
    assert recipe.steps % recipe.every == 0


def trained(folder: Path, words: list[str]) -> None:
    plan = {"folder": folder, "words": RECIPES["gpt"].words, "steps": 8, "every": 4, "seed": 0, "hosts": 2}
    train(plan, "0", words, ["trainer.devices=2", "strategy.start_method=fork"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    ["ddp, Muon", "gossip, int8, Muon", "ddp, Muon, fp16 hook, accumulating 4", "torchft's DiLoCo, Muon"],
)
def test_a_rehearsed_loss_is_that_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """To rounding where more than one tensor is summed in another order; torchft's is its own code."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(peers, "LIGHTHOUSE", ports.free())
    words = [word for word in METHODS[method] if word != "hook=fp16"]
    in_processes(trained, tmp_path, words)
    real = scores(RECIPES["gpt"].words, 0, mean_rows(tmp_path, "0", 2))
    recipe = RECIPES["gpt"]._replace(steps=8, every=4)
    found = rehearsed(recipe, words, 2, 0)
    assert found["scores"] == pytest.approx(real, abs=0 if "gossip" in method else 1e-4)
    record = json.loads((tmp_path / "0-0.json").read_text())
    assert found["bytes_sent"] == pytest.approx(record["sent"], rel=0.2)  # a last round may not have left
    assert len(record["ends"]) == 8


def test_what_needs_processes() -> None:
    alone = {method for method, words in METHODS.items() if can_be_rehearsed(words)}
    compressors = {"ddp, PowerSGD", "ddp, Muon, PowerSGD"}
    assert {*METHODS} - alone == {*compressors, "decent-dp, AccumAdamW", "compressed, int8, Muon shared out"}
