"""Who hears whom at which step: ring, torus, hypercube, one-peer exponential, base graphs, random matchings.

A topology is a frozen value that knows no size: `sources(rank, size, step)`. `topology` says what one is; `static`
holds graphs that stay, `one_peer` those with one neighbour a step, `nodes` those that know the machines, `combined`
what wraps others. Public: all names below.
"""

from lightning_decentral.gossip.plan.topology.combined import Auto, Every, PeriodicAverage
from lightning_decentral.gossip.plan.topology.nodes import AlternatingExponentialRing
from lightning_decentral.gossip.plan.topology.one_peer import (
    BaseGraph,
    Hypercube,
    OnePeerExponential,
    OnePeerRing,
    RandomMatching,
)
from lightning_decentral.gossip.plan.topology.static import Complete, Exponential, FromGraph, Ring, Star, Torus, Tree
from lightning_decentral.gossip.plan.topology.topology import Topology

__all__ = [
    "AlternatingExponentialRing",
    "Auto",
    "BaseGraph",
    "Complete",
    "Every",
    "Exponential",
    "FromGraph",
    "Hypercube",
    "OnePeerExponential",
    "OnePeerRing",
    "PeriodicAverage",
    "RandomMatching",
    "Ring",
    "Star",
    "Topology",
    "Torus",
    "Tree",
]
