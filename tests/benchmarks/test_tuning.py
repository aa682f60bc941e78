"""Every method's rate and momentum come from one grid, and from all of it."""

import math
import re

import pytest

from loss.methods import METHODS, MOMENTA, RATES, best, family, tuned
from loss.per_second import RECIPES
from loss.rehearsed import can_be_rehearsed, rehearsed
from loss.tuning import grid, last_loss, page, steps_of


def runs(method: str, lowest: tuple[float, float]) -> dict[str, float]:
    """Of the whole grid, lowest there."""
    kind = family(method)
    return {
        f"{method} | {rate:g} | {momentum:g}": abs(rate - lowest[0]) + abs(momentum - lowest[1])
        for rate in RATES[kind]
        for momentum in MOMENTA[kind]
    }


def test_the_best_is_the_lowest_that_is_a_number() -> None:
    found = {"a | 0.01 | 0.9": math.inf, "a | 0.02 | 0.9": 1.5, "a | 0.03 | 0.8": 1.25, "b | 0.01 | 0.9": math.nan}
    assert best(found) == {"a": (1.25, 0.03, 0.8)}


def test_every_method_takes_its_best_rate_and_momentum() -> None:
    found = tuned({**runs("ddp, Muon", (4e-2, 0.8)), **runs("ddp", (3e-3, 0.9))})
    assert found["ddp, Muon"] == ["optimizer.lr=0.04", "optimizer.momentum=0.8"]
    assert found["ddp"] == ["optimizer.lr=0.003"]


def test_what_was_not_tuned_takes_those_of_its_method_without() -> None:
    found = tuned({**runs("ddp, Muon", (4e-2, 0.8)), **runs("ddp", (3e-3, 0.9))})
    assert found["ddp, Muon, PowerSGD"] == found["ddp, Muon, fp16 hook"] == found["ddp, Muon"]
    assert found["ddp, fp16 hook"] == found["ddp"]
    assert "gossip, int8, Muon" not in found
    own = tuned({**runs("ddp", (3e-3, 0.9)), **runs("ddp, PowerSGD", (6e-3, 0.9))})
    assert (own["ddp, PowerSGD"], own["ddp, fp16 hook"]) == (["optimizer.lr=0.006"], ["optimizer.lr=0.003"])


def test_half_a_grid_is_refused() -> None:
    half = runs("ddp, Muon", (4e-2, 0.8))
    del half["ddp, Muon | 0.01 | 0.95"]
    with pytest.raises(ValueError, match=re.escape("ddp, Muon isn't tuned to the end, 12 runs")):
        tuned(half)


def test_the_grid_is_all_rates_and_momenta_of_what_has_its_own() -> None:
    found = grid()
    assert found["ddp, Muon | 0.04 | 0.8"] == [*METHODS["ddp, Muon"], "optimizer.lr=0.04", "optimizer.momentum=0.8"]
    assert found["ddp | 0.006 | 0.9"] == [*METHODS["ddp"], "optimizer.lr=0.006"]
    methods = {name.partition(" | ")[0] for name in found}
    takes_another = {"ddp, fp16 hook", "ddp, Muon, fp16 hook", "ddp, AccumAdamW, fp16 hook"}
    takes_another |= {method for method in METHODS if method.endswith("small buckets")}
    assert {*METHODS} - methods == {*takes_another, "compressed, int8, Muon shared out"}
    tuned(dict.fromkeys(found, 1.0))  # all of it: no method has a part


def test_on_images_what_needs_processes_takes_another_methods() -> None:
    methods = {name.partition(" | ")[0] for name in grid("vit")}
    assert all(can_be_rehearsed(METHODS[method]) and "accumulating" not in method for method in methods)
    assert {"ddp", "torchft's DiLoCo, Muon", "gossip, int8, Muon and its momentum"} <= methods


def test_the_page_marks_the_best_of_each_method() -> None:
    text = page({"name": "tuning-here", "runs": runs("ddp, Muon", (4e-2, 0.8)), "hardware": {"cores": "2"}})
    assert "| ddp, Muon | 0.8 | 0.030 | 0.020 | 0.010 | **0.000** |" in text
    assert text.count("**") == 2
    assert text.startswith("Test loss of `gpt` after 364 steps, 4 workers, seed 0: cores 2.")


def test_a_loss_is_that_of_the_last_mark_of_a_rehearsal() -> None:
    words = METHODS["gossip, int8, Muon"]
    two = rehearsed(RECIPES["vit"]._replace(steps=4, every=2), words, 2, 0)
    assert last_loss("vit", words, 2, 4) == two["scores"][-1] != two["scores"][0]
    assert (steps_of("gpt"), steps_of("vit")) == (364, RECIPES["vit"].steps)


@pytest.mark.filterwarnings("ignore:worker . refused a message:UserWarning")
def test_a_run_that_ends_as_no_number_is_infinitely_bad() -> None:
    assert last_loss("vit", [*METHODS["gossip, int8, Muon"], "optimizer.lr=1e30"], 2, 4) == math.inf
