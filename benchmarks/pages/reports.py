"""Reports of committed results as Markdown, each made from its JSON file.

    python benchmarks/pages.py reports                 # all, into build/reports
    python benchmarks/pages.py reports quality-2-cores loss-per-second-2-cores

Measures nothing.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from common.paths import RESULTS, ROOT

MADE_BY = {
    "cluster-accuracy": "network.accuracy",
    "cluster-speed": "network.speed",
    "convergence": "quality.convergence",
    "faults": "faults.table",
    "first-hour": "gpu.first_hour",
    "gpu": "gpu.report",
    "jigsaw": "sweep.jigsaw",
    "loss-per-second": "loss.tables",
    "loss-per-second-asleep": "loss.asleep_tables",
    "partial-accuracy": "partial.accuracy",
    "partial-cost": "partial.cost",
    "partial-memory": "partial.memory",
    "predicted": "network.predicted",
    "quality": "quality.against_ddp",
    "quality-codec": "quality.codec",
    "quality-rules": "quality.rules",
    "rehearsed": "rehearse.compared",
    "rehearsed-asleep": "rehearse.compared",
    "simulation": "rehearse.simulation",
    "small-models": "quality.small_models",
    "tuning": "loss.tuning",
}
"""The module whose `page` makes a report of the results that begin so; the longest beginning counts."""
WITHOUT = ("rehearsed-cost", "rehearsed-unsteady")


def maker(name: str) -> str | None:
    """The module that makes the report of these results, or None where there is no report."""
    found = [start for start in MADE_BY if name.startswith(f"{start}-")]
    return MADE_BY[max(found, key=len)] if found and not name.startswith(WITHOUT) else None


@cache
def report(name: str) -> str:
    """Markdown of `results/NAME.json`."""
    module = maker(name)
    if module is None:
        raise KeyError(f"there is no report of {name}: give one of {', '.join(names())}")
    page: Callable[[dict[str, Any]], str] = import_module(module).page
    return page({**json.loads((RESULTS / f"{name}.json").read_text()), "name": name})


def names() -> list[str]:
    """Return the names of results that have a report."""
    return [path.stem for path in sorted(RESULTS.glob("*.json")) if maker(path.stem)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of results; default: all that have a report")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "reports")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or names():
        path = options.folder / f"{name}.md"
        path.write_text(report(name))
        print(path)
