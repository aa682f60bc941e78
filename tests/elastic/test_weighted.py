"""LAW: workers with batches of several sizes, which all average, are one process with all of their examples."""

import os
from pathlib import Path

import pytest
import torch

from lightning_decentral.gossip import Elastic
from tests.elastic import weighted_training
from tests.elastic.weighted_training import BATCH, EPOCHS, EXAMPLES, WEIGHT, Net, data
from tests.standing_in import Launching


@pytest.mark.slow
def test_a_worker_counts_as_much_as_its_examples(tmp_path: Path) -> None:
    script = Launching(Path(weighted_training.__file__), (str(tmp_path),), {"PYTHONPATH": os.getcwd()})
    code, output = script.finish(90.0)
    assert code == 0, output[-4000:]
    light, heavy = (torch.load(tmp_path / f"w{number}.pt") for number in range(2))
    assert {len(places) for places in light["taken"]} == {BATCH}
    assert {len(places) for places in heavy["taken"]} == {WEIGHT * BATCH}
    steps = EXAMPLES // (BATCH * (1 + WEIGHT)) * EPOCHS
    assert len(light["taken"]) == len(heavy["taken"]) == steps
    together = [[*a, *b] for a, b in zip(light["taken"], heavy["taken"], strict=True)]
    for epoch in range(EPOCHS):
        of = together[epoch * steps // EPOCHS : (epoch + 1) * steps // EPOCHS]
        assert sorted(place for places in of for place in places) == [*range(EXAMPLES)]
    plain, (_, x, y) = Net(), data().tensors
    optimizer = plain.configure_optimizers()
    for places in together:
        optimizer.zero_grad()
        (plain.net(x[places]) - y[places]).square().mean().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        for worker in (light, heavy):
            assert torch.allclose(worker[name], value, atol=1e-12)
    assert light["rate"] == heavy["rate"] == 0.1


def test_no_worker_weighs_nothing() -> None:
    with pytest.raises(ValueError, match="weight must be at least 1, got 0"):
        Elastic(weight=0)
