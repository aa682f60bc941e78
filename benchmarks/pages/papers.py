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
HEADS = ("paper; how, NAME", "headline", "theirs, ours (ratio)")
WIDTH = 118  # columns, of 120


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("paper-*.json"))]


def table() -> str:
    """Return a row for each paper: the first number of its JSON, and the spread of the other ratios."""
    return markdown(HEADS, [_cells(found) for found in results()])


def _cells(found: dict[str, Any]) -> list[str]:
    theirs, ours, ratio = (found[key][0] for key in ("theirs", "ours", "ratios"))
    shown = f"{_plain(theirs['label'])}: {theirs['value']:g}, {ours['value']:g} ({ratio['value']:.2f})"
    more = [one["value"] for one in found["ratios"][1:]]
    return [
        f"{found['title']} ({found['paper']})<br>{found['kind']}, `{found['command'].rpartition(' ')[2]}`",
        _plain(found["headline"]),
        f"{shown}<br>{len(more)} more: {_spread(more)}" if more else shown,
    ]


def _plain(text: str) -> str:
    """Without what stands in parentheses: `notes` has it."""
    return re.sub(r" \([^()]*\)", "", text)


def _spread(ratios: list[float]) -> str:
    least, most = (f"{end(ratios):.2f}" for end in (min, max))
    return f"({least})" if least == most else f"({least} to {most})"


def contradictions() -> str:
    """Return the first sentence of each, up to its semicolon; `notes` has all."""
    found = [(one["title"], re.split(r"(?<=[a-z0-9%)])[.;] ", one["contradicts"])[0].rstrip(".")) for one in results()]
    lines = [f"**{title}.** {first}." for title, first in found if first]
    return "\n".join(f"- {wrapped(line)}" for line in lines)


def notes() -> str:
    """Return the page in the folder of the results: what each row assumes, and what isn't compared."""
    blocks = []
    for found in results():
        lines = [f"**Headline.** {found['headline']}.", *found["assumptions"]]
        lines += [f"**Not compared.** {found['cannot_compare']}"]
        lines += [f"**Contradicts.** {found['contradicts']}"] if found["contradicts"] else []
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
