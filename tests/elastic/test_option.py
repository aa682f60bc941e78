"""The option `elastic`: a light value, which may be given by its name."""

import subprocess
import sys

import pytest

from lightning_decentral.elastic import Elastic, ElasticGossipStrategy
from lightning_decentral.gossip import GossipStrategy

LOADED = """
import sys
from lightning_decentral.elastic import Elastic
Elastic(lobby="127.0.0.1:29400")
print(sorted({"torch", "lightning", "pytorch_lightning"} & sys.modules.keys()))
"""


def test_who_only_writes_it_down_loads_neither_torch_nor_lightning() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_by_its_name_it_chooses_the_strategy_too() -> None:
    by_name: object = "elastic"
    made = GossipStrategy(elastic=by_name)  # type: ignore[arg-type]
    assert isinstance(made, ElasticGossipStrategy)
    assert isinstance(GossipStrategy(elastic=Elastic()), ElasticGossipStrategy)


def test_another_value_is_refused_with_the_name() -> None:
    number: object = 5
    with pytest.raises(ValueError, match=r"elastic must be an Elastic or None, got 5: use elastic"):
        GossipStrategy(elastic=number)  # type: ignore[arg-type]
