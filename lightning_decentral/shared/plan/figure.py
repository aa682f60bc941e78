"""Draws figures: the loss curves of a run, comparisons of runs; style of all figures. Needs the extra `plot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK = "#1b263b"
WORKER = "#8fb3d9"
ACCENT = "#d1495b"
LOSSES = ("train/loss", "train_loss", "loss")
VALIDATION_LOSSES = ("val/loss", "val_loss")
DISTANCE = "gossip/consensus_distance_relative"

Rows = Sequence[Mapping[str, float]]
Curve = tuple[list[float], list[float]]


def curve(rows: Rows, key: str) -> Curve:
    """Return the steps at which the key was logged, and its values."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def first_curve(rows: Rows, keys: Sequence[str]) -> Curve:
    """Return the curve of the first key that was logged; an empty curve if none was."""
    return next((curve(rows, key) for key in keys if any(key in row for row in rows)), ([], []))


def worker_keys(rows: Rows) -> list[str]:
    """Return those of the keys worker/0/loss, worker/1/loss, ... that were logged."""
    found = {key for row in rows for key in row if key.startswith("worker/") and key.endswith("/loss")}
    return sorted(found, key=lambda key: int(key.split("/")[1]))


def mean_curve(rows: Rows, keys: Sequence[str]) -> Curve:
    """Return the mean over the keys, at the steps where all were logged."""
    whole = [row for row in rows if all(key in row for key in keys)]
    return [row["step"] for row in whole], [sum(row[key] for key in keys) / len(keys) for row in whole]


def draw(rows: Rows, path: Path) -> None:
    """Draw losses over steps (each worker's, their mean, validation); below, the relative consensus distance if logged.
    ModuleNotFoundError: no matplotlib."""
    from matplotlib.figure import Figure  # needs no display and leaves the user's pyplot state alone

    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    steps, values = curve(rows, DISTANCE)
    percent = [100 * value for value in values]
    loss, *below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2]) if steps else [figure.subplots()]
    workers = worker_keys(rows)
    for index, key in enumerate(workers):
        label = f"each of {len(workers)} workers" if index == 0 else None
        loss.plot(*curve(rows, key), color=WORKER, linewidth=1, label=label)
    mean = mean_curve(rows, workers) if workers else first_curve(rows, LOSSES)
    loss.plot(*mean, color=INK, linewidth=2, label="mean of the workers" if workers else "training")
    validation = first_curve(rows, VALIDATION_LOSSES)
    loss.plot(*validation, color=ACCENT, linewidth=1.2, marker="o", markersize=3.5, label="validation")
    loss.set_ylabel("loss")
    loss.set_title("Loss", loc="left", fontsize=11, fontweight="bold", color=INK)
    loss.legend(frameon=False, fontsize=9)

    for distance in below:
        distance.plot(steps, percent, color=INK, linewidth=1.6, marker="o", markersize=3)
        distance.set_ylabel("% of the parameters' norm")
        title = "Distance of the workers from their mean"
        distance.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)

    for axes, shown in zip((loss, *below), ([*mean[1], *validation[1]], percent), strict=False):
        if shown and min(shown) > 0:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e8ee", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=9)
    (loss, *below)[-1].set_xlabel("step")
    figure.savefig(path)


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure that needs no display. ValueError: no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("pictures need matplotlib: pip install 'lightning-decentral[plot]'") from None
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


COLOURS = (INK, ACCENT, "#2a9d8f", "#e9a23b", "#8fb3d9", "#7b5ea7", "#7f8c8d")


def compare(panels: Mapping[str, Mapping[str, Curve]], loss: str, path: Path) -> None:
    """Draw one panel per axis, {axis: {run: (x, losses)}}; each run has one colour in all of them. ValueError: no
    matplotlib."""
    figure = new_figure(12, 4)
    names = list(next(iter(panels.values())))
    for axes, (axis, runs) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for name, (x, y) in runs.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=3, label=name)
        if not runs:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="grey")
        if all(min(y) > 0 for _, y in runs.values()):
            axes.set_yscale("log")
        axes.set_xlabel(axis)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e8ee", linewidth=0.8)
    figure.axes[0].set_ylabel(loss)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)
