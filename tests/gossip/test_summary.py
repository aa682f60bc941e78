"""What the start says of a worker with NaN is what becomes of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_decentral.gossip import (
    AllReduce,
    Complete,
    Every,
    ExactDiffusion,
    Exponential,
    Gossip,
    GradientTracking,
    OuterNesterov,
    PseudoGradient,
    PushSum,
    RelaySum,
    Ring,
    Solo,
    Tree,
)
from lightning_decentral.gossip.summary import healing


class Keeping(Gossip):
    """Somebody's own rule with a state."""

    def init(self, x: Any) -> Any:
        return {"memory": x}


def plan(combine: Any, topology: Any, *, heals: int = 3, able: bool = True, island: Any = None) -> Any:
    member = SimpleNamespace(heals=able)
    given = {"combine": combine, "topology": topology, "heals": heals, "member": member, "island": island or Solo()}
    return SimpleNamespace(workers=4, weights=combine.weights, **given)


@pytest.mark.parametrize(
    ("combine", "topology"),
    [
        (Gossip(), Ring()),
        (PushSum(), Exponential()),
        (ExactDiffusion(), Ring()),
        (GradientTracking(), Ring()),
        (OuterNesterov(), Every(4, Complete())),
        (PseudoGradient(), Every(4, Complete())),
        (RelaySum(), Tree()),
        (GradientTracking(), Exponential()),
    ],
    ids=str,
)
def test_a_worker_heals_under_these(combine: Any, topology: Any) -> None:
    assert healing(plan(combine, topology)) == "takes its neighbours' parameters, 3 times at most"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (plan(Keeping(), Ring()), "it keeps memory, which no neighbour could give"),
        (plan(Gossip(), Ring(), heals=0), "heals=0"),
        (plan(Gossip(), Ring(), able=False, island=AllReduce(2)), "under NCCL the devices of AllReduce"),
    ],
    ids=lambda given: "" if isinstance(given, str) else f"{given.combine}, {given.heals}",
)
def test_training_ends_under_these(given: Any, reason: str) -> None:
    assert healing(given).startswith(f"ends the training: {reason}")
