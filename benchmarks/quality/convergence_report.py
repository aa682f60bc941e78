"""The results of `quality/convergence.py` as tables and as a picture; only what has run."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from quality.convergence_methods import Method

Key = Callable[[Method, str, float], str]
Results = Mapping[str, Any]

NAMES = {"constant": "constant learning rate", "falling": "a tenth of it in the last fifth"}
COLOURS = ("tab:green", "tab:orange", "tab:red")


def text(
    results: Results, methods: Sequence[Method], schedules: Sequence[str], alphas: Sequence[float], key: Key
) -> str:
    """Markdown: accuracies, then what was tuned."""
    cells = results["cells"]
    about = ", ".join(f"{name} {value}" for name, value in results["hardware"].items())
    seconds = sum(c["cpu_seconds"] for c in cells.values())
    skews = {alpha: [c["skew"] for name, c in cells.items() if name.endswith(f"alpha {alpha:g}")] for alpha in alphas}
    seen = ", ".join(f"{statistics.mean(found):.2f} (alpha {alpha:g})" for alpha, found in skews.items() if found)
    parts = [
        f"`python benchmarks/quality.py convergence`: {about}; {seconds / 60:.0f} CPU minutes.",
        f"Mean total variation between a worker's classes and all classes: {seen}.",
        "Test accuracy in percent of the worst of 16 workers, mean ± deviation over three seeds. "
        "`sends`: what a worker sends per step, in copies of its parameters.",
        _table(cells, methods, schedules, alphas, key, _accuracy),
        "Tuned learning rate / momentum of the same cells. Grid: "
        + ", ".join(f"{s['learning_rate']:g} / {s['momentum']:g}" for s in results["grid"])
        + ".",
        _table(cells, methods, schedules, alphas, key, lambda c: f"{c['learning_rate']:g} / {c['momentum']:g}"),
        "Test accuracy in percent of the mean of the 16 models, same cells.",
        _table(cells, methods, schedules, alphas, key, lambda c: f"{100 * statistics.mean(c['mean_model']):.1f}"),
    ]
    return "\n\n".join(parts) + "\n"


def _accuracy(found: Results) -> str:
    return f"{100 * statistics.mean(found['worst']):.1f} ± {100 * statistics.stdev(found['worst']):.1f}"


def _table(
    cells: Results,
    methods: Sequence[Method],
    schedules: Sequence[str],
    alphas: Sequence[float],
    key: Key,
    show: Callable[[Results], str],
) -> str:
    columns = [(schedule, alpha) for schedule in schedules for alpha in alphas]
    titles = ["rule", "graph", "delay", "sends", *(f"{schedule}, alpha {alpha:g}" for schedule, alpha in columns)]
    rows = [titles, ["---"] * len(titles)]
    for method in methods:
        found = [cells.get(key(method, *column)) for column in columns]
        if any(found):
            about = [method.rule, method.graph, str(method.delay), f"{method.copies_sent:.3g}"]
            rows.append([*about, *(show(c) if c else "" for c in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(
    results: Results,
    methods: Sequence[Method],
    schedules: Sequence[str],
    alphas: Sequence[float],
    key: Key,
    path: Path,
) -> None:
    """A panel for each schedule, a line for each method, a dot for each alpha with the seeds' range."""
    cells = results["cells"]
    shown = [m for m in methods if any(key(m, s, a) in cells for s in schedules for a in alphas)]
    figure, panels = pyplot.subplots(1, len(schedules), figsize=(13, 1 + 0.24 * len(shown)), sharey=True)
    for panel, schedule in zip(panels, schedules, strict=True):
        for alpha, colour in zip(alphas, COLOURS, strict=True):
            found = {y: cells.get(key(m, schedule, alpha)) for y, m in enumerate(shown)}
            present = {y: [100 * v for v in c["worst"]] for y, c in found.items() if c}
            lowest, highest, middle = ([of(v) for v in present.values()] for of in (min, max, statistics.mean))
            panel.hlines(list(present), lowest, highest, colour, alpha=0.4)
            panel.plot(middle, list(present), "o", color=colour, label=f"alpha {alpha:g}")
        panel.set(title=NAMES[schedule], xlabel="test accuracy of the worst of 16 workers, %", xlim=(0, 100))
        panel.grid(axis="both", alpha=0.3)
    panels[0].set_yticks(range(len(shown)), [f"{m.rule}, {m.graph}, delay {m.delay}" for m in shown], fontsize=8)
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
