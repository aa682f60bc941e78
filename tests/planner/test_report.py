"""The report: one page that loads nothing, with the plan's numbers and pictures; and what its map says."""

import builtins
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_decentral.cli.console import write_text
from lightning_decentral.planner.compare import NOTHING, grid, plan, sizes
from lightning_decentral.planner.report import page
from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile, write
from tests.settings import links, model, setting


def test_the_page_holds_all_and_loads_nothing() -> None:
    found = plan(setting(rate=1.5e8))
    text = page(found, workers=[4, 8], rates=[1e8, 1e9])
    for row in found.rows:
        assert row.candidate.title in text
    assert found.command in text
    drawn = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawn) == 5  # map, two curves, two timelines
    for picture in drawn:
        ElementTree.fromstring(picture)
    assert set(re.findall(r'https?://[^"<\s]*', text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r'(src|href)="[^#]|@import|url\((?!#)|<script|<link', text)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.planner.compare.sizes", lambda setting: [4])
    write(Profile(model(), links().costs), tmp_path / "p.json")
    cli.main(["plan", str(tmp_path / "p.json"), "--workers", "4", "--report", str(tmp_path / "r.html")])
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match=r"--report .* can't be written: No such file"):
        write_text("--report", tmp_path / "absent" / "r.html", "")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **named)

    found = plan(setting())
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"need matplotlib: pip install 'lightning-decentral\[plot\]'"):
        page(found, workers=[4], rates=[1e8])


def test_the_map_is_the_plan_of_each_of_its_cells() -> None:
    where = setting(8, rate=1e8)
    found = grid(plan(where), [4, 8], [1e7, 1e8, 1e12])
    assert [(c.workers, c.bytes_per_second) for c in found] == [(n, r) for n in (4, 8) for r in (1e7, 1e8, 1e12)]
    own = next(c for c in found if (c.workers, c.bytes_per_second) == (8, 1e8))
    single = plan(where)
    assert single.best is not None
    assert own.best == single.best.candidate.title
    assert {t: pytest.approx(s) for t, s in own.seconds.items()} == {
        row.candidate.title: row.forecast.seconds for row in single.rows if row.method.equal
    }
    assert found[2].best == found[5].best == "ddp"
    assert found[3].speedup(found[3].best) > own.speedup(own.best) > 1


@pytest.mark.thorough
def test_the_map_compares_what_the_table_does_in_the_same_memory() -> None:
    every = "strategy=gossip strategy/topology=every"
    where, also = setting(8, rate=1e6), (f"{every} strategy.topology.steps=512 strategy.delay=512",)
    bests = []
    for asked in ((), also):
        for memory_bytes in (1e12, 4e7, 1e3):
            single = plan(where, also=asked, memory_bytes=memory_bytes)
            (own,) = grid(single, [8], [1e6])
            assert own.best == (single.best.candidate.title if single.best else NOTHING)
            bests.append(own.best)
    assert bests[1] == "sharded over all" != bests[0]
    assert bests[3:5] == [also[0], "sharded over all"]
    assert "nothing fits" in page(plan(where, memory_bytes=1e3), workers=[8], rates=[1e6])


def test_one_node_has_a_page_without_a_map() -> None:
    where = setting(4, 4)
    inside = replace(where, network=Network(tuple(cost for cost in links().costs if cost.reach == "inside")))
    text = page(plan(inside))
    assert "No map of other clusters" in text
    assert text.count("<svg") == 1  # the timeline of ddp, which is the best


def test_sizes_hold_the_own_one_and_full_nodes() -> None:
    assert sizes(setting(24, 4), nodes=(2, 4)) == [8, 16, 24]
