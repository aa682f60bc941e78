"""Runs docs/tutorial.ipynb, and writes what it printed and drew into it and into docs/tutorial.md.

    python docs/scripts/tutorial.py            # runs it, prints what its cells print
    python docs/scripts/tutorial.py --write    # and keeps the outputs

Needs matplotlib, and no Jupyter: a cell is executed in one namespace, the figure that it leaves is its picture.
"""

import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from page import ROOT, Page

NOTEBOOK, PICTURE = ROOT / "docs" / "tutorial.ipynb", ROOT / "docs" / "images" / "tutorial.png"
PAGE = Page(ROOT / "docs" / "tutorial.md", "tutorial.py")


def read() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text())


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> None:
    """Executes all cells, and puts their outputs in the place of those that they had."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code(notebook), start=1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = printed.getvalue()
        cell["execution_count"] = number
        cell["outputs"] = [stream(text)] if text else []
        if plt.get_fignums():
            cell["outputs"].append(picture())


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def picture() -> dict[str, Any]:
    """The open figure as an output, closed."""
    drawn = io.BytesIO()
    plt.savefig(drawn, format="png", dpi=110, metadata={"Software": None})
    plt.close("all")
    shown = {"image/png": base64.b64encode(drawn.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "data": shown, "metadata": {}}


def outputs(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for cell in code(notebook) for one in cell["outputs"] if one["output_type"] == kind]


def printed(notebook: dict[str, Any]) -> list[str]:
    """Text of each cell that prints."""
    return ["".join(one["text"]) for one in outputs(notebook, "stream")]


def generated(notebook: dict[str, Any]) -> str:
    """Part of the page: the table that the last cell prints."""
    return f"```text\n{printed(notebook)[-1].rstrip()}\n```"


def image(notebook: dict[str, Any]) -> bytes:
    (drawn,) = outputs(notebook, "display_data")
    return base64.b64decode(drawn["data"]["image/png"])


def main() -> None:
    matplotlib.use("Agg")
    notebook = read()
    run(notebook)
    print("\n".join(printed(notebook)))
    if sys.argv[1:] == ["--write"]:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        PICTURE.write_bytes(image(notebook))
        Path(PAGE.file).write_text(PAGE.filled(generated(notebook)))


if __name__ == "__main__":
    main()
