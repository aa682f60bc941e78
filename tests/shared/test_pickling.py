"""A spawned process gets the strategy pickled: every strategy, as it is constructed, survives that."""

import pickle

import pytest

from lightning_decentral import GossipStrategy, PartialBackpropStrategy, SpilledStrategy, TokenPipelineStrategy
from lightning_decentral.gossip import AllReduce, ConsensusControl, DifferenceCompression, Int8
from lightning_decentral.pipeline import Uniform


@pytest.mark.parametrize("strategy", [
    GossipStrategy(),
    GossipStrategy(combine=ConsensusControl(target=0.01), island=AllReduce(2)),
    GossipStrategy(codec=DifferenceCompression(Int8())),
    PartialBackpropStrategy(),
    TokenPipelineStrategy(slicing=Uniform(2)),
    SpilledStrategy(),
], ids=lambda strategy: type(strategy).__name__)  # fmt: skip
def test_a_strategy_is_pickled_whole(strategy: object) -> None:
    again = pickle.loads(pickle.dumps(strategy))
    assert vars(again).keys() == vars(strategy).keys()
    if isinstance(again, GossipStrategy):
        # Of itself, not of the one that was pickled.
        assert again.mean_model.mean_of.__self__ is again.health
        assert again.health._strategy is again
