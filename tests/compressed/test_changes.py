"""What changes while training, late or within a step: buffers, what is trained, modules, optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy
from lightning_decentral.compressed import FabricCompressedStrategy
from lightning_decentral.optim import Muon
from lightning_decentral.shared.compute.codec import Plain
from tests.compressed.test_strategy import assert_equal, compressed
from tests.partial.towers import Batches, Tower, run
from tests.tiny import in_processes

LATE = 3


class Late(Tower):
    """A statistic that begins to change within the epoch, and that the forward uses; each worker has another one."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.register_buffer("level", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= LATE:
            self.level += 1 + self.global_rank
        return super().training_step(batch, batch_idx) * (1 + self.level.clamp(max=9))


class Alone(Late):
    """On one worker alone, and not the one whose buffers count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= LATE and self.global_rank:
            self.level += 1
        return Tower.training_step(self, batch, batch_idx) * (1 + self.level)


@pytest.mark.parametrize("made", [Late, Alone])
def test_a_buffer_that_changes_late_is_worker_0_s(tmp_path: Path, made: type[Late]) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    rows = run(ours, made(), strategy=compressed(codec=Plain()), max_steps=6)
    ddp = run(theirs, made(), strategy=DDPStrategy(start_method="fork"), max_steps=6)
    assert_equal(rows)
    for mine, other in zip(rows[0]["parameters"], ddp[0]["parameters"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class Thawed(Tower):
    """The first block is trained from a later batch on: thawed before the batch, or within its step."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.within = within
        self.network.blocks[0].requires_grad_(False)

    def thaw(self, batch_idx: int, here: bool) -> None:
        if batch_idx == LATE and here:
            self.network.blocks[0].requires_grad_(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.thaw(batch_idx, not self.within)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.thaw(batch_idx, self.within)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_is_thawed_within_a_step_is_averaged_in_it(tmp_path: Path) -> None:
    found = []
    for within in (False, True):
        (tmp_path / str(within)).mkdir()
        rows = run(tmp_path / str(within), Thawed(within), strategy=compressed(codec=Plain()), max_steps=6)
        assert_equal(rows)
        found.append(rows[0]["parameters"])
    for before, inside in zip(*found, strict=True):
        torch.testing.assert_close(inside, before, rtol=0, atol=0)


class Unseen(Thawed):
    """By a backward of the user's own."""

    def __init__(self) -> None:
        super().__init__(within=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()


def test_a_thaw_before_a_backward_that_is_not_seen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"was unfrozen within a step .* call self.manual_backward\(loss\)"):
        run(tmp_path, Unseen(), strategy=compressed(), max_steps=6)


class Renewed(Tower):
    """Every worker draws another head, which a new optimizer trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATE:
            torch.manual_seed(self.global_rank)
            self.network.head = nn.Linear(*reversed(self.network.head.weight.shape))
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_a_module_that_comes_is_worker_0_s_on_all(tmp_path: Path) -> None:
    assert_equal(run(tmp_path, Renewed(), strategy=compressed(), max_steps=6))


class Again(Tower):
    """Muon twice: what made the first one's matrices whole has to serve the second."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATE:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        muon = self.trainer.optimizers[0]
        assert isinstance(muon, Muon)
        assert "change" in vars(muon), "its matrices are shared out"


def test_a_replaced_muon_is_shared_out(tmp_path: Path) -> None:
    strategy = CompressedStrategy(start_method="fork", orthogonal=Plain())
    assert_equal(run(tmp_path, Again(optimizer="muon"), strategy=strategy, max_steps=6))


# ---- Fabric ----------------------------------------------------------------------------------------------------------


def loop(fabric: Fabric, rounds: int) -> list[Tensor]:
    """Two models one after the other, the second with BatchNorm; the second once more; a part is thawed late."""
    found = []
    torch.manual_seed(fabric.global_rank)
    batches = Batches(4)
    for number in range(rounds):
        if number < 2:
            network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            network[0].requires_grad_(number == 0)
        model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
        model.train()
        for step, _ in enumerate(batches):
            if step == 1:
                network[0].requires_grad_(True)
            optimizer.zero_grad()
            fabric.backward(model(torch.randn(5, 3)).square().mean())
            optimizer.step()
        found += [t.detach().clone() for t in (*network.parameters(), *network.buffers())]
    return found


def launched(rounds: int) -> Any:
    strategy = FabricCompressedStrategy(start_method="fork", codec=Plain())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)

    def work(fabric: Fabric) -> Any:
        return fabric.strategy.gather([tensor.tolist() for tensor in loop(fabric, rounds)])

    return fabric.launch(work)


@pytest.mark.parametrize("rounds", [2, 3])
def test_models_one_after_the_other_stay_equal_on_all_workers(rounds: int) -> None:
    one, two = in_processes(launched, rounds)
    assert one == two
