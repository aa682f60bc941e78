"""A loop with Fabric cuts as a Trainer does, bit for bit, is ddp at full depth, and resumes where it was."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import (
    Balanced,
    BlockCoordinate,
    Decay,
    FabricPartialBackpropStrategy,
    Forget,
    Full,
    Staircase,
    Temporal,
)
from tests.gossip.test_fabric import Trained
from tests.loops import STEPS, Loop, equal, run
from tests.partial.towers import Batches, Network
from tests.tiny import QUIET, in_processes

SIZE = 3
ADAM = partial(torch.optim.AdamW, weight_decay=0.1)


def cut(**options: Any) -> FabricPartialBackpropStrategy:
    return FabricPartialBackpropStrategy(start_method="fork", **options)


def by_trainer(folder: Path, loop: Loop, options: dict[str, Any]) -> None:
    strategy = PartialBackpropStrategy(start_method="fork", **options)
    settings = {"accumulate_grad_batches": loop.accumulate, "gradient_clip_val": loop.clip, "max_steps": STEPS}
    Trainer(**QUIET, **settings, devices=SIZE, strategy=strategy).fit(Trained(loop, folder), Batches(50))


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "loop"), [
    ({"depth": Temporal(warm_up=0)}, Loop(norm=True, dropout=0.2, optimizer=ADAM)),
    ({"depth": Staircase(), "cuts": 2, "absent": Decay()}, Loop(accumulate=2, clip=0.1, optimizer=ADAM)),
    ({"depth": BlockCoordinate(every=2), "cuts": "blocks", "absent": Forget()}, Loop(optimizer=ADAM)),
], ids=["temporal", "staircase", "blocks"])  # fmt: skip
def test_it_is_the_trainers_partial_backprop_bit_for_bit(options: dict[str, Any], loop: Loop, tmp_path: Path) -> None:
    rows = [worker["rows"] for worker in run(tmp_path, cut(**options), loop)]
    in_processes(by_trainer, tmp_path, loop, options)
    for rank, row in enumerate(rows):
        assert equal(row, torch.load(tmp_path / f"{rank}.pt"))
        assert equal(row, rows[0]), "replicas"
    assert not equal(rows[0][:1], rows[0][-1:])


def sent(fabric: Fabric, model: nn.Module) -> float:
    return fabric.strategy.sent_bytes


def test_full_depth_is_ddp(tmp_path: Path) -> None:
    full = run(tmp_path, cut(depth=Full()), Loop(accumulate=3, optimizer=ADAM, look=sent))
    ddp = run(tmp_path, DDPStrategy(start_method="fork"), Loop(accumulate=3, optimizer=ADAM), name="ddp")
    for mine, other in zip(full[0]["rows"], ddp[0]["rows"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    # With whether each has one, and whether a buffer has changed.
    sent_numbers = sum(p.numel() + 1 for p in Network(tied=True, norm=False).parameters()) + 1
    assert full[0]["seen"][0] == pytest.approx(2 * (3 - 1) / 3 * 4 * sent_numbers), "once for three backwards"


class Module(LightningModule):
    """Knows its Fabric once it is set up, which holds groups of processes and can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(tied=False, norm=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.network(x)
        return output.square().mean()


def by_module(fabric: Fabric) -> None:
    torch.manual_seed(1)
    module = Module()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.arange(4)))
    optimizer.step()
    assert fabric.strategy.driver.plan.boundaries


def launched_with_a_module() -> None:
    Fabric(accelerator="cpu", devices=2, strategy=cut(depth=Full())).launch(by_module)


def test_a_lightning_module_is_cut_too() -> None:
    in_processes(launched_with_a_module)


def by_two_optimizers(fabric: Fabric) -> None:
    module = Network(tied=False, norm=False)
    halves = [list(module.parameters())[start::2] for start in (0, 1)]
    model, *optimizers = fabric.setup(module, *(torch.optim.SGD(half, lr=0.1) for half in halves))
    before = [p.detach().clone() for p in module.parameters()]
    fabric.backward(model(torch.arange(4)).square().mean())  # the first step is a full one
    for optimizer in optimizers:
        optimizer.step()
    assert not any(map(torch.equal, before, module.parameters()))


def by_one_of_nobody(fabric: Fabric) -> None:
    module = Network(tied=False, norm=False)
    stray = nn.Parameter(torch.ones(()))
    model, optimizer = fabric.setup(module, torch.optim.SGD([*module.parameters(), stray], lr=0.1))
    fabric.backward(model(torch.arange(4)).square().mean() * stray)
    with pytest.raises(RuntimeError, match="no worker averages its gradient"):
        optimizer.step()


def launched(loop: Callable[[Fabric], None], devices: int) -> None:
    Fabric(accelerator="cpu", devices=devices, strategy=cut()).launch(loop)


def test_a_second_optimizer_takes_the_step_of_its_backward() -> None:
    """Not the next one's depth, once the first optimizer has stepped."""
    in_processes(launched, by_two_optimizers, 1)


def test_a_parameter_of_no_segment_is_refused() -> None:
    in_processes(launched, by_one_of_nobody, 2)


def depth(fabric: Fabric, model: nn.Module) -> Any:
    driver = fabric.strategy.driver
    return driver.plan.boundaries, [driver.depth(step) for step in range(3, STEPS)]


@pytest.mark.sampled
@pytest.mark.parametrize("assignment", [Temporal(warm_up=2), BlockCoordinate(every=2)], ids=str)
def test_every_worker_goes_on_bit_for_bit(assignment: Any, tmp_path: Path) -> None:
    loop = {"optimizer": ADAM, "norm": True, "dropout": 0.2, "look": depth}
    whole = run(tmp_path, cut(depth=assignment), Loop(**loop, save_at=3))
    rest = run(tmp_path, cut(depth=assignment), Loop(**loop, resume=tmp_path / "loop" / "step.ckpt"), name="rest")
    for before, after in zip(whole, rest, strict=True):
        assert equal(before["rows"][3:], after["rows"])
        assert before["seen"][-1] == after["seen"][-1]


# ---- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ({"depth": Temporal()}, "has no known end: give warm_up in steps, got 0.25"),
    ({"cuts": 0}, "cuts must be at least 1"),
    ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
    ({"nonfinite": "ignore"}, "nonfinite must be"),
], ids=str)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut(**options)


def test_a_step_with_nan_ends_all_or_is_skipped_by_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="FloatingPointError: the gradients hold NaN or infinity on all workers"):
        run(tmp_path, cut(), Loop(sick_at=2))
    loop = Loop(sick_at=2, optimizer=torch.optim.AdamW)
    rows = [worker["rows"] for worker in run(tmp_path, cut(nonfinite="skip"), loop, name="skipped")]
    assert all(equal(row, rows[0]) for row in rows)
    assert equal(rows[0][1:2], rows[0][2:3])
    assert not equal(rows[0][2:3], rows[0][3:4])
    assert all(bool(torch.isfinite(value).all()) for value in rows[0][-1].values())


def test_cuts_that_are_none_are_named_on_every_worker(tmp_path: Path) -> None:
    """A tied embedding goes around no cut, a block's own branch does."""
    with pytest.raises(RuntimeError, match=r"no cut at 0\.blocks\.1\.second: gradient of .* goes around the boundary"):
        run(tmp_path, cut(cuts=["0.blocks.1.second"]), Loop())


def two_models(fabric: Fabric, folder: Path) -> None:
    for module in (nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2), nn.Linear(2, 2)):
        fabric.setup_module(module)


def test_one_trained_model_with_equal_batches(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cuts one trained model"):
        in_processes(Fabric(accelerator="cpu", devices=2, strategy=cut()).launch, two_models, tmp_path)
    with pytest.raises(RuntimeError, match="unequal batches, which only a Trainer can give"):
        run(tmp_path, cut(depth=Balanced()), Loop())
