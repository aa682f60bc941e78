"""LAW: a loop with Fabric trains on devices, which are simulated, as on hosts, and goes on from what it saved there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_decentral.compressed import FabricCompressedStrategy
from lightning_decentral.gossip import FabricGossipStrategy, Int8
from lightning_decentral.partial import FabricPartialBackpropStrategy, Staircase
from tests.gossip.test_fabric import MOMENTUM
from tests.loops import Loop, run
from tests.simulated.trainers import SETTINGS, there

CASES = {
    "gossip": (FabricGossipStrategy, {"codec": Int8()}),
    "compressed": (FabricCompressedStrategy, {}),
    "partial": (FabricPartialBackpropStrategy, {"depth": Staircase(), "cuts": 2}),
}


def where(fabric: Fabric, model: nn.Module) -> str:
    """Its device, after the mean of the workers was there for a while."""
    if isinstance(fabric.strategy, FabricGossipStrategy):
        with fabric.strategy.mean():
            pass
    return str(next(model.parameters()).device)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), CASES.values(), ids=[*CASES])
def test_a_loop_is_that_of_the_host(strategy: Any, options: dict[str, Any], tmp_path: Path) -> None:
    loop: dict[str, Any] = {"norm": True, "accumulate": 2, "clip": 0.5, "optimizer": MOMENTUM, "look": where}
    there_too = there(strategy)(start_method="fork", **SETTINGS, **options)
    on_devices = run(tmp_path, there_too, Loop(**loop, save_at=3), size=2, name="devices", there=True)
    file = tmp_path / "devices" / "step.ckpt"
    gone_on = run(tmp_path, there_too, Loop(**loop, resume=file), size=2, name="resumed", there=True)
    on_hosts = run(tmp_path, strategy(start_method="fork", **options), Loop(**loop), size=2)
    assert {place for worker in on_devices for place in worker["seen"]} == {"cuda:0"}
    for found, rest, expected in zip(on_devices, gone_on, on_hosts, strict=True):
        torch.testing.assert_close(found["rows"], expected["rows"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rest["rows"], expected["rows"][3:], rtol=1e-5, atol=1e-6)
