"""What can be elastic: rules without sums over all workers, codecs that keep nothing, topologies of any number."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.elastic.elastic import Elastic
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.island import Island
from lightning_decentral.shared.compute.codec.codec import Codec

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "states": (None, {}),
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


def elastic_rule(
    combine: Combine | ConsensusControl, topology: Topology, weights: Weights, delay: int, elastic: Elastic
) -> Combine:
    """The rule, as any number of workers has it. ValueError for what workers can't leave, by name."""
    if reason := combine.tied():
        raise ValueError(f"{type(combine).__name__} doesn't go with elastic: {reason}; use Gossip()")
    assert isinstance(combine, Combine)
    if elastic.asynchronous is not None and (type(combine) is not Gossip or delay != 1):
        given = f"delay={delay}" if type(combine) is Gossip else repr(combine)
        raise ValueError(f"{given} doesn't go with asynchronous rounds, in which what has come is mixed: leave it out")
    if len(topology.fragments) > 1:
        raise ValueError(f"{topology!r} doesn't go with elastic: its fragments have rounds of their own")
    most, one = elastic.workers[1], topology.placed(1)
    try:
        placed = combine.placed(one, most)
        for size in sorted({*range(2, min(most, MOST_CHECKED) + 1), most} - {1}):
            if combine.placed(one, size) != placed:
                raise ValueError(f"{combine!r} would be another rule than of {most}: give its numbers")
            placed.check(one, size, weights, delay)
    except ValueError as error:
        raise ValueError(f"elastic runs have any number of workers up to {most}, and of {size}: {error}") from None
    return placed


def refuse_remembering(codec: Codec, combine: Combine) -> None:
    """ValueError for a codec of which both ends of a link must know what was said before."""
    if codec.remembers or not (codec.complete or combine.of_differences):
        raise ValueError(
            f"{codec!r} doesn't go with elastic: it sends differences from what a neighbour heard before, and "
            "neighbours change; use Int8() or BFloat16()"
        )


def refuse_process(island: Island, devices: int, device: torch.device) -> None:
    """ValueError for a Trainer that can't be one worker."""
    if devices != island.devices:
        raise ValueError(
            f"an elastic worker is {island!r}, this Trainer has {devices} devices: start a process with "
            f"Trainer(devices={island.devices}) for each worker, or give island=AllReduce({devices})"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"elastic runs train on CPUs and CUDA devices, not on {device}: give accelerator='cpu'")
