"""Scripts of docs/examples that are a guide's own: its first block of Python as a file.

python docs/scripts/examples.py            # prints their names
python docs/scripts/examples.py --write    # writes them
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
EXAMPLES = DOCS / "examples"
PAGES = {
    "gossip": "gossip",
    "compressed": "compressed",
    "partial_backprop": "partial-backprop",
    "spilled": "spilled",
    "ray_train": "ray",
    "token_pipeline": "token-pipeline",
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    """What the file holds."""
    found = BLOCK.search((DOCS / f"{PAGES[name]}.md").read_text())
    assert found
    return f'"""The script of docs/{PAGES[name]}.md: `python docs/examples/{name}.py`."""\n\n{found[1]}'


if __name__ == "__main__":
    for name in PAGES:
        if sys.argv[1:] == ["--write"]:
            (EXAMPLES / f"{name}.py").write_text(text(name))
        else:
            print(f"{name}.py: the script of {PAGES[name]}.md")
