"""The table of docs/against-the-papers.md, from `results/paper-*.json`; a test holds the page to it.

    python benchmarks/pages.py papers           # prints it
    python benchmarks/pages.py papers --write   # puts it between the page's markers

Computes nothing.
"""

import json
import re
import sys
from typing import Any

from common.paths import RESULTS, ROOT
from pages.choosing import markdown

PAGE = ROOT / "docs" / "against-the-papers.md"
BEGIN, END = "<!-- papers: begin -->", "<!-- papers: end -->"
HEADS = ("paper", "headline", "theirs", "ours", "ours / theirs", "how, command")
SHOWN = 4
"""Numbers of a row on the page; the JSON has all."""


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("paper-*.json"))]


def table() -> str:
    return markdown(HEADS, [_cells(found) for found in results()])


def _cells(found: dict[str, Any]) -> list[str]:
    labels = [one["label"] for one in found["theirs"][:SHOWN]]
    theirs, ours, ratios = ([one["value"] for one in found[key]] for key in ("theirs", "ours", "ratios"))
    more = f"; {len(theirs)} in all" if len(theirs) > SHOWN else ""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "".join(f"{r:.2f}" for r in ratios)
    return [
        f"{found['title']} ({found['paper']})",
        found["headline"],
        "; ".join(f"{label}: {value:g}" for label, value in zip(labels, theirs, strict=False)) + more,
        "; ".join(f"{value:g}" for value in ours[:SHOWN]),
        spread,
        f"{found['kind']}, `{found['command'].removeprefix('python ')}`",
    ]


def notes() -> str:
    """Return what each row assumes, leaves out and contradicts, as a list under the table."""
    lines = []
    for found in results():
        contradicts = f" **Contradicts:** {found['contradicts']}" if found["contradicts"] else ""
        assumed = " ".join(found["assumptions"])
        lines.append(f"- **{found['title']}.** {assumed} *Not compared:* {found['cannot_compare']}{contradicts}")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with table and notes between the markers."""
    made = f"{BEGIN}\n\n{table()}\n\n{notes()}\n\n{END}"
    text, number = re.subn(f"{BEGIN}.*{END}", lambda _: made, page, flags=re.DOTALL)
    assert number == 1, f"the page has {number} pairs of the markers {BEGIN}, {END}"
    return text


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(f"{table()}\n\n{notes()}")
