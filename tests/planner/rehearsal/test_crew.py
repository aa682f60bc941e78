"""A rehearsal in one process has the very bits of the run on processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.compressed import CompressedStrategy
from lightning_decentral.gossip import (
    Complete,
    ConsensusControl,
    DifferenceCompression,
    Every,
    ExactDiffusion,
    GradientTracking,
    Hypercube,
    Int4,
    Int8,
    OnePeerExponential,
    Outer,
    OuterNesterov,
    Plain,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    RelaySum,
    Ring,
    Stream,
    Travel,
    Tree,
)
from lightning_decentral.partial import Staircase, Temporal
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from tests.gossip.test_lightning import Inspect, seen
from tests.tiny import QUIET, Net, SizedBatches, in_processes

STEPS = 6
CLIP = 0.5


class Grouped(Net):
    """Of two groups, with a schedule of steps on top; dropout is drawn from each worker's own numbers."""

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


# (workers, strategy, its options): all that all-reduce are of two, as gloo adds three in another order.
CASES: dict[str, tuple[int, type[Strategy], dict[str, Any]]] = {
    "blocking": (4, GossipStrategy, {"topology": Ring(), "delay": 0}),
    "overlapped": (4, GossipStrategy, {"topology": Ring()}),
    "cliques of two": (4, GossipStrategy, {"topology": Hypercube()}),
    "codec": (4, GossipStrategy, {"topology": Ring(), "codec": DifferenceCompression(Int4())}),
    "corrected": (4, GossipStrategy, {"topology": Ring(), "combine": ExactDiffusion(), "delay": 0}),
    "push-sum": (4, GossipStrategy, {"topology": Ring(), "combine": PushSum()}),
    "momentum travels": (4, GossipStrategy, {"topology": Ring(), "states": {"momentum_buffer": Travel(codec=Int8())}}),
    "gradient tracking": (4, GossipStrategy, {"topology": OnePeerExponential(), "combine": GradientTracking()}),
    "quasi-global": (4, GossipStrategy, {"topology": Ring(), "combine": QuasiGlobalMomentum()}),
    "relayed sums": (4, GossipStrategy, {"topology": Tree(), "combine": RelaySum()}),
    "consensus control": (2, GossipStrategy, {"topology": Ring(), "combine": ConsensusControl(target=0.02)}),
    "every other step": (4, GossipStrategy, {"topology": Every(2, Ring()), "codec": Int8()}),
    "random pairs": (4, GossipStrategy, {"topology": RandomMatching(), "combine": Outer(), "delay": 0}),
    "exact steps": (2, GossipStrategy, {"exact_steps": 2}),
    "outer rounds": (2, GossipStrategy, {"topology": Stream(4, 2, Complete()), "combine": OuterNesterov()}),
    "coded ways": (
        2,
        GossipStrategy,
        {"topology": Stream(4, 2, Complete()), "combine": PseudoGradient(), "codec": Int4()},
    ),
    "compressed": (4, CompressedStrategy, {}),
    "compressed to four bits": (4, CompressedStrategy, {"codec": Int4()}),
    "ddp": (2, DDPStrategy, {}),
    "partial backprop": (2, PartialBackpropStrategy, {"cuts": ["second", "head"], "depth": Staircase()}),
    "partial backprop, in turn": (2, PartialBackpropStrategy, {"cuts": ["second"], "depth": Temporal(warm_up=2)}),
}


class Overflowing(Grouped):
    """One step has an infinite loss on worker 1, and another writes to a buffer that never changed before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.factor += self.global_rank + 1
        loss = self.factor * super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 3 and self.global_rank == 1 else loss


class Thawing(Grouped):
    """Whose workers each write to a frozen layer, which is trained from a later step on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def configure_optimizers(self) -> Any:
        self.head.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head.weight.data.fill_(self.global_rank + 0.3)
        self.head.requires_grad_(batch_idx >= 3)


def fit(
    folder: Path, size: int, kind: type[Strategy], options: dict[str, Any], module: type[Grouped] = Grouped
) -> None:
    seed_everything(1, workers=True, verbose=False)
    strategy = kind(start_method="fork", **options)
    settings = {**QUIET, "max_steps": STEPS, "gradient_clip_val": CLIP}
    trainer = Trainer(**settings, devices=size, strategy=strategy, callbacks=[Inspect(folder)])
    trainer.fit(module(), SizedBatches(STEPS))


def given(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[list[Tensor]]:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    return iter(list(SizedBatches(STEPS)))


def rehearsed(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy,
    size: int,
    steps: int = STEPS,
    module: type[LightningModule] = Grouped,
    **how: Any,
) -> Crew:
    seed_everything(1, workers=True, verbose=False)
    how["loop"] = LoopSettings(clip=CLIP)
    with Crew(module(), lambda rank: given(monkeypatch, rank), strategy, size, steps, **how) as crew:
        crew.train(steps)
        crew.release()
    return crew


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_rehearsal_equals_processes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    size, kind, options = CASES[name]
    in_processes(fit, tmp_path, size, kind, options)
    crew = rehearsed(monkeypatch, kind(**options), size)
    assert len({float(loss) for loss in crew.losses[-1]}) == size  # the batches differ
    for real, worker in zip(seen(tmp_path, size), crew.workers, strict=True):
        for key, value in worker.module.state_dict().items():
            assert torch.equal(real["own"][key], value), key


@pytest.mark.parametrize("options", [{"codec": Int4()}, {"codec": Plain()}], ids=str)
def test_skipped_updates_and_late_buffers_are_those_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """What was rounded away of a skipped update is put back; a buffer goes to all as soon as it changes."""
    options = {**options, "nonfinite": "skip"}
    in_processes(fit, tmp_path, 2, CompressedStrategy, options, Overflowing)
    crew = rehearsed(monkeypatch, CompressedStrategy(**options), 2, module=Overflowing)
    for one, worker in zip(seen(tmp_path, 2), crew.workers, strict=True):
        for key, value in worker.module.state_dict().items():
            assert torch.equal(one["own"][key], value), key


def test_what_is_thawed_meets_as_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the update, on threads or one after the other."""
    options = {"topology": Ring(), "delay": 0}
    in_processes(fit, tmp_path, 4, GossipStrategy, options, Thawing)
    real = seen(tmp_path, 4)
    for threads in (1, 2):
        crew = rehearsed(monkeypatch, GossipStrategy(**options), 4, module=Thawing, threads=threads)
        for one, worker in zip(real, crew.workers, strict=True):
            for key, value in worker.module.state_dict().items():
                assert torch.equal(one["own"][key], value), key


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GossipStrategy, {"topology": Ring()}),
        (DDPStrategy, {}),
        (PartialBackpropStrategy, {"cuts": ["second", "head"], "depth": Staircase()}),
    ],
)
def test_three_that_all_reduce_are_equal_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Strategy], options: dict[str, Any]
) -> None:
    in_processes(fit, tmp_path, 3, kind, options)
    crew = rehearsed(monkeypatch, kind(**options), 3)
    for real, worker in zip(seen(tmp_path), crew.workers, strict=True):
        own = dict(worker.module.named_parameters())
        torch.testing.assert_close({k: real["own"][k] for k in own}, own, rtol=1e-4, atol=1e-6)


def test_the_module_and_the_random_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Grouped()
    state, before = {key: value.clone() for key, value in module.state_dict().items()}, torch.get_rng_state()
    with Crew(module, lambda rank: given(monkeypatch, rank), GossipStrategy(), 2, 2) as crew:
        crew.train(2)
    torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_short_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="6 batches only"):
        rehearsed(monkeypatch, GossipStrategy(), 2, STEPS + 1)


def test_muon_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="one update for all workers: leave orthogonal out"):
        rehearsed(monkeypatch, CompressedStrategy(orthogonal=Int8()), 2, STEPS)


def test_no_message_stays_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker asks who lacks a gradient, and waits for the answers only where it lacks one itself."""
    crew = rehearsed(monkeypatch, DDPStrategy(), 2)
    left = crew._boxes._boxes, crew._boxes._unwanted
    assert [len(some) for some in left] == [0, 0]


class Refused(Grouped):
    """Whose `how` a rehearsal refuses, by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "unused":
            self.spare = torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        if self.how == "LBFGS":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "rates":
            optimizer.param_groups[0]["lr"] = 0.2 / (1 + batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.how == "stops" and self.global_rank == 1


@pytest.mark.parametrize(
    ("how", "strategy", "why"),
    [
        ("unused", DDPStrategy(), r"ddp ends with spare.weight, which gets no gradient on worker \d: freeze it"),
        ("LBFGS", DDPStrategy(), "LBFGS searches by each worker's own loss"),
        ("rates", GossipStrategy(), "Refused sets learning rates by itself, which can't be multiplied by 0.5"),
        ("stops", GossipStrategy(), "the training of Refused ended after . of 6 steps"),
        ("hook", DDPStrategy(ddp_comm_hook=print), "DDPStrategy with ddp_comm_hook can't be rehearsed"),
        ("buffers", DDPStrategy(broadcast_buffers=False), "DDPStrategy with broadcast_buffers can't be rehearsed"),
    ],
)
def test_what_the_run_is_not_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, how: str, strategy: Strategy, why: str
) -> None:
    loop = LoopSettings(rate=0.5 if how == "rates" else 1.0)
    with (
        pytest.raises(ValueError, match=why) as error,
        Crew(Refused(how), lambda rank: given(monkeypatch, rank), strategy, 2, STEPS, loop=loop) as crew,
    ):
        crew.train(STEPS)
    assert "\n" not in str(error.value)


def test_unused_parameters_are_heeded_where_ddp_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = DDPStrategy(find_unused_parameters=True)
    with Crew(Refused("unused"), lambda rank: given(monkeypatch, rank), strategy, 2, STEPS) as crew:
        crew.train(2)
    assert crew.workers[0].module.spare.weight.grad is None  # type: ignore[union-attr]
