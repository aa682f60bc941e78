"""What is made of the lines of a long elastic run (`elastic/aging.py`): what grew from its second quarter to its last.

Imports nothing that measures.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Row = dict[str, Any]
ALLOWED = {"memory": 1.05, "threads": 1.5, "descriptors": 1.5, "pace": 1.25, "given": 1.1, "joined": 1.5}
ALLOWED |= {f"lobby {name}": ALLOWED[name] for name in ("memory", "threads", "descriptors")}
"""Times the second quarter's median, that the last one's may be."""


def joined(row: Row, ages: dict[str, list[Row]]) -> Row:
    """Add the seconds until each newcomer's first step; those that were killed before have none."""
    firsts = [ages[name][0]["at"] for name in row["newcomers"] if ages.get(name)]
    return {**row, "joined": [first - row["at"] for first in firsts]}


def series(row: Row) -> dict[str, list[float]]:
    """Return the measured series by name, in their order."""
    spared, lobby = row["spared"], row["lobby"]
    paces = [(b["at"] - a["at"]) / (b["step"] - a["step"]) for a, b in pairwise(spared)]
    found = {name: [of[name] for of in spared] for name in ("memory", "threads", "descriptors")}
    found |= {f"lobby {name}": [of[name] for of in lobby] for name in ("memory", "threads", "descriptors")}
    waits = [seconds for of in row["faults"] for seconds in of["joined"] if of["kind"] == "one"]
    return {**found, "pace": paces, "given": [of["bytes"] for of in row["given"]], "joined": waits}


def compared(row: Row) -> dict[str, tuple[float, float]]:
    """{what: medians of the second quarter and the last one}"""
    return {name: medians(values) for name, values in series(row).items()}


def medians(values: Sequence[float]) -> tuple[float, float]:
    quarter = max(1, len(values) // 4)
    return statistics.median(values[quarter : 2 * quarter] or values), statistics.median(values[-quarter:])


def faults_of(row: Row) -> list[str]:
    """Return what isn't as it should be, a line each."""
    grown = [
        f"{name}: {early:.4g} in the second quarter, {late:.4g} in the last one"
        for name, (early, late) in compared(row).items()
        if late > ALLOWED[name] * early
    ]
    losses = [of["loss"] for of in row["spared"]]
    if not statistics.mean(losses[-5:]) < statistics.mean(losses[:2]) / 2:
        grown.append(f"the loss was {losses[0]:.4g} and is {losses[-1]:.4g}")
    grown += [f"{name} didn't end" for name in row["unended"]]
    return grown + [f"{name} ended by itself" for name in row["fallen"]]
