"""Hooks of mkdocs: formulas become MathML, names of the API link to their docstrings, links out of docs/ file names.

A checkout reads the same pages without them: GitHub renders `$...$` and ```math blocks, and follows links to files.
"""

import ast
import html
import posixpath
import re
from typing import Any

from api import FACES, imported, source

try:
    from latex2mathml.converter import convert
except ImportError:  # an environment without the extra `docs`: formulas stay TeX

    def convert(latex: str, display: str = "inline") -> str:
        return f"<code>{html.escape(latex)}</code>"


OUT = re.compile(r"\[([^]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
# A heading, a link, or a span of code that begins with a name: the first two are left alone.
SPAN = re.compile(r"^#+ .*$|\[[^]]*\]\([^)]*\)|(?<!`)`([A-Za-z_]\w*)(\([^`]*\))?`(?!`)", re.MULTILINE)


def on_config(config: Any, **_: Any) -> None:
    fence = {"name": "math", "class": "math", "format": block}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


def block(latex: str, *_: Any, **__: Any) -> str:
    """A block's MathML, in a frame that scrolls by itself. `align*` is what the converter calls `aligned`."""
    return f'<div class="math">{mathml(latex.replace("{aligned}", "{align*}"), display="block")}</div>'


def mathml(latex: str, display: str = "inline") -> str:
    """The converter leaves the backslash of an underscore in a name."""
    return convert(latex.strip(), display=display).replace(r"\_", "_")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[0] if path.startswith("docs/") else f"{link[1]} (`{path}`)"

    return linked(OUT.sub(named, markdown))


def on_page_content(content: str, **_: Any) -> str:
    return INLINE.sub(lambda found: mathml(html.unescape(found[1])), content)


def places() -> dict[str, list[str]]:
    """{public name: the modules to import it from}. Names that are words in lower case (`plan`) are commands, too."""
    found: dict[str, list[str]] = {}
    for module in (f"lightning_decentral.{face}" for face in FACES):
        for name, _, _ in imported(ast.parse(source(module).read_text())):
            if name != name.lower() or "_" in name:
                found.setdefault(name, []).append(module)
    return found


PLACES = places()


def linked(markdown: str) -> str:
    """A section's first mention of a name, in backticks, leads to its docstring; --strict finds those without one."""
    heading, seen = "", set[str]()

    def link(span: re.Match[str]) -> str:
        nonlocal heading
        name = span[1]
        if span[0].startswith("#"):
            heading = span[0]
            seen.clear()
        row = span.string[: span.start()].endswith("\n| ")  # what a table's row is about
        if name not in PLACES or (name in seen and not row):
            return span[0]
        seen.add(name)
        here = [module for module in PLACES[name] if f"`{module}`" in heading]  # in the API's tables
        return f"[{span[0]}][{(here or PLACES[name])[0]}.{name}]"

    # Odd parts are fences.
    return "".join(part if i % 2 else SPAN.sub(link, part) for i, part in enumerate(FENCED.split(markdown)))
