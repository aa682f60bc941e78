"""The table of the page "Against the papers", from `results/paper-*.json`; a test holds the page to it.

    python benchmarks/pages.py papers           # prints it
    python benchmarks/pages.py papers --write   # puts it between the page's markers, assumptions into papers.md

Computes nothing.
"""

import json
import re
import sys
from textwrap import fill
from typing import Any

from common.paths import RESULTS, ROOT
from pages.choosing import markdown

PAGE = ROOT / "docs" / "against-the-papers.md"
ASSUMED = ROOT / "benchmarks" / "papers.md"
BEGIN, END = "<!-- papers: begin -->", "<!-- papers: end -->"
HEADS = ("paper", "headline", "theirs, ours (ratio)", "how, command")
WIDTH = 118  # columns, of 120
SHOWN = 3
"""Numbers of a row on the page, the first of its JSON; that has all."""


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("paper-*.json"))]


def table() -> str:
    return markdown(HEADS, [_cells(found) for found in results()])


def _cells(found: dict[str, Any]) -> list[str]:
    rows = list(zip(*(found[key] for key in ("theirs", "ours", "ratios")), strict=True))
    shown = [f"{t['label']}: {t['value']:g}, {o['value']:g} ({r['value']:.2f})" for t, o, r in rows[:SHOWN]]
    more = [f"{len(rows) - SHOWN} more: {_spread(rows[SHOWN:])}"] if len(rows) > SHOWN else []
    return [
        f"{found['title']} ({found['paper']})",
        found["headline"],
        "<br>".join(shown + more),
        f"{found['kind']}, `{found['command'].removeprefix('python benchmarks/')}`",
    ]


def _spread(rows: list[Any]) -> str:
    ratios = [row[-1]["value"] for row in rows]
    return f"ratios {min(ratios):.2f} to {max(ratios):.2f}"


def contradictions() -> str:
    lines = [f"**{found['title']}.** {found['contradicts']}" for found in results() if found["contradicts"]]
    return "\n".join(f"- {wrapped(line)}" for line in lines)


def notes() -> str:
    """Return the page beside the results: what each row assumes, and what isn't compared."""
    blocks = []
    for found in results():
        lines = [*found["assumptions"], f"**Not compared.** {found['cannot_compare']}"]
        blocks.append("\n".join([f"## {found['title']}", "", *(f"- {wrapped(line)}" for line in lines)]))
    return "# Against the papers: what each row assumes\n\n" + "\n\n".join(blocks) + "\n"


def wrapped(text: str) -> str:
    return fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def made() -> str:
    """The part of the page between its markers."""
    return f"{table()}\n\n## Where ours contradicts the paper\n\n{contradictions()}"


def written(page: str) -> str:
    """The page with this part as it is now."""
    text, number = re.subn(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{made()}\n\n{END}", page, flags=re.DOTALL)
    assert number == 1, f"the page has {number} pairs of the markers {BEGIN}, {END}"
    return text


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
        ASSUMED.write_text(notes())
    else:
        print(made())
