"""Communication graphs by step: ring, torus, hypercube, one-peer exponential, base graphs, random matchings.

A topology is a frozen value that doesn't depend on the number of workers: `sources(rank, size, step)`. `topology` has
the interface and how to add a topology, `static` graphs that don't change, `one_peer` graphs with one or few
neighbours per step, `combined` topologies made of others. A new topology is named in two lists: below, and in
`gossip/__init__`. Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.gossip.plan.topology.combined import (
        AlternatingExponentialRing as AlternatingExponentialRing,
    )
    from lightning_decentral.gossip.plan.topology.combined import Auto as Auto
    from lightning_decentral.gossip.plan.topology.combined import Every as Every
    from lightning_decentral.gossip.plan.topology.combined import PeriodicAverage as PeriodicAverage
    from lightning_decentral.gossip.plan.topology.combined import Stream as Stream
    from lightning_decentral.gossip.plan.topology.one_peer import BaseGraph as BaseGraph
    from lightning_decentral.gossip.plan.topology.one_peer import Hypercube as Hypercube
    from lightning_decentral.gossip.plan.topology.one_peer import OnePeerExponential as OnePeerExponential
    from lightning_decentral.gossip.plan.topology.one_peer import OnePeerRing as OnePeerRing
    from lightning_decentral.gossip.plan.topology.one_peer import RandomMatching as RandomMatching
    from lightning_decentral.gossip.plan.topology.static import Complete as Complete
    from lightning_decentral.gossip.plan.topology.static import Exponential as Exponential
    from lightning_decentral.gossip.plan.topology.static import FromGraph as FromGraph
    from lightning_decentral.gossip.plan.topology.static import Ring as Ring
    from lightning_decentral.gossip.plan.topology.static import Star as Star
    from lightning_decentral.gossip.plan.topology.static import Torus as Torus
    from lightning_decentral.gossip.plan.topology.static import Tree as Tree
    from lightning_decentral.gossip.plan.topology.topology import Topology as Topology

__getattr__, __all__ = lazy_exports(__name__)
