"""Gantt chart of a schedule: one row per device, one colour per job. Needs matplotlib (extra `plot`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_decentral.shared.plan.figure import INK, new_figure
from lightning_decentral.shared.plan.timeline import Span

NAMED = 20  # jobs whose names fit into a legend, and colours
LOADING = 0.35  # opacity of a load


@dataclass(frozen=True)
class Bar:
    """Time during which a job uses a device, or loads onto it."""

    job: str
    span: Span
    load: bool = False  # drawn paler


def bars_of_sweep(spans: Mapping[str, Span]) -> list[Bar]:
    """Bars of a sweep by member: a span's name begins with the member's, up to the last slash."""
    bars = [Bar(name.rpartition("/")[0] or name, span) for name, span in spans.items()]
    return sorted(bars, key=lambda bar: _place(bar.job))


def draw(panels: Mapping[str, Sequence[Bar]], path: str | Path) -> None:
    """Draw one panel for each title, in seconds since its first bar. ValueError: matplotlib is missing or can't write
    this suffix, or the folder doesn't exist."""
    every = [bar for bars in panels.values() for bar in bars]
    jobs, rows = list(dict.fromkeys(bar.job for bar in every)), sorted({bar.span.worker for bar in every}, key=_place)
    figure = new_figure(10, 0.9 + len(panels) * (0.7 + 0.34 * len(rows)) + 0.05 * min(len(jobs), NAMED))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for one, (title, bars) in zip(axes, panels.items(), strict=True):
        _panel(one, bars, jobs, rows)
        one.set_title(title, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel("seconds")
    if 0 < len(jobs) <= NAMED:
        axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be drawn: {error}") from None


def _place(row: str) -> tuple[int, str]:
    """Sort key by the device's number: device 2 comes before device 10."""
    digits = "".join(c for c in row if c.isdigit())
    return int(digits or 0), row


def _panel(axes: Any, bars: Sequence[Bar], jobs: Sequence[str], rows: Sequence[str]) -> None:
    from matplotlib import colormaps

    colours = {job: colormaps["tab20"](index % NAMED) for index, job in enumerate(jobs)}
    begin = min((bar.span.start for bar in bars), default=0.0)
    found: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}  # (start, length) by job, row and load
    for bar in bars:
        stretch = bar.span.start - begin, bar.span.finish - bar.span.start
        found.setdefault((bar.job, bar.span.worker, bar.load), []).append(stretch)
    for (job, row, load), stretches in found.items():
        look = {"facecolors": [colours[job]], "edgecolor": "white", "linewidth": 0.3, "alpha": LOADING if load else 1.0}
        axes.broken_barh(stretches, (rows.index(row) - 0.4, 0.8), **look)
    for job, colour in colours.items():
        axes.broken_barh([], (0, 0), facecolors=[colour], label=job)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)  # of a sweep whose members all failed there are none
    axes.spines[["top", "right"]].set_visible(False)
