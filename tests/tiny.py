"""Tiny modules for trainers with several workers, and runs of them that can't hang a test."""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.optim import AccumAdamW, MomentumWarmup, Muon, muon_groups
from lightning_decentral.shared.compute import buckets
from lightning_decentral.shared.wire.fsdp import full_tensor
from tests import forking, world

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": True,
}


class Quadratic(LightningModule):
    """loss = 0.5 (1 + 0.1 rank) ||x - rank - 0.3 step||^2: another minimum and curvature on each worker, in float64."""

    def __init__(self, dim: int = 5, learning_rate: float = 0.1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = nn.Parameter(torch.randn(dim, generator=generator, dtype=torch.float64))
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = self.global_rank
        return 0.5 * (1 + 0.1 * rank) * (self.x - rank - 0.3 * self.global_step).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(400, 1)), batch_size=1)


class Record(Callback):
    """Writes every worker's parameters after each step to `folder/rank.pt`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._rows.append(torch.cat([full_tensor(p).double().flatten() for p in pl_module.parameters()]).cpu())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(torch.stack(self._rows), self._folder / f"{trainer.global_rank}.pt")


def recorded(folder: Path, size: int) -> Tensor:
    """[steps, size, dim] of a recorded run."""
    return torch.stack([torch.load(folder / f"{rank}.pt") for rank in range(size)], dim=1)


def cut_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last bucket of models of some hundred parameters have a tail, in processes that are forked from here."""
    for name, value in {"LEAST_CUT_BYTES": 0, "SHORT": 2, "TAIL": 8}.items():
        monkeypatch.setattr(buckets, name, value)


def in_processes(function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Any:
    """function(*args) in a forked process with a hard kill: a trainer that hangs fails its test and nothing else.

    Returns what the function returns; what it raises comes as a RuntimeError "Type: text", with the output behind it.
    """
    assert not world.made, "this process has had a world of threads: mark the test that made it with threads"
    forking.prepare()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result", Path(folder) / "output"
        process = multiprocessing.get_context("fork").Process(target=child, args=(function, args, result, output))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the run left behind, too
        process.join()
        printed = output.read_text(errors="replace")[-40000:] if output.exists() else ""
        sys.stderr.write(printed)
        assert not late, f"still running after {seconds} s:\n{printed}"
        assert result.exists(), f"ended with {process.exitcode}:\n{printed}"
        worked, value = pickle.loads(result.read_bytes())
        if not worked:
            raise RuntimeError(f"{value}\n{printed}")
        return value


def _print_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    sys.stderr.write(f"{category.__name__}: {message}\n")


def child(function: Callable[..., Any], args: tuple[Any, ...], result: Path, output: Path) -> None:
    """What `function` returns or raises, pickled into `result`; what it prints is in `output`."""
    os.setsid()  # a group of its own, for the kill
    gc.freeze()  # a collection would touch, and so copy, every page that the fork shares with the tests
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # no flush at the end
    warnings.showwarning = _print_warning  # pytest records those of its own process
    for name in [n for n in os.environ if n in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]:
        del os.environ[name]
    if not torch.cuda.device_count():
        # A CUDA build refuses a fork's own forks once devices were counted, though there are none.
        torch.cuda._is_in_bad_fork = bool
    try:
        value = (True, function(*args))
    except BaseException as error:  # the parent raises it
        value = (False, f"{type(error).__name__}: {error}")
    result.write_bytes(pickle.dumps(value))
    sys.stdout.flush()
    os._exit(0)


class Net(LightningModule):
    """A classifier with dropout, BatchNorm, a frozen layer and tied weights, on random images that differ by worker."""

    def __init__(self, optimizer: str = "sgd", scheduler: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.frozen(self.drop(self.norm(self.first(x)).relu()))))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
            "accum_adamw": lambda: AccumAdamW(parameters, lr=0.01, window=3),
            "muon": lambda: Muon(muon_groups(self), lr=0.01),
        }[self.hparams.optimizer]()
        if not self.hparams.scheduler:
            return optimizer
        scheduler: LRScheduler = StepLR(optimizer, 3, 0.5)
        if "momentum" in optimizer.defaults:
            scheduler = ChainedScheduler([scheduler, MomentumWarmup(optimizer, 5)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoOptimizers(Net):
    """Manual optimization: the first of the first layer, the second of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.head)]

    def update(self, batch: Any, *order: int) -> None:
        """One step of each of these, in order."""
        every: Any = self.optimizers()
        for place in order:
            every[place].zero_grad()
            self.manual_backward(self.loss(batch))
            every[place].step()


class Batches:
    """`length` batches a worker and epoch that depend on (worker, epoch, index) alone; resumable within an epoch.

    Args:
        lengths: one for each worker where they differ.
    """

    def __init__(self, length: int = 6, lengths: tuple[int, ...] = ()) -> None:
        self._length, self._lengths = length, lengths
        self._epoch, self._index = -1, 0
        self._resume = 0

    @property
    def _rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))

    def __iter__(self) -> Iterator[list[Tensor]]:
        self._epoch, self._index, self._resume = self._epoch + (self._resume == 0), self._resume, 0
        length = self._lengths[self._rank] if self._lengths else self._length
        while self._index < length:
            seed = 10_000 * self._rank + 100 * self._epoch + self._index
            self._index += 1
            generator = torch.Generator().manual_seed(seed)
            yield [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._resume = state["epoch"], state["index"]


class SizedBatches(Batches):
    """The same, with a length that Lightning knows beforehand."""

    def __len__(self) -> int:
        return self._length
