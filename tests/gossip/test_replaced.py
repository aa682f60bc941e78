"""Optimizers, groups and modules that are replaced while training: workers go on mixing what is trained now."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Combine,
    Complete,
    Every,
    ExactDiffusion,
    Gossip,
    GradientTracking,
    OnePeerExponential,
    OuterNesterov,
    PushSum,
    QuasiGlobalMomentum,
    RelaySum,
    Ring,
    Topology,
    Travel,
    Tree,
    simulate,
)
from tests.crew import crew
from tests.gossip.rules import IRREGULAR
from tests.gossip.test_strategy import gradient
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS, EVENT = 9, 4


class Event(Quadratic):
    """Something is replaced before update `EVENT`, by `how(module)`."""

    def __init__(self, how: Callable[[Any], None]) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == EVENT:
            self.how(self)


def by_set_up(module: Event) -> None:
    module.trainer.strategy.setup_optimizers(module.trainer)


def by_trainer(module: Event) -> None:
    module.trainer.optimizers = [module.configure_optimizers()]


def by_groups(module: Event) -> None:
    """In other groups, with a parameter more."""
    module.other = nn.Parameter(torch.full((2,), float(module.global_rank), dtype=torch.float64))
    module.trainer.strategy.optimizers = [SGD([{"params": [module.other]}, {"params": [module.x]}], lr=0.1)]


def fit(folder: Path, size: int, options: dict[str, Any], module: LightningModule, steps: int = STEPS) -> Any:
    strategy = GossipStrategy(start_method="fork", **options)
    callbacks = [Record(folder)] if steps == STEPS else []  # it wants the same number of parameters all the time
    Trainer(**QUIET, max_steps=steps, devices=size, strategy=strategy, callbacks=callbacks).fit(module)
    return [p.detach().clone() for p in module.parameters()]


RULES = [
    (Gossip(), Ring(), 4, 1, by_set_up),
    (PushSum(), IRREGULAR, 5, 2, by_trainer),
    (QuasiGlobalMomentum(), Ring(), 4, 1, by_set_up),
    (ExactDiffusion(), Ring(), 4, 1, by_trainer),
    (GradientTracking(), OnePeerExponential(), 4, 0, by_set_up),
    (OuterNesterov(), Every(3, Complete()), 4, 3, by_set_up),
    (RelaySum(), Tree(), 5, 1, by_trainer),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "topology", "size", "delay", "how"), RULES)
def test_another_optimizer_of_the_same_parameters_goes_on(
    tmp_path: Path, rule: Combine, topology: Topology, size: int, delay: int, how: Any
) -> None:
    """SGD keeps nothing, so the run is the simulation of one that never had another optimizer."""
    in_processes(fit, tmp_path, size, {"topology": topology, "delay": delay, "combine": rule}, Event(how), seconds=100)
    x0 = Quadratic().x.detach().expand(size, -1)
    trajectory = simulate(topology, rule, gradient, x0, STEPS, 0.1, delay)
    torch.testing.assert_close(recorded(tmp_path, size), trajectory[1:], rtol=1e-12, atol=1e-12)


def test_with_a_parameter_more_in_other_groups_the_first_ones_go_on(tmp_path: Path) -> None:
    end = in_processes(fit, tmp_path, 2, {"topology": Complete(), "delay": 0}, Event(by_groups), 5)
    trajectory = simulate(Complete(), Gossip(), gradient, Quadratic().x.detach().expand(2, -1), 5, 0.1, 0)
    torch.testing.assert_close(end[0], trajectory[-1].mean(0), rtol=1e-12, atol=1e-12)


class Head(LightningModule):
    """A head is replaced, with a new optimizer; every worker draws another one. No gradient afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.calm = False
        self.seen: dict[str, Tensor] = {}

    def replace(self) -> None:
        self.head = nn.Linear(3, 2).double()
        self.trainer.strategy.optimizers = [self.configure_optimizers()]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(100 * self.global_rank + batch_idx)
        if batch_idx == EVENT:
            self.seen["before"] = self.body.weight.detach().clone()
            self.replace()
            self.calm = True
            self.seen["head"] = self.head.weight.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.head(self.body(torch.randn(4, 3).double())).square().mean()
        return loss * (not self.calm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    train_dataloader = Quadratic.train_dataloader


class Inside(Head):
    """The same optimizer loses the old head and gets the new one."""

    def replace(self) -> None:
        (optimizer,) = self.trainer.optimizers
        self.head = nn.Linear(3, 2).double()
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": list(self.head.parameters())})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD([{"params": part.parameters()} for part in (self.body, self.head)], lr=0.1)


class Renewed(Head):
    """Its weights become another two parameters, by torch's own reparametrization."""

    def replace(self) -> None:
        nn.utils.parametrizations.weight_norm(self.body)
        self.trainer.strategy.setup_optimizers(self.trainer)


def fit_head(folder: Path, size: int, options: dict[str, Any], module: Head, steps: int) -> None:
    strategy = GossipStrategy(start_method="fork", **options)
    trainer = Trainer(**QUIET, max_steps=steps, devices=size, strategy=strategy)

    def note(*_: Any) -> None:
        now = [p.detach().clone() for p in module.parameters()]
        torch.save((module.seen, now, strategy.rounds(), len(strategy.buckets)), folder / f"{trainer.global_rank}.pt")

    module.on_train_batch_end = note  # type: ignore[method-assign]
    trainer.fit(module)


@pytest.mark.sampled
@pytest.mark.parametrize("made", [Head, Inside, Renewed])
@pytest.mark.parametrize("options", [
    {"topology": Complete(), "delay": 0}, {"topology": Complete(), "delay": 1, "states": {"momentum_buffer": Travel()}},
    {"topology": IRREGULAR, "delay": 2, "combine": PushSum()},
    {"topology": Every(2, Complete()), "delay": 1, "combine": OuterNesterov()},
], ids=["blocking", "state", "push-sum", "anchors"])  # fmt: skip
def test_workers_meet_over_what_a_new_module_has(tmp_path: Path, made: type[Head], options: dict[str, Any]) -> None:
    if made is Inside:
        options = {key: value for key, value in options.items() if key != "states"}
    size = 5 if options["topology"] is IRREGULAR else 3
    steps = EVENT + (40 if options["topology"] is IRREGULAR else 7)
    in_processes(fit_head, tmp_path, size, options, made(), steps, seconds=100)
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    first = rows[0]
    for seen, now, rounds, _ in rows[1:]:
        assert not torch.equal(seen["head"], first[0]["head"]) or made is Renewed, "each drew another"
        torch.testing.assert_close(now, first[1], rtol=1e-8, atol=1e-8)
        assert rounds == [steps]
    if made is not Renewed and options["delay"] == 0:
        torch.testing.assert_close(first[1][2], first[0]["head"])


class Turns(Quadratic):
    """Two optimizers of the same parameter, by turns of three updates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()[batch_idx // 3 % 2]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD([self.x], lr=0.1), SGD([self.x], lr=0.1)]


def test_a_parameter_is_mixed_after_each_update_of_any_optimizer(tmp_path: Path) -> None:
    in_processes(fit, tmp_path, 4, {"topology": Ring(), "delay": 1}, Turns(), seconds=100)
    trajectory = simulate(Ring(), Gossip(), gradient, Quadratic().x.detach().expand(4, -1), STEPS, 0.1, 1)
    torch.testing.assert_close(recorded(tmp_path, 4), trajectory[1:], rtol=1e-12, atol=1e-12)


class Drawn(Quadratic):
    """Each worker draws another start."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(self.global_rank)
        self.x.data = torch.randn(5, dtype=torch.float64)
        self.drawn = self.x.detach().clone()

    def on_train_start(self) -> None:
        self.begun = self.x.detach().clone()


def two_fits() -> tuple[list[float], list[float]]:
    module, trainer = Drawn(), Trainer(**QUIET, max_steps=2, devices=2, strategy=GossipStrategy(evaluate="own"))
    trainer.fit(Quadratic())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    return module.drawn.tolist(), module.begun.tolist()


def test_a_second_fit_with_another_module_begins_at_worker_0_s() -> None:
    """Not at the mean of what each drew: it was the first module that the workers had apart."""
    outcomes = crew(2, two_fits, seconds=100)
    assert not any(outcome.error for outcome in outcomes), outcomes
    (drawn, _), _ = rows = [outcome.value for outcome in outcomes]
    assert [begun for _, begun in rows] == [drawn, drawn]
