"""The result of a rehearsal: steps to the target times the forecast seconds of a step, and the method to train with.

As values, sentences, a table, and a page (HTML): losses over steps, seconds and bytes. The page needs matplotlib (extra
`plot`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby, product
from math import inf
from operator import attrgetter

from lightning_decentral.planner.candidates import BASELINE, Candidate, in_full, is_ddp
from lightning_decentral.planner.compare import THRESHOLD, Cell, chosen
from lightning_decentral.planner.noise import noise_text
from lightning_decentral.planner.report import STYLE, line, new_axes, palette, svg, winners
from lightning_decentral.shared.plan.units import shown_bytes

OF_FORECAST = (0.94, 1.35)
"""Range, in forecast seconds, of nine in ten measured steps (benchmarks/rehearse.py compared)."""
BEYOND_ERROR = 0.11
"""Relative error of extrapolated numbers of steps, which nine in ten stayed below (from benchmarks/rehearse.py)."""
BEYOND = 1.5  # Numbers of steps are extrapolated up to this multiple of the rehearsed steps.


@dataclass(frozen=True)
class Reached:
    """Result of a method on a number of workers.

    Args:
        rate: factor of the learning rates.
        seeds: steps to the target for each seed; None where it was neither reached nor nearly reached.
        loss: loss on held-out batches at the end, mean of the seeds.
        step_seconds: forecast seconds of a step; None without a profile.
        step_bytes: bytes sent by all workers in a step.
        curve: (step, loss) of the first seed.
        extrapolated: whether a seed only came near the target, so that its steps are extrapolated.
        step_seconds_at: forecast seconds of a step, by bytes per second of a node's network card.
        noise: noise of the gradients, in batches of a worker, for methods whose workers stay equal.
        excess: mean loss of the workers' own models minus the loss of their mean, at the end.
        excess_predicted: excess predicted by a probe of the first gossip method (`excess_loss`), for gossip.
        rates: number of learning rates that were tried until time was over.
        given_rate: whether the best learning rate of the first gossip method was taken, so that no other was tried.
        trained: steps of the first seed: fewer than requested at the target, or when time was over.
    """

    title: str
    overrides: str
    workers: int
    rate: float
    seeds: tuple[int | None, ...]
    loss: float
    step_seconds: float | None
    step_bytes: float
    curve: tuple[tuple[float, float], ...] = ()
    extrapolated: bool = False
    step_seconds_at: Mapping[float, float] = field(default_factory=dict)
    noise: float | None = None
    excess: float = 0.0
    excess_predicted: float | None = None
    rates: int = 1
    given_rate: bool = False
    trained: int = 0

    def cut(self, steps: int, target: float) -> bool:
        """Return whether time was over before the first seed had `steps` steps or reached the target."""
        return 0 < self.trained < steps and all(loss > target for _, loss in self.curve)

    @property
    def steps(self) -> int | None:
        """Steps to the target, mean of the seeds; None where one of them didn't reach it."""
        known = [steps for steps in self.seeds if steps is not None]
        return round(sum(known) / len(known)) if known and len(known) == len(self.seeds) else None

    @property
    def seconds(self) -> float | None:
        """Seconds to the target; None where steps or seconds of a step are unknown."""
        return None if self.steps is None or self.step_seconds is None else self.steps * self.step_seconds

    @property
    def interval_seconds(self) -> tuple[float, float] | None:
        """Seconds of the fastest and the slowest seed, widened by the errors of forecasts and of extrapolated steps."""
        if self.steps is None or self.step_seconds is None:
            return None
        known = [steps * self.step_seconds for steps in self.seeds if steps is not None]
        (low, high), beyond = OF_FORECAST, BEYOND_ERROR * self.extrapolated
        return (low - beyond) * min(known), (high + beyond) * max(known)

    @property
    def sent_bytes(self) -> float | None:
        """Bytes sent by all workers, to the target."""
        return None if self.steps is None else self.steps * self.step_bytes


@dataclass(frozen=True)
class Answer:
    """Answer of a rehearsal: the results of all methods.

    Args:
        steps: most steps of each method.
        refused: {method on a number of workers: why it wasn't rehearsed}.
    """

    target: float
    steps: int
    rows: tuple[Reached, ...]
    refused: dict[str, str]

    @property
    def workers(self) -> list[int]:
        return sorted({row.workers for row in self.rows})

    def speedup(self, row: Reached) -> float | None:
        """Speed-up of a method over ddp on as many workers, by seconds to the target."""
        base = next((one for one in self.rows if one.overrides == BASELINE and one.workers == row.workers), None)
        return base.seconds / row.seconds if base and base.seconds and row.seconds else None

    def best_of(self, workers: int) -> Reached | None:
        """Best method on this number of workers: ddp if no method gains enough over ddp; None without seconds."""
        rows = [row for row in self.rows if row.workers == workers and row.seconds]
        pairs = [(Candidate(row.overrides, row.title), row.seconds or inf) for row in rows]
        found = chosen(pairs, THRESHOLD, forms=is_ddp) or min(pairs, key=lambda pair: pair[1], default=(None, inf))[0]
        return next((row for row in rows if found and row.overrides == found.overrides), None)

    @property
    def best(self) -> Reached | None:
        """Best method on the smallest number of workers that no larger number beats by enough."""
        found: Reached | None = None
        for workers in self.workers:
            here = self.best_of(workers)
            if here and (found is None or (1 + THRESHOLD) * (here.seconds or inf) <= (found.seconds or inf)):
                found = here
        return found

    @property
    def cells(self) -> list[Cell]:
        """Seconds to the target and best method, for each number of workers and each rate of the network cards."""
        found, rates = [], sorted({rate for row in self.rows for rate in row.step_seconds_at})
        for workers, rate in product(self.workers, rates):
            here = (row for row in self.rows if row.workers == workers)
            rows = tuple(replace(row, step_seconds=row.step_seconds_at.get(rate)) for row in here)
            seconds = {row.title: row.seconds for row in rows if row.seconds is not None}
            if best := replace(self, rows=rows).best_of(workers):
                found.append(Cell(workers, rate, seconds, best.title))
        return found

    def sentences(self) -> list[str]:
        """Conclusions as sentences; the last has the best method's overrides for a command line, if there is one."""
        lines = [f"not rehearsed: {title}: {why}" for title, why in self.refused.items()]
        if any(row.extrapolated for row in self.rows):
            lines.append(f"~ extrapolated, to {BEYOND:g} times the rehearsed steps at most, by a line over logarithms")
        for row in (row for row in self.rows if row.cut(self.steps, self.target)):
            lines.append(f"{row.title} on {row.workers} workers: {row.trained} of {self.steps} steps, as time was over")
        plain = (row for row in self.rows if row.overrides == BASELINE)
        lines += [noise_text(row.noise, row.workers) for row in plain if row.noise is not None][:1]
        lines += [*self._disagreement(), *self._over_rates()]
        best = self.best
        if best is None:
            return [*lines, f"no seconds to the target are known: {self._unknown()}"]
        for workers in (one for one in self.workers if not self.best_of(one)):
            most = max(row.trained for row in self.rows if row.workers == workers) or self.steps
            lines.append(f"on {workers} workers no method reached {self.target:g} in {most} steps")
        if more := [one for one in self.workers if one > best.workers and self.best_of(one)]:
            lines.append(f"more workers than {best.workers} don't pay: up to {more[-1]} gain less than {THRESHOLD:.0%}")
        choice = "stay with ddp" if best.overrides == BASELINE else f"train with {best.title}"
        where = f"{choice} on {best.workers} workers, learning rates times {best.rate:g}"
        where += ", by extrapolation" if best.extrapolated else ""
        return [*lines, where, " ".join(in_full(best.overrides))]

    def _unknown(self) -> str:
        """Return why there is no best method, as far as known."""
        if not self.rows:
            return "no method was rehearsed"
        if any(row.steps for row in self.rows):
            return "there is no profile"
        which = f"none of the {len(self.rows)} rehearsed" if self.refused else "no method"
        return f"{which} reached {self.target:g} in {max(row.trained for row in self.rows) or self.steps} steps"

    def _disagreement(self) -> list[str]:
        """Sentences on the excess loss of gossip's workers over their mean, predicted and measured."""
        known = [(row.excess_predicted, row.excess, row) for row in self.rows if row.excess_predicted is not None]
        if not known:
            return []
        columns = zip(*((before, came, abs(before - came)) for before, came, _ in known), strict=True)
        predicted, came, off = (max(0.0, *column) for column in columns)
        fewer = ", ".join(f"{row.title} on {row.workers} workers" for *_, row in known if row.given_rate)
        less = [f"so the learning rate of the first gossip method was taken for {fewer}"] if fewer else []
        what = f"excess loss of gossip's workers over their mean in the end: predicted up to {predicted:.4f}"
        return [f"{what}, measured up to {came:.4f}, the prediction at most {off:.4f} off", *less]

    def _over_rates(self) -> list[str]:
        """Methods to train with at other rates of the network cards, a line for each number of workers."""
        lines = []
        for workers in self.workers:
            here = [cell for cell in self.cells if cell.workers == workers]
            parts = []
            for best, same in groupby(here, attrgetter("best")):
                rates = [cell.bytes_per_second for cell in same]
                low, high = shown_rate(rates[0]), shown_rate(rates[-1])
                between = f"at {low}" if low == high else f"from {low} to {high}"
                last = rates[-1] == here[-1].bytes_per_second
                parts.append(f"{best} from {low} on" if last else f"{best} {between}")
            lines += [f"on {workers} workers, by the rate of a network card: {'; '.join(parts)}"] if parts else []
        return lines


def result_text(row: Reached) -> str:
    """Describe the result of a method as text, while other methods are still to be rehearsed."""
    noise = "" if row.noise is None or row.overrides != BASELINE else f"; {noise_text(row.noise, row.workers)}"
    if row.steps is None:
        return f"{row.loss:.4f} after {row.trained} steps, not at the target{noise}"
    about, seconds = "about " * row.extrapolated, "" if row.seconds is None else f", {row.seconds:.1f} s"
    return f"at the target after {about}{row.steps} steps{seconds}{noise}"


def shown_rate(bytes_per_second: float) -> str:
    megabits = 8 * bytes_per_second / 1e6
    return f"{megabits:g} Mbit/s" if megabits < 1000 else f"{megabits / 1000:g} Gbit/s"


HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>rehearsal</title>'
HEADINGS = ("method", "workers", "rates times", "steps", "loss", "excess", "step", "to the target", "sent", "over ddp")
Across = Callable[[Reached], float | None]  # Length of a step on the horizontal axis; None if unknown.
AXES: tuple[tuple[str, Across], ...] = (
    ("steps", lambda row: 1.0),
    ("seconds, forecast", lambda row: row.step_seconds),
    ("MB sent by all workers", lambda row: row.step_bytes / 1e6),
)


def page(found: Answer) -> str:
    """Make the page with the table and, for each number of workers, the curves. ValueError: no matplotlib."""
    return f"{HEAD}<style>{STYLE}</style>\n{chr(10).join(_body(found))}\n</html>\n"


def cells(found: Answer, row: Reached) -> list[str]:
    """Table cells of a row, under `HEADINGS`."""
    speedup, (low, high) = found.speedup(row), row.interval_seconds or (0.0, 0.0)
    return [
        row.title,
        str(row.workers),
        f"{row.rate:g}",
        f"{'~' * row.extrapolated}{row.steps}" if row.steps else f"not reached in {row.trained or found.steps}",
        f"{row.loss:.4f}",
        f"{row.excess:.4f}",
        "" if row.step_seconds is None else f"{1e3 * row.step_seconds:.1f} ms",
        "" if row.seconds is None else f"{row.seconds:.1f} s ({low:.1f} to {high:.1f})",
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
    """Curves of validation loss over this axis; empty where it is unknown for all rows."""
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
