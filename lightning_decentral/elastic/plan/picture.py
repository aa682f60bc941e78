"""Picture of an elastic run: which members trained together in which rounds. Only reports draw it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_decentral.elastic.plan.view import View, shown
from lightning_decentral.shared.plan.figure import INK, new_figure

COLOURS = ("#8fb3d9", "#9ccc9c", "#e6b566", "#b79ad1", "#d98c8c", "#7fc4c4", "#c2a27c", "#a9a9d9")
NARROW = 0.04  # Fraction of the picture's width: views that were in force for less have no number written on them.
LARGEST_INCHES = 40.0

Stays = Mapping[str, Sequence[tuple[float, float, int]]]
"""{member: [(from, to, number of the view)]}, in the order in which members joined."""


def stays(views: Sequence[View], rounds: int) -> Stays:
    """Return {member: [(first round, end, number of the view)]} of views in order; the last one ends at `rounds`."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    ends = [*(view.first_round for view in views[1:]), rounds]
    for view, end in zip(views, ends, strict=True):
        for name in view.members:
            found.setdefault(name, []).append((view.first_round, max(view.first_round, end), view.number))
    return found


def draw_bars(axes: Any, found: Stays) -> None:
    """Draw a row for each member, with a bar for each view that includes the member."""
    width = max((end for each in found.values() for _, end, _ in each), default=0)
    for row, each in enumerate(found.values()):
        for begin, end, view in each:
            axes.barh(row, end - begin, left=begin, height=0.8, color=COLOURS[(view - 1) % len(COLOURS)])
            if end - begin > NARROW * width:
                axes.text((begin + end) / 2, row, f"view {view}", ha="center", va="center", fontsize=7, color=INK)
    axes.set_yticks(range(len(found)), [*map(shown, found)], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw_members(views: Sequence[View], rounds: int, file: Path) -> None:
    """Draw the members over rounds into a file. ValueError without matplotlib."""
    found = stays(views, rounds)
    figure = new_figure(8, min(LARGEST_INCHES, 1.2 + 0.28 * len(found)))
    axes = figure.subplots()
    draw_bars(axes, found)
    axes.set_xlabel("round")
    axes.set_title("Who trained together", loc="left", fontsize=11, fontweight="bold", color=INK)
    figure.savefig(file)
