"""Every rule, topology and codec of the package goes on in an elastic run, or is refused by name before training."""

from typing import Any

import pytest

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.gossip import (
    Auto,
    BFloat16,
    Codec,
    Complete,
    Elastic,
    ElasticGossipStrategy,
    Every,
    Float16,
    Float32,
    Gossip,
    GossipReplicas,
    GossipStrategy,
    Int8,
    MetropolisHastings,
    Outer,
    OuterNesterov,
    Plain,
    PseudoGradient,
    QuasiGlobalMomentum,
    RandomMatching,
    Ring,
    Stream,
    TopK,
)
from tests.gossip import codecs, rules, topologies

ELASTIC = Elastic(lobby="127.0.0.1:29400", workers=(2, 6))
RULES = {Gossip, Outer, OuterNesterov, QuasiGlobalMomentum, PseudoGradient}
CODECS = {Plain, Int8, BFloat16, Float16, Float32}
INELASTIC = {"FromGraph", "Hypercube"}  # for some numbers of workers only


def goes_on(name: str, **options: Any) -> bool:
    """Whether it does; a refusal has its name."""
    error = refusal(**options)
    if error:
        assert "elastic" in error
        assert name in error
    return not error


def refusal(**options: Any) -> str:
    try:
        made: Any = GossipStrategy(elastic=ELASTIC, **options)
    except ValueError as error:
        return str(error)
    assert type(made) is ElasticGossipStrategy
    assert {key: getattr(made, key) for key in options} == options
    return ""


@pytest.mark.parametrize("rule", rules.instances(), ids=str)
def test_rules(rule: Any) -> None:
    name = type(rule).__name__
    topologies = Every(2, RandomMatching(rounds=4)), Every(2, Complete())
    plans = [goes_on(name, combine=rule, topology=of, delay=d) for of in topologies for d in (0, 1, 2)]
    assert any(plans) == (type(rule) in RULES)


@pytest.mark.parametrize("codec", codecs.instances(), ids=str)
def test_codecs(codec: Any) -> None:
    assert goes_on(type(codec).__name__, codec=codec, combine=Gossip(rate=0.5)) == (type(codec) in CODECS)


@pytest.mark.parametrize("codec", codecs.instances(), ids=str)
def test_codecs_of_displacements(codec: Codec) -> None:
    """All that keep no estimates: what a codec loses stays in its sender's parameters."""
    options = {"combine": PseudoGradient(lr=1.0, momentum=0.0), "topology": Every(4, Complete())}
    assert goes_on(type(codec).__name__, codec=codec, **options) == (not codec.remembers)


def test_a_long_outer_step_of_a_codec_that_sends_in_parts_is_refused() -> None:
    options = {"combine": PseudoGradient(lr=0.7, momentum=0.9), "topology": Every(4, Complete()), "codec": TopK()}
    assert "rounds later: keep it to 1.5" in refusal(**options)


COMPLETE, PAIRS = Every(4, Complete()), Every(4, RandomMatching(rounds=4))


@pytest.mark.parametrize(
    ("rule", "topology", "commits"),
    [
        (OuterNesterov(), COMPLETE, True),
        (Outer(), COMPLETE, True),
        (PseudoGradient(), Stream(steps=4, parts=2, inner=Complete()), True),
        (Outer(), PAIRS, False),
        (Gossip(), COMPLETE, False),
    ],
    ids=str,
)
def test_outer_rounds_of_all_are_committed(rule: Any, topology: Any, commits: bool) -> None:
    made: Any = GossipStrategy(elastic=ELASTIC, combine=rule, topology=topology, delay=0)
    assert (made._committed is not None) is commits


def test_topologies() -> None:
    served = {
        type(topology).__name__
        for topology in topologies.instances()
        if goes_on("", topology=topology, weights=MetropolisHastings(), combine=Gossip(rate=0.3))
    }
    assert served == {cls.__name__ for cls in topologies.classes()} - INELASTIC


def test_weights_and_delays() -> None:
    assert goes_on("Gossip", combine=Gossip(rate=0.4), topology=Ring(), weights=MetropolisHastings(), delay=2)
    assert not goes_on("Gossip", topology=Ring(), delay=3)  # unstable for some number of workers


def test_numbers_that_suit_a_number_of_workers_are_asked_for() -> None:
    every = {"topology": Every(20, Auto()), "delay": 0}
    with pytest.raises(ValueError, match=r"Outer\(lr=None, momentum=0.5\) differs from the rule for.*give its numbers"):
        GossipStrategy(elastic=Elastic(lobby="127.0.0.1:1", workers=(2, 9)), combine=Outer(lr=None), **every)
    made: Any = GossipStrategy(elastic=ELASTIC, combine=Outer(momentum=None), **every)
    assert made.combine == Outer(momentum=None).placed(Every(20, Auto()), 6)


@pytest.mark.parametrize("rule", rules.instances(), ids=str)
def test_rules_of_pipelines(rule: Any) -> None:
    """The same ones, refused where the strategy is made."""
    topology = Every(2, RandomMatching(rounds=4))
    replicas = GossipReplicas(topology=topology, combine=rule, delay=0, elastic=ELASTIC)
    if goes_on(type(rule).__name__, combine=rule, topology=topology, delay=0):
        made: Any = TokenPipelineStrategy(stages=2, replicas=replicas)
        assert made.combine == rule.placed(topology, 6)
        assert made.elastic == ELASTIC
    else:
        with pytest.raises(ValueError, match=type(rule).__name__):
            TokenPipelineStrategy(stages=2, replicas=replicas)
