"""Report page of a plan (HTML): speed-up curves, where each method wins, timelines. Needs matplotlib (extra `plot`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from io import StringIO
from typing import Any

from lightning_decentral.planner.compare import RATES, Cell, Comparison, grid, sizes
from lightning_decentral.planner.show import HEADINGS, cells, sentences
from lightning_decentral.shared.plan.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.shared.plan.timeline import Task, run

DDP = "#c8ccd4"
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f4e7c", "#8fb3d9", "#9c6644", "#2e4057", "#b5838d", "#00798c")
SHOWN_ROWS = 8
Palette = Mapping[str, str]


def new_axes(width: float, height: float, across: str, upwards: str = "") -> tuple[Any, Any]:
    """Make a figure, and its axes with these labels."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Any) -> str:
    """Render a figure as an SVG element for a page: no declaration, no date, nothing to be loaded."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def palette(titles: Sequence[str]) -> dict[str, str]:
    """{title: colour}, the same in all pictures; ddp is grey."""
    others = [title for title in dict.fromkeys(titles) if title != "ddp"]
    return {"ddp": DDP, **{title: COLOURS[i % len(COLOURS)] for i, title in enumerate(others)}}


def curves(
    cells: Sequence[Cell], titles: Sequence[str], colours: Palette, across: Callable[[Cell], float], label: str
) -> str:
    """Draw curves of the candidates' speed-up over ddp (SVG)."""
    figure, axes = new_axes(7, 3.6, label, "speed-up over ddp")
    places = [across(cell) for cell in cells]
    for title in titles:
        speedups = [cell.speedup(title) or float("nan") for cell in cells]
        axes.plot(places, speedups, color=colours[title], marker="o", markersize=3, label=title)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.minorticks_off()
    axes.grid(axis="y", color="#e4e8ee")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def winners(cells: Sequence[Cell], colours: Palette) -> str:
    """Draw a map of workers and bandwidth: the recommended method as colour, its speed-up as number (SVG)."""
    workers, rates = sorted({cell.workers for cell in cells}), sorted({cell.bytes_per_second for cell in cells})
    names = ["ddp", *sorted({cell.best for cell in cells} - {"ddp"})]
    figure, axes = new_axes(7.5, 1.4 + 0.45 * len(workers), "Gbit/s of a network card", "workers")
    axes.spines[["top", "right"]].set_visible(True)
    from matplotlib.patches import Rectangle  # installed, as there is a figure

    square = partial(Rectangle, width=1, height=1, edgecolor="white", alpha=0.75)
    for cell in cells:
        x, y = rates.index(cell.bytes_per_second), workers.index(cell.workers)
        axes.add_patch(square((x - 0.5, y - 0.5), facecolor=colours[cell.best]))
        factor = f"{cell.speedup(cell.best):.1f}" if cell.speedup(cell.best) else ""
        axes.text(x, y, factor, ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(-0.5, len(workers) - 0.5)
    axes.set_xticks(range(len(rates)), [f"{8 * rate / 1e9:g}" for rate in rates])
    axes.set_yticks(range(len(workers)), [str(count) for count in workers])
    handles = [square((0, 0), facecolor=colours[name]) for name in names]
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def timeline(tasks: Sequence[Task[str]]) -> str:
    """Draw a timeline of the first workers' and links' tasks, one row each (SVG)."""
    spans = run(tasks)
    kinds: dict[str, list[str]] = {}  # rows of workers and rows of links, shown in pairs
    for row in dict.fromkeys(task.worker for task in tasks):
        kinds.setdefault(row.split()[0], []).append(row)
    first = [name for pair in zip(*kinds.values(), strict=False) for name in pair][:SHOWN_ROWS]
    figure, axes = new_axes(8, 0.9 + 0.3 * len(first), "milliseconds")
    for name, span in spans.items():
        if span.worker in first and span.finish > span.start:
            sends = name.split()[0] in ("exchange", "all-reduce", "gather", "scatter")
            colour = ACCENT if sends else INK if name.split()[0] in ("backward", "B", "mix") else WORKER
            place, width = first.index(span.worker), 1e3 * (span.finish - span.start)
            axes.barh(place, width, left=1e3 * span.start, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(first)), first, fontsize=8)
    axes.invert_yaxis()
    return svg(figure)


MOST_CURVES = 8
NO_MAP = "<p>No map of other clusters: nothing is known of a network between nodes; give --bandwidth 200mbit.</p>"
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>plan</title>'
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b263b; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right }
td:first-child, th:first-child, td:last-child { text-align: left } tr:nth-child(even) { background: #f3f5f8 }
tr.best { font-weight: bold } code { background: #f3f5f8; padding: 2px 4px } svg { max-width: 100%; height: auto }
"""


def page(plan: Comparison, *, workers: Sequence[int] | None = None, rates: Sequence[float] = RATES) -> str:
    """Make the report page (HTML) of a plan. `workers`: numbers of workers in the map and the curves; by default up to
    16 nodes. `rates`: bandwidths in the map and the curves, bytes per second of a network card. ValueError: no
    matplotlib."""
    where = plan.setting
    counts = (workers or sizes(where)) if where.network.knows("between") else []
    found = grid(plan, counts, rates) if counts else []
    body = "\n".join([*_head(plan), *(_maps(plan, found) if found else [NO_MAP])])
    for row in dict.fromkeys([plan.baseline, *([plan.best] if plan.best else [])]):
        body += f"\n<h2>Timeline: {escape(row.candidate.title)}</h2>"
        body += "<p>Equally fast workers; the first rows; a batch with an update.</p>\n"
        body += timeline(row.method.tasks(row.setting))
    return f"{HEAD}<style>{STYLE}</style>\n{body}\n</html>\n"


def _head(plan: Comparison) -> Iterator[str]:
    model, cluster = plan.setting.model, plan.setting.cluster
    yield f"<h1>{escape(model.name)} on {cluster.workers} workers, {cluster.per_node} on a node</h1>"
    yield f"<p>profiled on {escape(model.device)}; {model.parameter_bytes / 1e6:,.1f} MB of parameters, "
    yield f"{1e3 * model.seconds:,.1f} ms of computation</p>"
    rows = "".join(line("td", cells(plan, row), ' class="best"' if row is plan.best else "") for row in plan.rows)
    yield f"<table>{line('th', HEADINGS)}{rows}</table>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in sentences(plan))


def line(tag: str, found: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in found) + "</tr>"


def _maps(plan: Comparison, found: Sequence[Cell]) -> Iterator[str]:
    titles = [row.candidate.title for row in plan.rows if row.method.equal][:MOST_CURVES]
    own = plan.setting.cluster.workers
    own_rate = plan.setting.network.price("exchange", "between", 2).bytes_per_second
    rate = min({c.bytes_per_second for c in found}, key=lambda r: abs(r - own_rate))
    over_workers = [cell for cell in found if cell.bytes_per_second == rate]
    over_rates = [cell for cell in found if cell.workers == own]
    gain = "times faster than ddp to a loss" if plan.known else "its speed-up over ddp"
    yield f"<h2>Where each method wins</h2><p>Colour: what to train with; number: {gain}.</p>"
    colours = palette([*titles, *(cell.best for cell in found)])
    yield winners(found, colours)
    yield f"<h2>Over workers, at {8 * rate / 1e9:g} Gbit/s</h2>"
    yield curves(over_workers, titles, colours, lambda cell: cell.workers, "workers")
    yield f"<h2>Over bandwidth, {own} workers</h2>"
    yield curves(over_rates, titles, colours, lambda cell: 8 * cell.bytes_per_second / 1e9, "Gbit/s")
