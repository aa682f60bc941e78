"""A hook of mkdocs: what leads out of docs/ is a link in a checkout, and on the site a file's name."""

import posixpath
import re
from typing import Any

OUT = re.compile(r"\[([^]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[0] if path.startswith("docs/") else f"{link[1]} (`{path}`)"

    return OUT.sub(named, markdown)
