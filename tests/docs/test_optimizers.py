"""The table of optimizers: its words make the strategy and the optimizer of their row; all words of Muon are in it."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.docs.pages import PAGES, ROOT

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
TABLE = PAGE.partition("| what you train |")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
EXPERIMENTS = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
STRATEGIES = {
    "gossip": "GossipStrategy",
    "outer": "GossipStrategy",
    "any": "GossipStrategy",
    "ddp": "DDPStrategy",
    "compressed": "CompressedStrategy",
    "partial": "PartialBackpropStrategy",
    "spilled": "SpilledStrategy",
    "token": "TokenPipelineStrategy",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3])
def test_the_words_of_a_row_make_its_strategy_and_optimizer(row: list[str]) -> None:
    _, strategy, take, words = row
    (typed,) = re.findall(r"`([^`]+)`", words)
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", ["recipe=gpt", *typed.split()])
    named = re.match(r"`?(\w+)", strategy)
    assert named
    assert cfg.strategy._target_.endswith(f".{STRATEGIES[named[1]]}")
    assert f"`{cfg.optimizer._target_.rpartition('.')[2]}`" in take


def test_every_experiment_with_muon_is_in_the_table() -> None:
    with_muon = {e for e in EXPERIMENTS if "muon" in e} | {"muloco"}
    assert with_muon <= {word for row in ROWS for word in re.findall(r"experiment=(\w+)", row[3])}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_experiments_that_a_page_names_exist(page: Path) -> None:
    assert set(re.findall(r"experiment=(\w+)", page.read_text())) <= EXPERIMENTS | {"NAME"}
