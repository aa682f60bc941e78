"""The pages a reader sees, and the code blocks in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """What stands between fences, also in a tab, where it is indented."""
    fence = rf"^( *)```(?:{'|'.join(languages)})\b[^\n]*\n(.*?)^\1```"
    found = re.findall(fence, page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [dedent(code) if indent else code for indent, code in found]


def script(page: Path) -> str:
    """All Python blocks of the page in order, as one file: a reader who follows the page types them so."""
    return "\n".join(blocks(page, "python", "py"))


def promised(code: str) -> list[str]:
    """What the page says is printed: the comment behind each `print(...)`."""
    return re.findall(r"^\s*print\(.*\)  # (.+)$", code, flags=re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every shell line, comments dropped and continued lines joined."""
    for block in blocks(page, "bash", "sh", "shell", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words
