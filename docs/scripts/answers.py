"""Pictures of docs/measured.md: a panel of bars for what each table compares, from the committed results.

python docs/scripts/answers.py
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

import matplotlib
from pictures import ACCENT, IMAGES, INK, PALE, ROOT, SAME, WORKER, new_figure

sys.path.insert(0, str(ROOT / "benchmarks"))
from pages import measured
from pages.choosing import stragglers

Bars = Mapping[str, float]


def rows(table: str) -> list[dict[str, str]]:
    """Of a table in Markdown, by its headings."""
    heads, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(heads, cells, strict=True)) for cells in body]


def number(cell: str) -> float:
    """The first one."""
    found = re.search(r"-?\d+(\.\d+)?", cell)
    assert found, cell
    return float(found[0])


def bars(panels: Mapping[str, Bars], unit: str, width: float = 9) -> Any:
    """A panel of horizontal bars for each title, the first of each pale: what the others are compared with."""
    most = max(map(len, panels.values()))
    figure = new_figure(width, 0.9 + 0.24 * most)
    for axes, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        names, values = list(found), list(found.values())
        drawn = axes.barh(range(len(names)), values, color=[PALE, *[WORKER] * (len(names) - 1)], height=0.7)
        axes.bar_label(drawn, [f"{value:g}" for value in values], padding=3, fontsize=7, color=INK)
        said = axes.get_subplotspec().is_first_col() or names != list(next(iter(panels.values())))
        axes.set_yticks(range(len(names)), names if said else [], fontsize=7)
        axes.set_ylim(most - 0.5, -0.5)
        axes.set_xlim(0, 1.25 * max(values))
        axes.set_title(title, fontsize=8, color=INK, loc="left")
        axes.set_xlabel(unit, fontsize=7)
        axes.tick_params(labelsize=7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def quality() -> Any:
    found = rows(measured.quality())
    titles = {row["recipe"]: f"{row['recipe']}, {row['metric']}" for row in found}
    panels = {title: {r["run"]: number(r["mean ± deviation"]) for r in found if r["recipe"] == recipe}
              for recipe, title in titles.items()}  # fmt: skip
    return bars(panels, "mean of three seeds")


def overhead() -> Any:
    seconds = {f"{row['measured']}, {row['workers']}": number(row["ratio of seconds per step"])
               for row in rows(measured.overhead())}  # fmt: skip
    (memory,) = rows(measured.memory())
    copies = {name: number(memory[name]) for name in ("ddp", "gossip", "blocking")}
    return bars(
        {"a step, workers": seconds, "memory": copies}, "times ddp (1 worker: no strategy); copies of the model"
    )


def network() -> Any:
    found = rows(measured.slow_network())
    rates = [head for head in found[0] if head.endswith("b/s")]
    return bars({rate: {row["method"]: number(row[rate]) for row in found} for rate in rates}, "seconds of a step")


def slow() -> Any:
    (found,) = rows(stragglers())
    return bars({"one of eight hosts at a time is slow": {k: number(v) for k, v in found.items()}}, "times ddp", 6)


def forecasts() -> Any:
    off = {row["hosts, rate"]: number(row["furthest off"]) for row in rows(measured.forecasts())}
    return bars({"hosts, rate": off}, "furthest off, %", 6)


def unequal() -> Any:
    found = rows(measured.unequal_data())
    heads = [head for head in found[0] if "alpha" in head]
    named = [f"{row['rule']}, {row['graph'].partition(' ')[0]}, {row['delay']}" for row in found]
    return bars({h: dict(zip(named, (number(row[h]) for row in found), strict=True)) for h in heads}, "accuracy, %")


def slices() -> Any:
    found = rows(measured.pipeline())
    panels = {head: {row["slices"]: number(row[head]) for row in found} for head in ("bound", "times one process")}
    return bars(panels, "times one process", 7)


def faults() -> Any:
    (found,) = rows(measured.faults())
    counts = {end: number(count) for end, count in found.items() if end != "of them"}
    return bars({"what the others do": counts}, "faults", 6)


def lost() -> Any:
    """Every kill: what a survivor's longest step took beyond its usual one, and when a newcomer took part."""
    killed = sorted(measured.result("elastic-2-cores.json")["kills"]["rows"], key=lambda row: float(row["joined"]))
    figure = new_figure(6, 2.2)
    axes = figure.subplots()
    axes.bar(range(len(killed)), [row["joined"] for row in killed], color=WORKER, label="a newcomer takes part")
    beyond = [max(row["beyond"]) for row in killed]
    axes.plot(range(len(killed)), beyond, color=ACCENT, marker=".", label="a survivor's longest step, beyond the usual")
    axes.set_xlabel("kill -9 of one of four, by the newcomer's time", fontsize=7)
    axes.set_ylabel("seconds", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


PICTURES = (quality, overhead, network, slow, forecasts, unequal, slices, faults, lost)


def draw(folder: Any) -> None:
    """One SVG for each picture."""
    with matplotlib.rc_context(SAME):
        for picture in PICTURES:
            picture().savefig(folder / f"measured-{picture.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(IMAGES)
