"""Who ran where and when, as a picture: one row per device, one colour per job. Needs matplotlib (extra `plot`)."""

from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_decentral.timeline import Span, makespan

INK = "#1b263b"


def job_of(name: str) -> str:
    """The job of a span: its name up to the last slash."""
    return name.rpartition("/")[0] or name


def draw(spans: Mapping[str, Span], path: str | Path, title: str = "", job: Callable[[str], str] = job_of) -> None:
    """A PNG (or what the suffix says) of the spans, in seconds since the first.

    Args:
        job: the colour and the line in the legend that a span belongs to, from its name.

    Raises:
        ModuleNotFoundError: no matplotlib.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # needs no display and leaves the user's pyplot state alone

    rows = sorted({span.worker for span in spans.values()})
    jobs = sorted(set(map(job, spans)))
    begin = min((span.start for span in spans.values()), default=0.0)
    figure = Figure(figsize=(9, 1.6 + 0.45 * len(rows) + 0.05 * len(jobs)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, one in enumerate(jobs):
        colour = colormaps["tab20"](index % 20)
        for label, row in enumerate(rows):
            bars = [
                (s.start - begin, s.finish - s.start) for n, s in spans.items() if job(n) == one and s.worker == row
            ]
            axes.broken_barh(bars, (label - 0.4, 0.8), facecolors=colour)
        axes.plot([], [], color=colour, linewidth=6, label=one)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, makespan(spans) or 1)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    if jobs:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
