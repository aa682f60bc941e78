"""What disagreement is foretold to cost, against closed forms, brute force and what a rehearsal comes to."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import Complete, Every, Int8, Ring, Topology
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.planner.candidates import Candidate
from lightning_decentral.planner.rehearsal import rehearse
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.excess_loss import Drift, correlation, grown, probed
from lightning_decentral.planner.rehearsal.jobs import Foreknowledge, RehearsalJob
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.search import SearchCourse, search

SIZE, WORKERS, NOISE = 3000, 4, 0.5
RATE = 0.001
CURVATURES = torch.linspace(0.1, 3.0, SIZE)


class Bowl(LightningModule):
    """1/2 sum_k h_k x_k^2 + x . noise, of known curvatures h."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE))
        self.momentum = momentum

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0.5 * (CURVATURES * self.x.square()).sum() + (self.x * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=self.momentum)


def noise(rank: int) -> Iterator[Tensor]:
    chance = torch.Generator().manual_seed(rank)
    while True:
        yield NOISE * torch.randn(SIZE, generator=chance)


def evaluation() -> HeldOutEvaluation:
    return HeldOutEvaluation(Bowl(), [torch.zeros(SIZE)])


def trained(
    strategy: GossipStrategy, momentum: float = 0.0, rate: float = 1.0, steps: int = 100
) -> tuple[float, Drift]:
    """Excess and drift of the one of two alike crews that is left behind."""
    course = SearchCourse(steps, -1.0, evaluation(), lambda: None, probes=True)

    def make(times: float) -> Crew:
        return Crew(Bowl(momentum), noise, strategy, WORKERS, steps, loop=LoopSettings(rate=times))

    found = search(make, [rate, rate], course)
    assert found.early is not None
    excess, drift = found.early
    assert drift is not None
    assert {*found.learning_rates, drift.learning_rate} == {RATE * rate}
    assert len(found.learning_rates) == steps
    return excess, drift


def drift(**changed: float) -> Drift:
    return Drift(
        **{
            "variance": 1.0,
            "correlation": 0.0,
            "curvature": 2.0,
            "magnitude": 1.0,
            "learning_rate": 1.0,
            "rate": 1.0,
            **changed,
        }
    )


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.6, 0.95])
def test_growth_is_the_square_of_a_sum_and_tells_the_correlation(rho: float) -> None:
    brute = sum(rho ** abs(s - t) for s in range(8) for t in range(8))
    assert grown(rho, 8) == pytest.approx(brute)
    assert correlation(brute, 8) == pytest.approx(rho, abs=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.8])
@pytest.mark.parametrize("delay", [0, 1])
def test_the_spread_on_a_ring_is_the_closed_form(delay: int, rho: float) -> None:
    size = 6
    values = np.sort(np.linalg.eigvalsh(mixing_matrix(Ring(), size, 0)))[:-1]
    each = (1 + values * rho) / ((1 - values**2) * (1 - values * rho)) * (1 if delay else values**2)
    found = drift(correlation=rho).spread(GossipStrategy(topology=Ring(), delay=delay), size, 1)
    assert found == pytest.approx(each.sum() / size, rel=0.05)


def test_codes_of_parameters_keep_workers_apart() -> None:
    plain, coded = (
        drift(magnitude=1000.0).spread(GossipStrategy(topology=Ring(), **codec), WORKERS, 1)
        for codec in ({}, {"codec": Int8()})
    )
    assert coded > 2 * plain
    # Of blocks of 256 normal numbers the largest is about 2.8: an error of up to 1000 2.8 / 127, uniform.
    assert plain < coded < plain + (1000 * 4 / 127) ** 2


def test_local_steps_add_up() -> None:
    """Every 8 steps all are averaged: apart by 0, 1, ... 7 updates in turn, and the one that hasn't landed."""
    found = drift().spread(GossipStrategy(topology=Every(8, Complete()), delay=0), WORKERS, 1)
    assert found == pytest.approx((1 - 1 / WORKERS) * 3.5, rel=0.05)


@pytest.mark.sampled
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_probe_finds_noise_memory_and_curvature(momentum: float) -> None:
    found = trained(GossipStrategy(topology=Ring()), momentum)[1]
    assert found is not None
    assert found.variance == pytest.approx(RATE**2 * NOISE**2 * SIZE / (1 - momentum**2), rel=0.1)
    assert found.correlation == pytest.approx(momentum, abs=0.1)
    assert found.curvature == pytest.approx(float(CURVATURES.mean()), rel=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_comes_is_foretold(momentum: float) -> None:
    """1/2 tr(H C), and a method's rehearsal by another one's probe, at another learning rate."""
    first, other = GossipStrategy(topology=Ring()), GossipStrategy(topology=Ring(), delay=0)
    known = trained(first, momentum)[1]
    assert known is not None
    assert known.excess(first, WORKERS, 1, RATE) == pytest.approx(trained(first, momentum)[0], rel=0.15)
    assert known.excess(other, WORKERS, 1, 0.5 * RATE) == pytest.approx(trained(other, momentum, 0.5)[0], rel=0.15)
    if not momentum:
        values = np.sort(np.linalg.eigvalsh(mixing_matrix(Ring(), WORKERS, 0)))[:-1]
        exact = 0.5 * float(CURVATURES.sum()) * RATE**2 * NOISE**2 * (1 / (1 - values**2)).sum() / WORKERS
        assert known.excess(first, WORKERS, 1, RATE) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("steps", [1, 9, 300])
@pytest.mark.parametrize("topology", [Ring(), Every(8, Complete()), Every(50, Complete())], ids=str)
def test_the_end_of_a_schedule_is_that_of_its_own_steps(topology: Topology, steps: int) -> None:
    """Rates that fall to nothing, against the sum over all updates that were mixed since; 1 - W keeps no mean."""
    rates, mean = [1 - step / steps for step in range(steps)], torch.full((WORKERS, WORKERS), 1 / WORKERS)
    left, squares = torch.eye(WORKERS, dtype=torch.float64) - mean, 0.0
    for step in reversed(range(steps)):
        left = left @ torch.from_numpy(mixing_matrix(topology, WORKERS, step))
        squares += rates[step] ** 2 * float(left.square().sum()) / WORKERS
    found = drift().spread(GossipStrategy(topology=topology, delay=0), WORKERS, 1, rates)
    assert found == pytest.approx(squares, rel=0.1, abs=1e-9)


def test_nothing_is_foretold_where_losses_show_nothing() -> None:
    with Crew(Bowl(), lambda rank: noise(0), GossipStrategy(), 2, 2) as crew:  # the same batches for both
        crew.train(2)
        crew.release()
        assert probed(crew, evaluation(), 1.0) is None


class Asked:
    rates, per_node, module = (0.5, 1.0, 2.0), 1, object()

    def module_of(self, method: Candidate) -> object:
        return self.module


def job(words: str, workers: int = 4) -> RehearsalJob:
    return RehearsalJob(workers, Candidate(f"strategy=gossip {words}", words))


@pytest.mark.parametrize(
    ("words", "workers", "curvature", "came", "rates"),
    [
        ("strategy/topology=ring", 4, 1e-6, 0.0, (2.0,)),
        ("strategy/codec=int8", 4, 1e-6, 1e-6, (2.0,)),
        ("strategy/topology=ring", 4, 1e3, 0.0, Asked.rates),  # it costs something
        ("strategy/topology=ring", 4, 1e-6, 0.1, Asked.rates),  # the first method's cost more than was foretold
        ("strategy/topology=ring", 8, 1e-6, 0.0, Asked.rates),
        ("strategy/combine=exact_diffusion strategy.delay=0", 4, 1e-6, 0.0, Asked.rates),
    ],
)
def test_rates_are_tried_where_something_depends_on_it(
    words: str, workers: int, curvature: float, came: float, rates: tuple[float, ...]
) -> None:
    ask: Any = Asked()
    known = Foreknowledge(4, GossipStrategy(), ask.module, 2.0, 1.0, drift(curvature=curvature), came)
    assert known.rates(ask, job(words, workers)) == rates
    assert Foreknowledge(4, GossipStrategy(), ask.module, 2.0, 1.0, drift(), 0.0).rates(
        ask, RehearsalJob(4, Candidate("strategy=ddp", "ddp"))
    ) == (Asked.rates)


def test_a_rehearsal_says_what_it_foretold_and_tries_fewer_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.planner.rehearsal.jobs.NEGLIGIBLE", 1e9)  # a bowl's losses are nearly 0
    rows = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(0))
    data = [DataLoader(some, batch_size=1) for some in (rows, torch.zeros(2, SIZE))]
    heard: list[str] = []
    methods = ["strategy=gossip strategy/topology=ring", "strategy=gossip strategy/topology=complete"]
    found = rehearse(
        Bowl(), data[0], workers=[2], target=-1.0, methods=methods, steps=10, rates=(0.5, 1.0), seeds=1,
        validation=data[1], say=heard.append,
    )  # fmt: skip
    ring, complete = (next(row for row in found.rows if row.overrides == words) for words in methods)
    assert (ring.rates, complete.rates, complete.rate) == (2, 1, ring.rate)
    assert ring.excess_predicted is not None
    assert ring.excess_predicted == pytest.approx(complete.excess_predicted)  # of two workers both are pairs
    text = "\n".join(found.sentences())
    assert "excess loss of gossip's workers over their mean in the end: predicted up to" in text
    assert "taken for gossip strategy/topology=complete on 2 workers" in text
    assert any(f"learning rates times {ring.rate:g} only" in said for said in heard)
