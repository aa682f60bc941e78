"""Gantt charts of schedules. Needs matplotlib (extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_decentral.figure import INK
from lightning_decentral.multimodel.schedule import Ran
from lightning_decentral.planning.drawings import new_figure
from lightning_decentral.planning.pictures import COLOURS
from lightning_decentral.timeline import Span

NAMED = 12  # jobs whose names fit into a legend
LOADING = 0.35  # opacity of a load


def draw_gantt(panels: Mapping[str, Mapping[Ran, Span]], path: Path) -> None:
    """One panel for each schedule by its title: a row for each device and one for its loads, a colour for each job.

    Raises:
        ValueError: no matplotlib, a suffix that it doesn't write, or a folder that isn't there.
    """
    jobs = list(dict.fromkeys(ran.job for spans in panels.values() for ran in spans))
    rows = sorted({span.worker for spans in panels.values() for span in spans.values()}, key=_place)
    figure = new_figure(10, 0.9 + len(panels) * (0.7 + 0.34 * len(rows)))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for one, (title, spans) in zip(axes, panels.items(), strict=True):
        _panel(one, title, spans, jobs, rows)
    axes[-1].set_xlabel("seconds")
    if len(jobs) <= NAMED:
        axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _place(row: str) -> tuple[int, str]:
    """device 2 before device 10."""
    digits = "".join(c for c in row if c.isdigit())
    return int(digits or 0), row


def _panel(axes: Any, title: str, spans: Mapping[Ran, Span], jobs: Sequence[str], rows: Sequence[str]) -> None:
    colours = {job: COLOURS[index % len(COLOURS)] for index, job in enumerate(jobs)}
    for (job, row, load), bars in _bars(spans).items():
        look = {"facecolors": [colours[job]], "edgecolor": "white", "linewidth": 0.3, "alpha": LOADING if load else 1.0}
        axes.broken_barh(bars, (rows.index(row) - 0.4, 0.8), **look)
    for job, colour in colours.items():
        axes.broken_barh([], (0, 0), facecolors=[colour], label=job)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(spans: Mapping[Ran, Span]) -> dict[tuple[str, str, bool], list[tuple[float, float]]]:
    """(job, row, load) -> (start, length) of each."""
    found: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for ran, span in spans.items():
        found.setdefault((ran.job, span.worker, ran.load), []).append((span.start, span.finish - span.start))
    return found
