"""An island of several devices is one worker: it equals the simulation with one worker per island."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    AllReduce,
    Auto,
    BFloat16,
    Codec,
    Combine,
    Complete,
    DifferenceCompression,
    ExactDiffusion,
    FullyShard,
    Gossip,
    GradientTracking,
    Hypercube,
    Island,
    OnePeerExponential,
    Plain,
    PushSum,
    Ring,
    Solo,
    Star,
    Topology,
    simulate,
)
from lightning_decentral.shared.wire.fsdp import local
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS = 7


def fit_quadratic(folder: Path, size: int, options: dict[str, Any], trainer_options: dict[str, Any]) -> Tensor:
    """Train; returns what fork handed back."""
    module = Quadratic(dim=6)
    strategy = GossipStrategy(**{"start_method": "fork", **options})
    settings = {**QUIET, "max_steps": STEPS, **trainer_options}
    Trainer(**settings, devices=size, strategy=strategy, callbacks=[Record(folder)]).fit(module)
    return module.x.detach().clone()


def island_gradient(devices: int) -> Any:
    """The mean over the island's devices of Quadratic's gradients."""

    def gradient(x: Tensor, step: int) -> Tensor:
        rank = torch.arange(x.shape[0] * devices, dtype=x.dtype).view(x.shape[0], devices, 1)
        return ((1 + 0.1 * rank) * (x.unsqueeze(1) - rank - 0.3 * step)).mean(1)

    return gradient


def expected(
    size: int,
    island: Island,
    topology: Topology,
    delay: int,
    combine: Combine | None = None,
    codec: Codec | None = None,
) -> Tensor:
    """[steps, size, dim]: the simulation with one worker per island, repeated for each device."""
    workers = size // island.devices
    x0 = Quadratic(dim=6).x.detach().expand(workers, -1)
    gradient = island_gradient(island.devices)
    rows = simulate(topology, combine or Gossip(), gradient, x0, STEPS, 0.1, delay, codec=codec)
    return rows[1:].repeat_interleave(island.devices, dim=1)


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "island", "topology", "delay"), [
    (4, AllReduce(2), Auto(), 1),
    (4, AllReduce(2), Auto(), 0),
    (4, AllReduce(4), Auto(), 1),
    (4, AllReduce(1), Auto(2), 1),
    (6, AllReduce(3), OnePeerExponential(), 1),
    (8, AllReduce(2), OnePeerExponential(), 1),
    (8, AllReduce(2), Auto(2), 1),
    (4, FullyShard(2), Auto(), 1),
    (4, FullyShard(2), Auto(), 0),
    (4, FullyShard(4), Auto(), 1),
], ids=str)  # fmt: skip
def test_islands_equal_the_simulation_with_one_worker_each(
    tmp_path: Path, size: int, island: Island, topology: Topology, delay: int
) -> None:
    options = {"island": island, "topology": topology, "delay": delay}
    handed_back = in_processes(fit_quadratic, tmp_path, size, options, {}, seconds=90)
    rows = expected(size, island, topology, delay)
    torch.testing.assert_close(recorded(tmp_path, size), rows, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(handed_back, rows[-1].mean(0), rtol=1e-12, atol=1e-12)


MESSAGES: list[tuple[Combine, Codec, Topology, int]] = [
    (GradientTracking(), Plain(), Ring(), 1),
    (Gossip(rate=0.5), DifferenceCompression(BFloat16()), OnePeerExponential(), 1),
    (PushSum(), Plain(), Star(), 2),
    (ExactDiffusion(), Plain(), Ring(), 0),
    (Gossip(rate=0.5), BFloat16(), Ring(), 1),
    (PushSum(), BFloat16(), Star(), 1),
]


# Of shards all; of replicas a rule with a state, a codec with one, and a message that ends in exact numbers.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("island", "combine", "codec", "topology", "delay"),
    [(FullyShard(2), *of) for of in MESSAGES] + [(AllReduce(2), *of) for of in MESSAGES[:3]],
    ids=str,
)
def test_islands_equal_the_simulation_under_every_kind_of_message(
    tmp_path: Path, island: Island, combine: Combine, codec: Codec, topology: Topology, delay: int
) -> None:
    options = {"island": island, "topology": topology, "delay": delay, "combine": combine, "codec": codec}
    in_processes(fit_quadratic, tmp_path, 6, options, {}, seconds=90)
    rows = expected(6, island, topology, delay, combine, codec)
    torch.testing.assert_close(recorded(tmp_path, 6), rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AllReduce(0), "an island has at least 1 device, got 0: Solo"),
        (lambda: AllReduce(2, bucket_bytes=0), "bucket_bytes must be positive, got 0: "),
        (lambda: Solo(2), r"Solo is one device, got 2: use AllReduce\(2\)"),
        (
            lambda: AllReduce(3).workers(4, 4),
            r"AllReduce\(devices=3.* 4 devices into islands: give devices one of 1, 2, 4",
        ),
        (lambda: AllReduce(4).workers(12, 6), "across the border of nodes with 6 devices: give devices a divisor"),
    ],
)
def test_bad_islands_are_refused_with_the_remedy(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        (4, {"island": AllReduce(3)}, "doesn't divide 4 devices into islands: give devices one of 1, 2, 4"),
        (4, {"island": AllReduce(2), "topology": Complete(), "delay": 3}, r"use Gossip\(rate=0\.31\)"),
        (6, {"island": AllReduce(2), "topology": Hypercube()}, "Hypercube needs a power of two workers, got 3"),
    ],
    ids=str,
)
def test_bad_plans_of_islands_are_refused_before_a_process_starts(
    size: int, options: dict[str, Any], said: str, no_processes: None
) -> None:
    with pytest.raises(ValueError, match=said):
        Trainer(**QUIET, devices=size, strategy=GossipStrategy(**options)).fit(Quadratic())


@pytest.mark.parametrize(("devices", "per_node", "workers"), [(8, 4, 4), (8, 8, 4), (2, 1, 1), (8, 2, 4)])
def test_islands_of_two(devices: int, per_node: int, workers: int) -> None:
    assert AllReduce(2).workers(devices, per_node) == workers
    assert Solo().workers(devices, per_node) == devices


class Poison(Callback):
    """These devices of worker 1 hold NaN after the second update."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self._devices = devices

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank in self._devices:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    local(parameter).view(-1)[0] = torch.nan


def fit_poisoned(folder: Path, options: dict[str, Any], devices: tuple[int, ...]) -> None:
    strategy = GossipStrategy(start_method="fork", topology=Complete(), **options)
    callbacks = [Record(folder), Poison(devices)]
    Trainer(**QUIET, max_steps=30, devices=6, strategy=strategy, callbacks=callbacks).fit(Quadratic(dim=6))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("island", "devices", "combine"),
    [
        (AllReduce(2), (2, 3), Gossip()),
        (AllReduce(2), (3,), PushSum()),  # on one device alone, and a message that isn't split
        (FullyShard(2), (2,), Gossip()),
    ],
    ids=str,
)
def test_an_island_is_healed_as_one_worker(
    tmp_path: Path, island: Island, devices: tuple[int, ...], combine: Combine
) -> None:
    in_processes(fit_poisoned, tmp_path, {"island": island, "combine": combine}, devices)
    rows = recorded(tmp_path, 6)[-1]
    assert bool(rows.isfinite().all())
    assert torch.equal(rows[0::2], rows[1::2])  # the devices of each island
    assert float((rows - rows.mean(0)).abs().max()) < 1  # their minima are 5 apart
