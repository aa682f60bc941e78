"""The picture of docs/elastic.md: who trains together, when. The protocol's own code, on the tests' virtual network.

PYTHONPATH=. python docs/scripts/alive.py
"""

import re
from pathlib import Path
from typing import Any

import matplotlib
from pictures import ACCENT, IMAGES, INK, PALE, SAME, named, new_figure

from lightning_decentral.elastic.plan.picture import Stays, draw_bars
from lightning_decentral.elastic.plan.view import Bounds
from tests.elastic.plan.virtual import World

END, CUT, HEALED = 16.0, 7.0, 8.5
EVENT = re.compile(r" *([\d.]+) (w\d+) (starts|is in view (\d+)|comes back)")


def run() -> World:
    """Five workers: one is killed, the network is cut around another, one is started."""
    world = World(seed=3, bounds=Bounds(2, 6), size=5)
    world.net.at(3.0, lambda: world.end("w1", notice=True))
    rest = ["w0", "w2", "w3", "lobby"]
    world.net.at(CUT, lambda: world.cut(["w4"], rest, HEALED - CUT, breaks=False))
    world.net.at(10.0, world.start)
    world.net.run(END)
    return world


def changes(world: World) -> dict[str, list[tuple[float, int]]]:
    """Of each worker since when it is in which view, 0 before the first; -1 from its end on."""
    found: dict[str, list[tuple[float, int]]] = {}
    for line in world.log:
        if event := EVENT.match(line):
            seconds, name, what, view = event.groups()
            found.setdefault(name, []).append((float(seconds), int(view or (0 if what == "starts" else -1))))
    found["w1"] = [*(one for one in found["w1"] if one[0] < 3.0), (3.0, -1)]
    return found


def lasting(each: list[tuple[float, int]]) -> list[tuple[float, float, int]]:
    ends = [*(begin for begin, _ in each[1:]), END]
    return [(begin, end, view) for (begin, view), end in zip(each, ends, strict=True)]


def alive() -> Any:
    found = {name: lasting(each) for name, each in changes(run()).items()}
    figure = new_figure(9, 2.8)
    axes = figure.subplots()
    stays: Stays = {name: [one for one in each if one[2] > 0] for name, each in found.items()}
    draw_bars(axes, stays)
    for row, each in enumerate(found.values()):
        for begin, end, _ in [one for one in each if one[2] == 0]:
            axes.barh(row, end - begin, left=begin, height=0.8, color=PALE)
    axes.axvspan(CUT, HEALED, color=ACCENT, alpha=0.15)
    axes.text(CUT, -0.7, "w4 is cut off", fontsize=7, color=INK)
    axes.set_ylim(len(found) - 0.5, -1)
    named(axes, "w1 is killed, w4 is cut off and comes back as a newcomer, one more is started", "seconds", "")
    return figure


def draw(folder: Path) -> None:
    with matplotlib.rc_context(SAME):
        alive().savefig(folder / "alive.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(IMAGES)
