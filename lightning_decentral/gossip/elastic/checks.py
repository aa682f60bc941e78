"""What can be elastic: rules that keep nothing, topologies of any number of workers. Short: refusals alone."""

from collections.abc import Mapping
from typing import Any

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.elastic.elastic import Elastic
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.island import Solo
from lightning_decentral.shared.compute.codec.quantize import Plain

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "codec": (None, Plain()),
    "states": (None, {}),
    "island": (None, Solo()),
    "exact_steps": (0,),
}
"""{option of GossipStrategy: the values that it may have in an elastic run}"""
MOST_CHECKED = 64
"""Sizes for which a topology is checked before training, and the largest."""


def served(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that an elastic run has. ValueError for one that it can't have, by name."""
    for name, values in UNSERVED.items():
        if name in options and options[name] not in values:
            raise ValueError(f"{name}={options[name]!r} doesn't go with elastic yet: leave it out")
    return {name: value for name, value in options.items() if name not in UNSERVED}


def refuse_inelastic(topology: Topology, combine: Combine, weights: Weights, delay: int, elastic: Elastic) -> None:
    """ValueError for what workers can't leave, by name."""
    if type(combine) is not Gossip:
        raise ValueError(
            f"{type(combine).__name__} doesn't go with elastic: what it keeps belongs to all workers together, which "
            "none may leave; use Gossip()"
        )
    if len(topology.fragments) > 1:
        raise ValueError(f"{topology!r} doesn't go with elastic: its fragments have rounds of their own")
    most = elastic.workers[1]
    for size in sorted({*range(2, min(most, MOST_CHECKED) + 1), most} - {1}):
        try:
            combine.check(topology.placed(1), size, weights, delay)
        except ValueError as error:
            raise ValueError(f"elastic runs have any number of workers up to {most}, and of {size}: {error}") from None
