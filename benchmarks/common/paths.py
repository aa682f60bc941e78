"""Where the benchmarks, their results and the checkout are."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
ROOT, RESULTS = BENCHMARKS.parent, BENCHMARKS / "results"


def command(question: str, part: str) -> list[str]:
    """The command that runs a module of a folder as a process of its own."""
    return [sys.executable, str(BENCHMARKS / f"{question}.py"), part]
