"""Every rule of the package, constructed, and where it works: a new class joins all tests by being there."""

from dataclasses import MISSING, fields

import networkx as nx

from lightning_decentral.gossip import (
    BaseGraph,
    Combine,
    Complete,
    ConsensusControl,
    Every,
    ExactDiffusion,
    FromGraph,
    Gossip,
    LearningRatePower,
    LinearRate,
    OnePeerExponential,
    Outer,
    PeriodicAverage,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    Ring,
    Star,
    Topology,
    Tree,
)
from lightning_decentral.gossip.compute import combine as module
from tests.exported import concrete

# Heard by another number than it hears, and no weights that sum to one both ways.
IRREGULAR = FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 0), (0, 2), (1, 3)]))

PLANS: list[tuple[Topology, int]] = [
    (Ring(), 5),
    (Star(), 4),
    (OnePeerExponential(), 4),
    (BaseGraph(), 5),
    (RandomMatching(rounds=4), 5),
    (Every(2, Ring()), 4),
    (Every(2, Complete()), 3),
    (PeriodicAverage(3, Ring()), 4),
    (Tree(), 5),
    (Every(2, Tree(children=1)), 4),
    (IRREGULAR, 5),
]

# More than the class without arguments, and classes that need some.
Rule = Combine | ConsensusControl
INSTANCES: dict[type[Rule], list[Rule]] = {
    Gossip: [Gossip(), Gossip(rate=0.4), Gossip(rate=LinearRate(last=0.2, rounds=6)), Gossip(rate=LearningRatePower())],
    ExactDiffusion: [ExactDiffusion(), ExactDiffusion(rate=0.4, memory=0.3)],
    ConsensusControl: [
        ConsensusControl(target=0.3, probe=3),
        ConsensusControl(target=0.2, most=2, probe=1, lag=1, inner=PushSum()),
    ],
    Outer: [Outer(), Outer(lr=LearningRatePower(), momentum=LinearRate(first=0.2, last=0.6, rounds=6))],
    PseudoGradient: [PseudoGradient(), PseudoGradient(lr=LearningRatePower(rate=0.5), momentum=0.3)],
    QuasiGlobalMomentum: [QuasiGlobalMomentum(), QuasiGlobalMomentum(momentum=0.5, rate=0.3)],
}


def classes() -> list[type[Rule]]:
    """Concrete rules that the package offers."""
    return concrete(module, (Combine, ConsensusControl))


def instances() -> list[Rule]:
    return [rule for cls in classes() for rule in _instances(cls)]


def _instances(cls: type[Rule]) -> list[Rule]:
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    assert cls in INSTANCES or not needed, f"{cls.__name__} needs {needed}: add an instance to INSTANCES"
    return INSTANCES.get(cls) or [cls()]


def works(rule: Rule, topology: Topology, size: int, delay: int) -> bool:
    try:
        rule.check(topology, size, rule.weights, delay)
    except ValueError:
        return False
    return True


def covering(delays: tuple[int, ...]) -> list[tuple[Rule, Topology, int, int]]:
    """A part of `every_rule` for runs that cost more: every rule with every plan, the delays dealt out in turn."""
    found: list[tuple[Rule, Topology, int, int]] = []
    for number, rule in enumerate(instances()):
        for turn, (topology, size) in enumerate(PLANS):
            served = [delay for delay in delays if works(rule, topology, size, delay)]
            found += [(rule, topology, size, served[(number + turn) % len(served)])] if served else []
    return found


def every_rule(delays: tuple[int, ...]) -> list[tuple[Rule, Topology, int, int]]:
    """(rule, topology, size, delay), all that work together."""
    return [
        (rule, topology, size, delay)
        for rule in instances()
        for topology, size in PLANS
        for delay in delays
        if works(rule, topology, size, delay)
    ]
