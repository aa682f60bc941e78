"""The report's pictures as SVG: speed-up curves, where each method wins, timelines. Needs matplotlib (extra `plot`)."""

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

from lightning_decentral.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.planning.sweep import Cell
from lightning_decentral.timeline import Span, Task, run

DDP = "#c8ccd4"
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f4e7c", "#8fb3d9", "#9c6644", "#2e4057", "#b5838d", "#00798c")
SHOWN_ROWS = 8


def svg(figure: Any) -> str:
    """The picture as an element of a page: no declaration, no date, nothing to be loaded."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def palette(titles: Sequence[str]) -> dict[str, str]:
    """{title: colour}, the same in all pictures; ddp is grey."""
    others = [title for title in dict.fromkeys(titles) if title != "ddp"]
    return {"ddp": DDP, **{title: COLOURS[i % len(COLOURS)] for i, title in enumerate(others)}}


def curves(
    cells: Sequence[Cell],
    titles: Sequence[str],
    colours: Mapping[str, str],
    across: Callable[[Cell], float],
    label: str,
) -> str:
    """Speed-up over ddp of these candidates."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    places = [across(cell) for cell in cells]
    for title in titles:
        axes.plot(
            places,
            [cell.speedup(title) or float("nan") for cell in cells],
            color=colours[title],
            marker="o",
            markersize=3,
            label=title,
        )
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over ddp")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e8ee")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def winners(cells: Sequence[Cell], colours: Mapping[str, str]) -> str:
    """Workers across bandwidth, the recommended method as colour, its speed-up as number."""
    workers, rates = sorted({cell.workers for cell in cells}), sorted({cell.bytes_per_second for cell in cells})
    names = ["ddp", *sorted({cell.best for cell in cells} - {"ddp"})]
    figure = new_figure(7.5, 1.4 + 0.45 * len(workers))
    axes = figure.subplots()
    for cell in cells:
        x, y = rates.index(cell.bytes_per_second), workers.index(cell.workers)
        axes.add_patch(_square(x, y, colours[cell.best]))
        axes.text(x, y, f"{cell.speedup(cell.best):.1f}", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(-0.5, len(workers) - 0.5)
    axes.set_xticks(range(len(rates)), [f"{8 * rate / 1e9:g}" for rate in rates])
    axes.set_yticks(range(len(workers)), [str(count) for count in workers])
    axes.set_xlabel("Gbit/s of a network card")
    axes.set_ylabel("workers")
    handles = [_square(0, 0, colours[name]) for name in names]
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def _square(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", alpha=0.75)


def timeline(tasks: Sequence[Task[str]]) -> str:
    """What the first workers and links do, one row each."""
    spans = run(tasks)
    rows = list(dict.fromkeys(task.worker for task in tasks))
    first = [name for pair in zip(*_kinds(rows), strict=False) for name in pair][:SHOWN_ROWS]
    figure = new_figure(8, 0.9 + 0.3 * len(first))
    axes = figure.subplots()
    for name, span in spans.items():
        if span.worker in first and span.finish > span.start:
            axes.barh(first.index(span.worker), **_bar(name, span))
    axes.set_yticks(range(len(first)), first, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def _kinds(rows: Sequence[str]) -> list[list[str]]:
    """Rows of workers and rows of links, so that they can be shown in pairs."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.split()[0], []).append(row)
    return list(kinds.values())


def _bar(name: str, span: Span) -> dict[str, Any]:
    sends = name.split()[0] in ("exchange", "all-reduce", "gather", "scatter")
    colour = ACCENT if sends else INK if name.split()[0] in ("backward", "B", "mix") else WORKER
    return {
        "width": 1e3 * (span.finish - span.start),
        "left": 1e3 * span.start,
        "color": colour,
        "edgecolor": "white",
        "linewidth": 0.4,
    }
