"""The running text of a page, as paragraphs and sentences."""

import re
from collections.abc import Iterator
from itertools import groupby

WORDS = 30
COLUMNS = 120


def outside_fences(page: str) -> Iterator[str]:
    """Lines, an empty one in the place of each block of code."""
    inside = False
    for line in page.splitlines():
        fence = line.lstrip().startswith("```")
        yield "" if inside or fence else line
        inside ^= fence


def is_text(line: str) -> bool:
    """No heading, row of a table, comment or picture."""
    return bool(line.strip()) and not line.lstrip().startswith(("#", "|", "<!--", "!["))


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and items of lists, each in one line."""
    marked = re.sub(r"^(\s*)(?:[-*]|\d+\.) ", r"\n\1", "\n".join(outside_fences(page)), flags=re.MULTILINE)
    for text, lines in groupby(marked.splitlines(), key=is_text):
        if text:
            yield " ".join(line.strip() for line in lines)


def plain(paragraph: str) -> str:
    """What is read: of a link its text; a span of code or a formula is one word, capital as it may begin a sentence."""
    return re.sub(r"\*\*|__", "", re.sub(r"\]\([^)]*\)|!?\[", "", re.sub(r"(`+|\$).+?\1", "Code", paragraph)))


def sentences(page: str) -> Iterator[str]:
    for paragraph in paragraphs(page):
        yield from re.split(r"(?<=[.!?])[)\"']* +(?=[\"'(]*[A-Z0-9])", plain(paragraph))


def long_sentences(page: str) -> list[str]:
    return [one for one in sentences(page) if len(re.findall(r"\w[^\s]*", one)) > WORDS]


def long_lines(page: str) -> list[str]:
    """Tables and code aside."""
    return [line for line in outside_fences(page) if len(line) > COLUMNS and not line.lstrip().startswith(("|", "!["))]
