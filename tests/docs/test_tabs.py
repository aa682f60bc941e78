"""Where a thing has three spellings in tabs, its YAML and its words make what its Python makes."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import Strategy

from tests.docs.pages import PAGES, name

TAB = r'^=== "{}"\n\n    ```{}\n(.*?)^    ```'
PAIRED = [page for page in PAGES if '=== "YAML"' in page.read_text()]


def tab(page: Path, title: str, language: str) -> str:
    (found,) = re.findall(TAB.format(title, language), page.read_text(), re.MULTILINE | re.DOTALL)
    return dedent(found)


def composed(folder: Path, words: list[str]) -> Strategy:
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        return instantiate(compose("train", [*words, f"hydra.searchpath=[file://{folder}]"]).strategy, _convert_="all")


def shown(strategy: object) -> dict[str, str]:
    """Its options by their text."""
    names = ("topology", "delay", "combine", "codec", "depth", "cuts", "schedule", "microbatches", "activations")
    return {one: repr(getattr(strategy, one)) for one in names if hasattr(strategy, one)}


def test_pages_have_tabs() -> None:
    assert len(PAIRED) >= 5


@pytest.mark.parametrize("page", PAIRED, ids=name)
def test_the_yaml_makes_what_the_words_make(page: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "tab.yaml").write_text(f"# @package _global_\n{tab(page, 'YAML', 'yaml')}")
    by_yaml = composed(tmp_path, ["experiment=tab"])
    line = tab(page, "Command line", "bash").splitlines()[0]
    by_words = composed(tmp_path, line.removeprefix("python recipes/train.py ").split())
    assert type(by_yaml) is type(by_words)
    assert shown(by_yaml) == shown(by_words) != {}
