"""Every picture is on a page, and is drawn anew from the plans or copied from the results."""

import re
from pathlib import Path

import alive
import answers
import guides
import pictures

from tests.docs.pages import PAGES, ROOT

IMAGES = ROOT / "docs" / "images"
COPIED = {"convergence.png", "tutorial.png"}


def shown() -> set[str]:
    return {image for page in PAGES for image in re.findall(r"!\[[^]]+\]\(images/([^)]+)\)", page.read_text())}


def words(svg: Path) -> list[str]:
    """What is written in it: positions differ between versions of matplotlib."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def test_every_picture_is_shown() -> None:
    assert shown() == {path.name for path in IMAGES.iterdir()}


def test_pictures_are_drawn_as_they_are(tmp_path: Path) -> None:
    for script in (pictures, alive, guides, answers):
        script.draw(tmp_path)
    drawn = {path.name: words(path) for path in tmp_path.iterdir()}
    assert drawn == {name: words(IMAGES / name) for name in shown() - COPIED}
    assert all(len(text) > 10 for text in drawn.values())


GUIDES = "fabric gossip optimizers rules codecs islands elastic compressed partial-backprop token-pipeline"
ALSO = "spilled sweeps cluster waiting trust faults causal-models pytorch-lightning plan measured"


def test_every_guide_has_a_picture() -> None:
    bare = [page for page in f"{GUIDES} {ALSO}".split() if "](images/" not in (ROOT / f"docs/{page}.md").read_text()]
    assert not bare
