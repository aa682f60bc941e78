"""Page of a rehearsal (HTML): losses over steps, seconds and bytes. Needs matplotlib (extra `plot`)."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from lightning_decentral.planner.rehearsal.answer import Answer, Reached
from lightning_decentral.planner.report import STYLE, line, new_axes, palette, svg, winners
from lightning_decentral.planner.show import shown_bytes

HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>rehearsal</title>'
HEADINGS = ("method", "workers", "rates times", "steps", "loss", "excess", "step", "to the target", "sent", "over ddp")
Across = Callable[[Reached], float | None]
"""Amount that a step adds to the horizontal axis; None: unknown."""
AXES: tuple[tuple[str, Across], ...] = (
    ("steps", lambda row: 1.0),
    ("seconds, forecast", lambda row: row.step_seconds),
    ("MB sent by all workers", lambda row: row.step_bytes / 1e6),
)


def page(found: Answer) -> str:
    """The table, and for each number of workers the curves.

    Raises:
        ValueError: no matplotlib.
    """
    return f"{HEAD}<style>{STYLE}</style>\n{chr(10).join(_body(found))}\n</html>\n"


def cells(found: Answer, row: Reached) -> list[str]:
    """Table cells of a row, under `HEADINGS`."""
    speedup, steps = found.speedup(row), f"{'~' * row.extrapolated}{row.steps}"
    known = row.seconds is not None and row.interval_seconds is not None
    low, high = row.interval_seconds or (0.0, 0.0)
    return [
        row.title,
        str(row.workers),
        f"{row.rate:g}",
        steps if row.steps else "not reached",
        f"{row.loss:.4f}",
        f"{row.excess:.4f}",
        "" if row.step_seconds is None else f"{1e3 * row.step_seconds:.1f} ms",
        f"{row.seconds:.1f} s ({low:.1f} to {high:.1f})" if known else "",
        "" if row.sent_bytes is None else shown_bytes(row.sent_bytes),
        "" if speedup is None else f"{speedup:.2f}x",
    ]


def title(found: Answer) -> str:
    return f"to a validation loss of {found.target:g} within {found.steps} steps"


def _body(found: Answer) -> Iterator[str]:
    yield f"<h1>Rehearsal {title(found)}</h1>"
    rows = "".join(line("td", cells(found, row), ' class="best"' * (row is found.best)) for row in found.rows)
    yield f"<table>{line('th', HEADINGS)}{rows}</table>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in found.sentences())
    colours = palette([row.title for row in found.rows])
    if found.cells:
        yield "<h2>Where each method is fastest</h2><p>Colour: what to train with; number: its speed-up over ddp.</p>"
        yield winners(found.cells, colours)
    for workers in found.workers:
        yield f"<h2>{workers} workers</h2><p>First seed, at each method's best learning rate, to the target or the end."
        rows_here = [row for row in found.rows if row.workers == workers]
        yield from (_curves(rows_here, colours, label, across, found.target) for label, across in AXES)


def _curves(rows: Sequence[Reached], colours: dict[str, str], label: str, across: Across, target: float) -> str:
    """Validation loss over this; nothing where no row knows it."""
    known = [(row, each) for row in rows if (each := across(row)) is not None]
    if not known:
        return ""
    figure, axes = new_axes(7, 3.2, label, "validation loss")
    for row, each in known:
        steps, losses = zip(*row.curve, strict=True)
        axes.plot([each * step for step in steps], losses, color=colours[row.title], marker=".", label=row.title)
    axes.axhline(target, color="#8d99ae", linestyle=":")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)
