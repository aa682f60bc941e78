"""A rehearsal in one process has the very bits of the run on processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import DifferenceCompression, ExactDiffusion, Hypercube, Int4, Ring
from lightning_decentral.gossip.rehearsal import rehearse
from tests.gossip.test_lightning import run, seen
from tests.tiny import Net, SizedBatches

STEPS = 6

OPTIONS: dict[str, dict[str, Any]] = {
    "blocking": {"topology": Ring(), "delay": 0},
    "overlapped": {"topology": Ring(), "delay": 1},
    "cliques of two": {"topology": Hypercube()},
    "codec": {"topology": Ring(), "codec": DifferenceCompression(Int4())},
    "corrected": {"topology": Ring(), "combine": ExactDiffusion(), "delay": 0},
}


def given(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[list[Tensor]]:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    return iter(list(SizedBatches(STEPS)))


def net() -> Net:
    return Net("adamw", scheduler=True, dropout=0.0)


@pytest.mark.parametrize("name", OPTIONS)
def test_rehearsal_equals_processes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    size = 4  # a ring of three is one group, which all-reduces: gloo adds in another order
    settings = {"max_steps": STEPS, "gradient_clip_val": 0.5}
    options = OPTIONS[name]
    run(tmp_path, net(), batches=SizedBatches(STEPS), options=options, trainer_options=settings, size=size)
    strategy = GossipStrategy(**options)
    rehearsed = rehearse(net(), lambda rank: given(monkeypatch, rank), strategy, size, STEPS, clip_norm=0.5)
    assert len({float(loss) for loss in rehearsed.losses[-1]}) == size  # the workers differ
    for real, module in zip(seen(tmp_path, size), rehearsed.modules, strict=True):
        for key, value in module.state_dict().items():
            assert torch.equal(real["own"][key], value), key


def test_three_that_all_reduce_are_equal_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not AdamW: a bias in front of BatchNorm has rounding for a gradient, which AdamW makes large.
    module, settings = Net("sgd", dropout=0.0), {"max_steps": STEPS}
    run(tmp_path, module, batches=SizedBatches(STEPS), options={"topology": Ring()}, trainer_options=settings)
    strategy = GossipStrategy(topology=Ring())
    rehearsed = rehearse(module, lambda rank: given(monkeypatch, rank), strategy, 3, STEPS)
    for real, module in zip(seen(tmp_path), rehearsed.modules, strict=True):
        torch.testing.assert_close(real["own"], dict(module.state_dict()), rtol=1e-4, atol=1e-6)


def test_the_module_and_the_random_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = net(), torch.get_rng_state()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    rehearse(module, lambda rank: given(monkeypatch, rank), GossipStrategy(), 2, 2)
    torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_short_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="worker 0 has 6 batches only"):
        rehearse(net(), lambda rank: given(monkeypatch, rank), GossipStrategy(), 2, STEPS + 1)
