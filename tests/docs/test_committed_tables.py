"""Tables of the guides are those of the committed results."""

import re
from itertools import product
from statistics import mean, quantiles, stdev

import pytest

from lightning_decentral import gossip
from lightning_decentral.planner.rehearsal.answer import BEYOND_ERROR, OF_FORECAST
from loss.methods import best
from pages.choosing import result
from pages.reports import report
from tests.docs.pages import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str) -> list[list[str]]:
    """Cells of every row of every table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("partial-backprop.md", "partial-cost-2-cores"),
        ("partial-backprop.md", "partial-memory-2-cores"),
        ("codecs.md", "quality-codec-2-cores"),
        ("../benchmarks/notes.md", "small-models-2-cores"),
    ],
)
def test_a_page_holds_the_whole_table(name: str, results: str) -> None:
    found = rows(report(results))
    assert len(found) > 4
    assert all(row in rows(page(name)) for row in found)


def test_the_best_of_each_method() -> None:
    chosen = best(result("tuning-2-cores.json")["runs"])
    head, _, *shown = rows(page("optimizers.md").partition("**Measured rates.**")[2].partition("\n## ")[0])
    assert head == ["method", "best rate", "momentum", "test loss"]
    assert len(shown) > 7
    for method, *cells in shown:
        loss, rate, momentum = chosen[method]
        assert cells == [f"{rate:g}", f"{momentum:g}", f"{loss:.3f}"]


def exported(codec: str) -> bool:
    return set(re.findall(r"(\w+)\(", codec)) <= set(gossip.__all__)


def test_codecs() -> None:
    """Of what was measured, the codecs that the package has."""
    summary = [tuple(row.values()) for row in result("codec-2-cores.json")["summary"] if exported(row["codec"])]
    measured = [(f"`{name.replace('inner=', '')}`", *numbers) for name, *numbers in summary]
    cells = [row for row in rows(page("codecs.md")) if row[0].endswith(")`") and len(row) == 5]
    assert [(name, *map(float, numbers)) for name, *numbers in cells] == measured


def test_what_partial_backprop_loses() -> None:
    """Rows of `ddp` and of the default, of each recipe."""
    measured = [row for row in rows(report("partial-accuracy-2-cores")) if len(row) == 7]
    shown = [row for row in rows(page("partial-backprop.md")) if row in measured]
    assert [row[0] for row in shown if row[1] == "ddp"] == ["vit", "resnet", "gpt"]
    assert [row[0] for row in shown].count("gpt") == 3


def test_sweeps() -> None:
    found = result("sweep-2-cores.json")["two simulated devices"].values()
    names = ("seconds", "busy_of_bound", "joblib_seconds", "sequential_seconds")
    measured = [[f"{row[name]:.2f}" for name in names] for row in found]
    assert [row[1:] for row in rows(page("sweeps.md")) if row[1:] in measured] == measured


def off(row: dict[str, float]) -> str:
    return f"{100 * (row['real_seconds'] / row['simulated_seconds'] - 1):+.1f} %"


def test_schedules_for_real() -> None:
    shown = {row[0].strip("`"): row[1:] for row in rows(page("scheduling.md"))}
    for row in result("rehearsal-real-2-cores.json")["rows"]:
        assert shown[row["policy"]] == [f"{row['simulated_seconds']:.2f}", f"{row['real_seconds']:.2f}", off(row)]


def test_jobs_that_take_turns() -> None:
    numbers = [row[1:] for row in rows(report("jigsaw-2-cores"))[2:]]
    assert [row[1:] for row in rows(page("scheduling.md")) if row[1:] in numbers] == numbers


def test_what_a_rehearsal_prints() -> None:
    found = result("foretold-2-cores.json")["whole"]
    assert found["minutes"] <= 10
    since = {"foretells": "predicts", "their logarithm": "logarithms"}  # as it is printed now
    for line in found["lines"]:
        for old, new in since.items():
            line = line.replace(old, new)
        assert line in page("rehearse.md").splitlines()


def test_what_noise_foretells() -> None:
    shown = {row[0].strip("`"): row[1:] for row in rows(page("rehearse.md").partition("predicted | measured")[2])}
    for recipe, found in result("foretold-2-cores.json")["noise"].items():
        cells = [f"{found['noise']['2']:.1f}"]
        for workers in (4, 8, 16):
            here = [row for row in found["rows"] if row["workers"] == workers]
            came = [row["came"] for row in here]
            cells += [f"{here[0]['foretold']:.2f}", f"{min(came):.2f} to {max(came):.2f}"]
        assert shown[recipe] == cells
    assert result("foretold-2-cores.json")["beyond"]["nine in ten within"] <= BEYOND_ERROR


def test_how_far_a_rehearsals_forecasts_were_off() -> None:
    compared = result("rehearsed-2-cores.json")["rows"]
    steps = {(row["place"], row["rate"], row["method"]): row["step_seconds"] for row in compared}
    off = quantiles((real / forecast for forecast, real in steps.values()), n=20, method="inclusive")
    assert (round(off[0], 2), round(off[-1], 2)) == OF_FORECAST


def test_states_that_travel() -> None:
    losses = result("variants-2-cores.json")["losses"]
    ways = {"`ddp`": "ddp", "each worker's own": "own", "travels in every step": "travels"}
    shown = {row[0]: row[1:3] for row in rows(page("optimizers.md").partition("## States that travel")[2])}
    for title, way in {**ways, "travels in every fourth": "every fourth"}.items():
        assert shown[title] == [f"{losses[f'states, 8 workers, {rate}, {way}']:.3f}" for rate in ("2e-2", "3e-2")]


def test_momentum_that_rises() -> None:
    """Three seeds; where it stays, those of the table of `choosing.md`."""
    losses, curves = result("variants-2-cores.json")["losses"], result("loss-per-second-2-cores.json")["curves"]
    stays = {"ddp": "ddp, Muon", "own": "gossip, int8, Muon", "travels": "gossip, int8, Muon and its momentum"}
    best = {"ddp": "ddp, 2e-2", "own": "own, 2e-2", "travels": "travels, 3e-2"}
    rise = page("optimizers.md").partition("## Momentum that rises")[2].partition("\n## ")[0]
    shown = {row[0]: row[1:] for row in rows(rise)}
    for title, way in {"`ddp`": "ddp", "gossip, `Int8`": "own", "the same, momentum travels": "travels"}.items():
        before = [curves[f"gpt 4 {seed}"][stays[way]]["scores"][-1] for seed in range(3)]
        after = [losses[f"warm-up, {best[way]}{seed}"] for seed in ("", ", seed 1", ", seed 2")]
        assert shown[title] == [f"{mean(some):.3f} ± {stdev(some):.3f}" for some in (before, after)]


def test_muon_on_digits() -> None:
    losses = result("variants-2-cores.json")["losses"]
    shown = {row[0]: row[1:] for row in rows(page("optimizers.md").partition("best of four rates")[2])}
    for recipe, strategy in product(("vit", "resnet"), ("ddp", "gossip")):
        of = {
            n.rpartition(", ")[2]: v for n, v in losses.items() if n.startswith(f"digits, {recipe}, {strategy}, muon")
        }
        rate = min(of, key=of.__getitem__)
        title = f"`{recipe}`, {'`ddp`' if strategy == 'ddp' else strategy}"
        assert shown[title] == [f"{of[rate]:.3f} at {rate}", f"{losses[f'digits, {recipe}, {strategy}, adamw']:.3f}"]
