"""Constructors whose options choose their class, and files that commands are given: errors in one line."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_decentral.elastic import ElasticGossipStrategy
from lightning_decentral.gossip import Elastic, GossipReplicas, GossipStrategy, Ring
from lightning_decentral.pipeline import TokenPipelineStrategy
from lightning_decentral.planner.plan import host_links
from lightning_decentral.shared.plan import profile
from lightning_decentral.shared.plan.arguments import ChoosesStrategy, StrategyType, text_of
from lightning_decentral.sweep.plan.jobs_file import read_gangs, read_jobs, read_tables
from lightning_decentral.sweep.plan.traces import LAYOUTS, read_trace

READERS: dict[str, Callable[[Path], Any]] = {
    "profile": profile.read,
    "hosts": host_links.read,
    "trace": lambda path: read_trace(path, LAYOUTS["gavel"]),
    "jobs": read_jobs,
    "gangs": read_gangs,
    "tables": read_tables,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_what_is_no_utf_8_is_one_line_with_the_remedy(tmp_path: Path, reader: str, encoding: str) -> None:
    path = tmp_path / "given.csv"
    path.write_bytes("jobs: [{name: Größe, seconds: [1]}]".encode(encoding))
    with pytest.raises(ValueError, match=r"given\.csv is no UTF-8 text \(byte .*\): save it as UTF-8, or ") as error:
        READERS[reader](path)
    assert len(str(error.value).splitlines()) == 1


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_bytes("jobs: [{name: Größe, pieces: [1]}]".encode("utf-8-sig"))
    assert text_of(path, "give a file").startswith("jobs")
    assert [queue.name for queue in read_jobs(path).queues] == ["Größe"]


class Other(ChoosesStrategy):
    def strategy(self, cls: type) -> type:
        return Chosen


class Plain(metaclass=StrategyType):
    def __init__(self, *, option: object = None, number: int = 1) -> None:
        self.given = option, number


class Chosen(Plain):
    pass


def test_an_option_chooses() -> None:
    option = Other()
    assert type(Plain(number=3)) is Plain
    made = Plain(option=option, number=3)
    assert type(made) is Chosen
    assert made.given == (option, 3)
    assert list(inspect.signature(Plain).parameters) == ["option", "number"]


def test_gossip_and_pipelines_ask_it() -> None:
    made = GossipStrategy(elastic=Elastic(workers=(2, 3)), topology=Ring(), exact_steps=0)
    assert type(made) is ElasticGossipStrategy
    assert type(GossipStrategy()) is GossipStrategy
    pipeline = TokenPipelineStrategy(replicas=GossipReplicas(elastic=Elastic()))
    assert isinstance(pipeline, TokenPipelineStrategy)
    assert type(pipeline).__name__ == "ElasticTokenPipelineStrategy"
    assert "exact_steps" in inspect.signature(GossipStrategy).parameters


class Own(GossipStrategy):
    pass


class Given(GossipStrategy):
    def __init__(self) -> None:
        super().__init__(elastic=Elastic())


def test_what_it_cannot_serve_is_named() -> None:
    with pytest.raises(ValueError, match=r"which is no .*test_arguments\.Own: subclass ElasticGossipStrategy, and"):
        Own(elastic=Elastic())
    with pytest.raises(ValueError, match=r"another class than Given: .* or subclass ElasticGossip"):
        Given()
    with pytest.raises(ValueError, match="elastic must be an Elastic or None"):
        GossipStrategy(elastic="10.0.0.1:29400")
    with pytest.raises(
        ValueError, match=r"exact_steps=0\.1 is a share of the run, whose length depends on who takes part"
    ):
        GossipStrategy(elastic=Elastic(), exact_steps=0.1)
    with pytest.raises(
        ValueError,
        match=r"elastic must be an Elastic or None, got '10\.0\.0\.1:29400': use elastic",
    ):
        GossipReplicas(elastic="10.0.0.1:29400")  # type: ignore[arg-type]
