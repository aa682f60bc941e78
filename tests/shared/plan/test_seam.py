"""An option chooses the class that a strategy is made of; the constructor's signature stays to be seen."""

import inspect

import pytest

from lightning_decentral.elastic import ElasticGossipStrategy
from lightning_decentral.gossip import Elastic, GossipReplicas, GossipStrategy, Ring
from lightning_decentral.pipeline import TokenPipelineStrategy
from lightning_decentral.shared.plan.seam import ChoosesStrategy, StrategyType


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
    with pytest.raises(ValueError, match=r"which is no .*test_seam\.Own: subclass ElasticGossipStrategy, and"):
        Own(elastic=Elastic())
    with pytest.raises(ValueError, match=r"another class than Given: .* or subclass ElasticGossip"):
        Given()
    with pytest.raises(ValueError, match="elastic must be an Elasticity or None"):
        GossipStrategy(elastic="10.0.0.1:29400")
    with pytest.raises(ValueError, match="exact_steps=5 doesn't go with elastic"):
        GossipStrategy(elastic=Elastic(), exact_steps=5)
    with pytest.raises(
        ValueError,
        match=r"elastic must be an Elasticity or None, got '10\.0\.0\.1:29400': use one of elastic",
    ):
        GossipReplicas(elastic="10.0.0.1:29400")  # type: ignore[arg-type]
