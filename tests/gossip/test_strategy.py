"""`Trainer(strategy=GossipStrategy(...))` equals the simulation for every topology; bad options are refused."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Auto,
    BaseGraph,
    Codec,
    Combine,
    Complete,
    ConsensusControl,
    Every,
    ExactDiffusion,
    FromGraph,
    Gossip,
    GradientTracking,
    Hypercube,
    Int4,
    OnePeerExponential,
    Outer,
    OuterNesterov,
    PeriodicAverage,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    RelaySum,
    Ring,
    Star,
    TopK,
    Topology,
    Tree,
    Weights,
    simulate,
)
from tests.backends import trainer_backends
from tests.gossip.codecs import usable
from tests.gossip.rules import IRREGULAR
from tests.gossip.topologies import every_topology
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS = 9


def gradient(x: Tensor, step: int) -> Tensor:
    rank = torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)
    return (1 + 0.1 * rank) * (x - rank - 0.3 * step)


def fit_quadratic(folder: Path, size: int, options: dict[str, Any], trainer_options: dict[str, Any]) -> Tensor:
    """Train; returns what fork handed back."""
    module = Quadratic()
    strategy = GossipStrategy(start_method="fork", **options)
    settings = {**QUIET, "max_steps": STEPS, **trainer_options}
    Trainer(**settings, devices=size, strategy=strategy, callbacks=[Record(folder)]).fit(module)
    return module.x.detach().clone()


def expected(size: int, topology: Topology, rate: float, delay: int) -> Tensor:
    x0 = Quadratic().x.detach().expand(size, -1)
    # The one parameter is the first fragment's, where there are more.
    return simulate(topology.fragments[0], Gossip(rate=rate), gradient, x0, STEPS, 0.1, delay)


RULES = [
    (PushSum(), IRREGULAR, 5, 2),
    (QuasiGlobalMomentum(), Ring(), 4, 1),
    (ExactDiffusion(), Ring(), 4, 1),
    (GradientTracking(), OnePeerExponential(), 4, 0),
    (Gossip(), PeriodicAverage(3, Ring()), 4, 1),
    (PushSum(), PeriodicAverage(3, Ring()), 4, 2),
    (Outer(), Every(3, RandomMatching(rounds=3)), 4, 2),
    (OuterNesterov(), Every(3, Complete()), 4, 3),
    (RelaySum(), Tree(), 5, 1),
    (ConsensusControl(target=0.05, most=3, probe=4), Ring(), 4, 1),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "topology", "size", "delay"), RULES, ids=str)
def test_trainer_equals_simulation_for_every_rule(
    tmp_path: Path, rule: Combine, topology: Topology, size: int, delay: int
) -> None:
    options = {"topology": topology, "delay": delay, "combine": rule}
    handed_back = in_processes(fit_quadratic, tmp_path, size, options, {}, seconds=100)
    x0 = Quadratic().x.detach().expand(size, -1)
    trajectory = simulate(topology, rule, gradient, x0, STEPS, 0.1, delay)
    torch.testing.assert_close(recorded(tmp_path, size), trajectory[1:], rtol=1e-12, atol=1e-12)
    if rule in (Gossip(), ExactDiffusion(), GradientTracking()):  # those whose mean landing messages don't move
        landed = trajectory[-1].mean(0)
        torch.testing.assert_close(handed_back, landed, rtol=1e-12, atol=1e-12)


def test_push_sum_hands_back_the_mean_of_all_that_the_workers_have(tmp_path: Path) -> None:
    """(1/n) sum_i X_i at the end, messages that were under way included: x0 minus what all gradients added up to."""
    options = {"topology": IRREGULAR, "delay": 2, "combine": PushSum()}
    handed_back = in_processes(fit_quadratic, tmp_path, 5, options, {}, seconds=100)
    x = torch.cat([Quadratic().x.detach().expand(1, 5, -1), recorded(tmp_path, 5)])
    updates = torch.stack([0.1 * gradient(x[step], step) for step in range(STEPS)])
    torch.testing.assert_close(handed_back, x[0, 0] - updates.sum(0).mean(0), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(handed_back, x[-1].mean(0))


def fit_all(
    folder: Path, size: int, topologies: list[Topology], delay: int, rate: float, accelerator: str
) -> list[Tensor]:
    results = []
    for number, topology in enumerate(topologies):
        path = folder / str(number)
        path.mkdir()
        options = {"topology": topology, "delay": delay, "combine": Gossip(rate=rate)}
        results.append(fit_quadratic(path, size, options, {"accelerator": accelerator}))
    return results


# Dealt out in turn: every topology and every delay. All pairs of them are tested on the wire, in test_wire.
@pytest.mark.sampled
@trainer_backends
@pytest.mark.parametrize(("turn", "delay", "rate"), [(0, 0, 1.0), (1, 1, 1.0), (2, 2, 0.4)])
def test_trainer_equals_simulation_for_every_topology(
    tmp_path: Path, turn: int, delay: int, rate: float, accelerator: str
) -> None:
    size = 4 if accelerator == "cpu" else min(4, torch.cuda.device_count())
    topologies = [topology for topology, served in every_topology() if served == size][turn::3]
    assert len(topologies) >= 4
    results = in_processes(fit_all, tmp_path, size, topologies, delay, rate, accelerator, seconds=100)
    for number, (topology, handed_back) in enumerate(zip(topologies, results, strict=True)):
        trajectory = expected(size, topology, rate, delay)
        torch.testing.assert_close(recorded(tmp_path / str(number), size), trajectory[1:], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(handed_back, trajectory[-1].mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_trainer_equals_simulation_for_every_codec(tmp_path: Path, codec: Codec) -> None:
    """On a clique, too, where messages as they are would be all-reduced."""
    x0 = Quadratic().x.detach().expand(4, -1)
    rule = Gossip(rate=0.5)  # sparse codes of differences are refused at higher rates
    for topology in (Auto(), Complete()):
        options = {"topology": topology, "codec": codec, "combine": rule}
        in_processes(fit_quadratic, tmp_path, 4, options, {}, seconds=60)
        padded = torch.nn.functional.pad(x0, (0, 11))  # as in a bucket of float64, aligned to 128 bytes
        trajectory = simulate(topology, rule, quadratic, padded, STEPS, 0.1, codec=codec)[..., :5]
        torch.testing.assert_close(recorded(tmp_path, 4), trajectory[1:], rtol=1e-11, atol=1e-11)


def quadratic(x: Tensor, step: int) -> Tensor:
    """Zero where the bucket is padded."""
    return torch.nn.functional.pad(gradient(x, step)[:, :5], (0, x.shape[1] - 5))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "topology"), [(1, Auto()), (2, Auto()), (3, Ring()), (5, BaseGraph()), (3, Star())], ids=str
)
def test_other_sizes(tmp_path: Path, size: int, topology: Topology) -> None:
    in_processes(fit_quadratic, tmp_path, size, {"topology": topology}, {}, seconds=60)
    torch.testing.assert_close(recorded(tmp_path, size), expected(size, topology, 1.0, 1)[1:], rtol=1e-12, atol=1e-12)


def test_accumulation_exchanges_once_per_real_step(tmp_path: Path) -> None:
    """Gradients of k equal micro-batches average to the gradient of one, so the run is the one without accumulation."""
    in_processes(fit_quadratic, tmp_path, 4, {}, {"accumulate_grad_batches": 3}, seconds=60)
    measured = recorded(tmp_path, 4)[2::3]
    torch.testing.assert_close(measured, expected(4, Auto(), 1.0, 1)[1:], rtol=1e-12, atol=1e-12)


def test_clipping_is_over_the_whole_model_of_the_worker(tmp_path: Path) -> None:
    in_processes(fit_quadratic, tmp_path, 4, {}, {"gradient_clip_val": 0.5}, seconds=60)

    def clipped(x: Tensor, step: int) -> Tensor:
        g = gradient(x, step)
        return g * (0.5 / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)

    x0 = Quadratic().x.detach().expand(4, -1)
    trajectory = simulate(Auto(), Gossip(), clipped, x0, STEPS, 0.1)
    torch.testing.assert_close(recorded(tmp_path, 4), trajectory[1:], rtol=1e-12, atol=1e-12)


class Irregular(Quadratic):
    """Worker 0 runs a forward more in each step; a second parameter takes part in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.y = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x.sum() + self.y.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for _ in range(1 + (self.global_rank == 0)):
            self()
        loss = super().training_step(batch, batch_idx)
        return loss + self.global_rank * self.y.sum() if batch_idx % 2 else loss


def fit_irregular(folder: Path) -> None:
    strategy = GossipStrategy(start_method="fork", bucket_bytes=32)
    settings = {**QUIET, "max_steps": STEPS}
    Trainer(**settings, devices=4, strategy=strategy, callbacks=[Record(folder)]).fit(Irregular())


def test_extra_forwards_and_unused_parameters_change_nothing(tmp_path: Path) -> None:
    in_processes(fit_irregular, tmp_path)
    x, y = recorded(tmp_path, 4).split([5, 3], dim=2)
    torch.testing.assert_close(x, expected(4, Auto(), 1.0, 1)[1:], rtol=1e-12, atol=1e-12)
    rank = torch.arange(4.0, dtype=torch.float64).unsqueeze(1).expand(4, 3)
    start = torch.zeros(4, 3, dtype=torch.float64)
    used = simulate(Auto(), Gossip(), lambda _, step: rank * (step % 2), start, STEPS, 0.1)
    torch.testing.assert_close(y, used[1:], rtol=1e-12, atol=1e-12)


class Sieve(Weights):
    """Rows that sum to 0.9."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        return {j: 0.9 * w for j, w in topology.row(rank, size, step).items()}


@pytest.mark.sampled
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (4, {"topology": Complete(), "delay": 3}, r"must stay below 0\.618; use Gossip\(rate=0\.31\)"),
        (4, {"topology": Ring(), "combine": ExactDiffusion(rate=1.0)}, "ExactDiffusion at rate 1.0"),
        (5, {"topology": IRREGULAR}, r"the mean would drift: .* or combine=PushSum\(\)"),
        (4, {"topology": OnePeerExponential(), "combine": ExactDiffusion()}, "needs a symmetric mixing matrix"),
        (4, {"delay": -1}, "delay must be at least 0, got -1"),
        (2, {"evaluate": "best"}, "evaluate must be 'mean' or 'own', got 'best'"),
        (2, {"timeout": timedelta(0)}, "timeout must be positive, got 0:00:00"),
        (2, {"dely": 2}, "GossipStrategy has no option 'dely' .* it has .*, delay, "),
        (2, {"find_unused_parameters": True}, "no option 'find_unused_parameters' .there is no DDP wrapper"),
        (6, {"topology": Hypercube()}, "Hypercube needs a power of two.*got 6"),
        (4, {"topology": FromGraph(edges=[[0, 1], [2, 3]])}, r"never receive from|connected"),
        (2, {"weights": Sieve()}, "sum"),
        (2, {"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        (2, {"codec": TopK()}, r"TopK.* by itself would lose too much.*use DifferenceCompression.TopK"),
        (2, {"codec": Int4()}, r"Int4.* by itself would lose too much.*use DifferenceCompression.Int4"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line_before_a_process_starts(
    size: int, options: dict[str, Any], message: str, start_method: Any, no_processes: None
) -> None:
    def train() -> None:
        Trainer(**QUIET, devices=size, strategy=GossipStrategy(start_method=start_method, **options)).fit(Quadratic())

    with pytest.raises((ValueError, TypeError), match=message):
        train()


def test_long_delay_with_one_message_in_flight_is_accepted(tmp_path: Path) -> None:
    topology = Every(3, Auto())
    in_processes(fit_quadratic, tmp_path, 4, {"topology": topology, "delay": 3}, {}, seconds=60)
    torch.testing.assert_close(recorded(tmp_path, 4), expected(4, topology, 1.0, 3)[1:], rtol=1e-12, atol=1e-12)
