"""What is trained: a module whose gradients are known whatever its parameters are, and a callback that makes events
happen."""

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from torch.utils.data import Dataset

from lightning_decentral.pipeline import Chain, blocks_of
from lightning_decentral.shared.wire.fsdp import full_tensor
from tests.together.space import BATCHES, Case

THAWED = ("thaw", "thaw inside", "thaw before backward")
SAVES = 4
"""Batches in a row after which the event "save" saves."""
WRITTEN = 0.25
"""What the event "write" adds to every parameter, on all workers."""
WRITTEN_AT_END = 0.125
"""What every parameter is set to by "write at end"."""
LEARNING_RATE = {"sgd": 0.2, "momentum": 0.1, "adamw": 0.05, "two": 0.2, "turns": 0.2}


class Rows:
    """Batches of (worker, epoch, index) of each of these workers; resumable within an epoch."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers
        self._epoch, self._index, self._resume = -1, 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        self._epoch, self._index, self._resume = self._epoch + (self._resume == 0), self._resume, 0
        while self._index < BATCHES:
            self._index += 1
            yield torch.tensor([[worker, self._epoch, self._index - 1] for worker in self._workers])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._resume = state["epoch"], state["index"]


class Replay:
    """The batches that a worker took, once more, epoch by epoch, with the rows of all devices of its group.

    Args:
        taken: of one worker.
        group: the devices whose gradients this run has.
        first: batches of the first epoch.
    """

    def __init__(self, taken: Sequence[Tensor], group: Sequence[int], first: int = BATCHES) -> None:
        self._taken, self._group, self._first, self._next = taken, group, first, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        count = BATCHES if self._next else self._first
        epoch = self._taken[self._next : self._next + count]
        self._next += count
        for batch in epoch:
            rows = batch[:1].repeat(len(self._group), 1)
            if len(self._group) > 1:
                rows[:, 0] = torch.tensor(self._group)
            yield rows

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Where a run goes on from another's file, `first` says what is left of its epoch."""


class Examples(Dataset[Tensor]):
    """Rows for loaders whose examples somebody else deals out."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([0, 0, place])


def apart(rank: int, case: Case) -> float:
    """What the event "apart" adds to a worker's parameters; zero in the mean."""
    return 0.2 * (rank - (case.workers - 1) / 2)


def fail(kind: str) -> None:
    """As the events "raise" and "kill" say."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("planted by an event")


def count(batch: Tensor) -> int:
    """Number of the batch over all epochs."""
    return int(batch[0, 1]) * BATCHES + int(batch[0, 2])


def slope(row: Tensor, name: str, like: Tensor) -> Tensor:
    """A known gradient: of this worker and batch, and of the parameter of that name."""
    seed = int(row[0]) * 1_000_003 + int(row[1]) * 1009 + int(row[2]) * 31 + sum(map(ord, name)) * 7
    drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * 2 - 1).to(like.dtype)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Part(nn.Module, ABC):
    """Some of the tensors; a block to `partial_backprop`, which wants blocks of one class in a row."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gradient = case["gradient"]

    @abstractmethod
    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """{name: tensor}, of those that this row of a batch uses, as a user's forward would read them."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, 4) of (total, worker, epoch, index) -> the same with the terms of this part added to the totals."""
        totals = []
        for total, row in zip(hidden[:, 0], hidden[:, 1:].detach().long(), strict=True):
            for name, tensor in self.tensors(row).items():
                total = total + term(row, name, tensor, self.gradient)
            totals.append(total)
        return torch.cat([torch.stack(totals)[:, None], hidden[:, 1:]], 1)


def term(row: Tensor, name: str, tensor: Tensor, gradient: str) -> Tensor:
    """`Probe`'s formula, of one tensor."""
    linear = (slope(row, name, tensor) * tensor).sum(dtype=torch.float64)
    if gradient == "bowl":
        return 0.5 * tensor.square().sum(dtype=torch.float64) + 0.02 * linear
    return linear if gradient == "slopes" else 0 * linear


class Read(nn.Linear):
    """Gives its tensors where they are used: after what pruning does before a forward."""

    def forward(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.weight, self.bias


class Lower(Part):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.conv = nn.Conv2d(2, 3, 2)

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        return {"conv.weight": self.conv.weight, "conv.bias": self.conv.bias}


class Upper(Part):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.shape = case["shape"]
        self.lin = Read(4, 3)
        self.late = nn.Parameter(torch.zeros(3), requires_grad=not case.has(*THAWED))
        if self.shape == "tied":
            self.other = nn.Linear(4, 3)
            self.other.weight = self.lin.weight
        elif self.shape == "experts":
            self.expert = nn.Parameter(torch.zeros(5))
        elif self.shape == "empty":
            self.nothing, self.scalar = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(()))

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {**dict(zip(("lin.weight", "lin.bias"), self.lin(), strict=True)), "late": self.late}
        if self.shape == "tied":
            found |= {"other.weight": self.other.weight, "other.bias": self.other.bias}
        elif self.shape == "experts" and int(row[2]) % 2 and (int(row[0]) + int(row[1])) % 2:  # in turn, or by nobody
            found["expert"] = self.expert
        elif self.shape == "empty":
            found |= {"nothing": self.nothing, "scalar": self.scalar}
        return found


class Trunk(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.lower, self.upper = Lower(case), Upper(case)

    def forward(self, hidden: Tensor) -> Tensor:
        total: Tensor = self.upper(self.lower(hidden))
        return total


def parts(module: nn.Module, kind: type[Part]) -> list[Any]:
    """The part of this class, where the module has it: a pipeline's stage has one of both."""
    return [part for part in module.modules() if isinstance(part, kind)]


class Probe(LightningModule):
    """A sum over all tensors t that a user's forward would read, by `gradient`:

        slopes   <s, t>                     the gradient is s, known, whatever t is
        still    0 <s, t>
        bowl     1/2 ||t||^2 + 0.02 <s, t>, one optimum for all workers

    Args:
        offset: added to all parameters at first; what a worker other than 0 begins with must not count.
        last: of the last worker.
    """

    def __init__(self, case: Case, offset: float = 0.0, last: bool = False) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = case["optimizer"] not in ("two", "turns")
        self.trunk = Trunk(case)
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("least", torch.full((2,), torch.inf))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._begin(offset)
        self._types(case["dtype"])
        self._order("channels_last" if last and case["layout"] == "one alone" else case["layout"])
        self.inside: dict[str, Callable[[], None]] = {}
        """Called in this training_step, by an event."""

    @torch.no_grad()
    def _begin(self, offset: float) -> None:
        numbers = torch.Generator().manual_seed(11)
        for parameter in self.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=numbers) + offset)

    def _types(self, dtype: str) -> None:
        {"float64": self.double, "float32": self.float, "several": self.trunk.upper.lin.double}[dtype]()

    def _order(self, layout: str) -> None:
        if layout == "channels_last":
            self.trunk.lower.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            self.trunk.upper.lin.weight.data = self.trunk.upper.lin.weight.data.t().contiguous().t()

    def loss(self, batch: Tensor) -> Tensor:
        hidden = torch.cat([torch.zeros(len(batch), 1), batch], 1).double()
        loss: Tensor = self.trunk(hidden)[:, 0].mean()
        return loss

    forward = loss

    def pipeline_stages(self) -> Chain:
        return Chain(self.trunk, blocks_of([self.trunk.lower, self.trunk.upper]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        for happen in self.inside.values():
            happen()
        self.seen += 1
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            if self.case["optimizer"] == "two" or count(batch) % 2 == number:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> Any:
        made = optimizers_of(self, self.case)
        scheduler = schedule_of(made[0], self.case["schedule"])
        if scheduler is None:
            return made
        return {"optimizer": made[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizers_of(module: nn.Module, case: Case) -> list[Optimizer]:
    kind, parameters = case["optimizer"], list(module.parameters())
    rate = LEARNING_RATE[kind]
    if kind in ("two", "turns"):
        half = len(parameters) // 2
        return [SGD(part, lr=rate, momentum=0.3) for part in (parameters[:half], parameters[half:])]
    if kind == "adamw":
        return [AdamW(parameters, lr=rate, weight_decay=0.0)]
    return [SGD(parameters, lr=rate, momentum=0.5 if kind == "momentum" else 0.0)]


def schedule_of(optimizer: Optimizer, kind: str) -> LRScheduler | None:
    if kind == "decay":
        return StepLR(optimizer, 4, 0.7)
    return LambdaLR(optimizer, _restarted) if kind == "restarts" else None


def _restarted(step: int) -> float:
    """Half a cosine down to a millionth in five steps, then again."""
    return max(1e-6, 0.5 + 0.5 * math.cos(math.pi * (step % 5) / 4))


class Happenings(Callback):
    """Makes the events of a case happen on this worker, and takes down what it sees.

    Args:
        folder: where files go, of this run.
        writes: whether files are written: a reference has none.
        counted: bytes that this process has sent to others.
    """

    def __init__(
        self, case: Case, rank: int, folder: Path, writes: bool, counted: Callable[[], int] = lambda: 0
    ) -> None:
        self.case, self.rank, self.folder, self.writes, self.counted = case, rank, folder, writes, counted
        self.sent_bytes, self.healed = (0, 0), 0
        self._before = 0
        self.done: set[str] = set()
        self.now = -1
        """Number of the batch, over all epochs."""
        self.taken: list[Tensor] = []
        self.own: dict[str, Tensor] = {}
        """Parameters where training ends, before workers meet."""
        self.rows: list[list[float]] = []
        """Sums of the parameters after each batch."""
        self.validated: dict[int, dict[str, Tensor]] = {}
        self.saved: dict[int, str] = {}

    def _due(self, *kinds: str) -> list[Any]:
        """Events whose batch has come, once each."""
        found = [e for e in self.case.events if e.kind in kinds and self.now >= e.at and e.kind not in self.done]
        self.done |= {event.kind for event in found}
        return found

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._before = self.counted()

    # ---- in the order of a step -------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.now = trainer.fit_loop.epoch_loop.total_batch_idx
        self.taken.append(batch.clone())
        module.inside.clear()
        for kind, happen in BEFORE_A_STEP.items():
            if self.now % _accumulated(self.case) == 0 and self._due(kind):
                happen(trainer, module)
        module.inside["buffers"] = lambda: self._change_buffers(module)
        if self._due("thaw inside"):
            module.inside["thaw"] = lambda: _thaw(trainer, module)
        for event in self._due("raise", "kill"):
            if event.who == self.rank and self.writes:
                fail(event.kind)

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        if self._due("thaw before backward"):
            _thaw(trainer, module)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if any(event.kind == "clamp" and self.now >= event.at for event in self.case.events):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.2, 0.3)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        for event in self._due("nan"):
            if event.who == self.rank and self.writes:
                own = (p for group in optimizer.param_groups for p in group["params"])
                next(p for p in own if p.grad is not None and p.numel()).grad.fill_(torch.nan)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if trainer.global_step:
            (self.folder / f"began-{self.rank}").touch()
        for event in self._due("write", "apart"):
            for parameter in module.parameters():
                parameter.add_(WRITTEN if event.kind == "write" else apart(self.rank, self.case))
        self._save(trainer)
        for event in self._due("stop"):
            if self.writes and (event.who == self.rank or not self.case.may_stop_alone):
                trainer.should_stop = True
        self.rows.append([float(full_tensor(p).double().sum()) for p in module.parameters()])

    def _save(self, trainer: Trainer) -> None:
        names = ["resume.ckpt" for _ in self._due("resume", "resume elsewhere")]
        saving = any(event.kind == "save" and 0 <= self.now - event.at < SAVES for event in self.case.events)
        for name in [*names, *([f"save-{self.now}.ckpt"] if saving else [])] if self.writes else []:
            trainer.save_checkpoint(self.folder / name)

    def _change_buffers(self, module: Any) -> None:
        for event in self.case.events:
            if event.kind == "late buffer" and self.now >= event.at:
                module.level += 1 + self.rank // self.case.stages
            if event.kind == "filling buffer" and self.now >= event.at:
                module.least[0] = self.now + self.rank // self.case.stages

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.sanity_checking or not self.writes:
            return
        self.validated[self.now] = {name: full_tensor(value).clone() for name, value in module.state_dict().items()}
        self.saved[self.now] = str(self.folder / f"validated-{self.now}.ckpt")
        trainer.save_checkpoint(self.saved[self.now])

    def _settled(self, strategy: Any) -> tuple[int, int]:
        """(bytes that it says it sent, bytes counted), when both stand still: a thread may be sending the last ones."""
        before, now = (-1, -1), (0, 0)
        while before != now:
            before = now
            time.sleep(0.02)
            now = strategy.traffic().bytes_sent, self.counted() - self._before
        return now

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.own = {name: full_tensor(value.detach()).clone() for name, value in module.named_parameters()}
        if self.writes and self.case["method"] == "gossip":
            self.sent_bytes, self.healed = self._settled(trainer.strategy), trainer.strategy.traffic().healed
        if self.case.has("write at end"):
            for parameter in module.parameters():
                parameter.fill_(WRITTEN_AT_END)


def _accumulated(case: Case) -> int:
    return int(case["accumulate"]) if case["accumulate"].isdigit() else 1


def _replace_one(trainer: Trainer, module: Any) -> None:
    fresh = optimizers_of(module, module.case)
    trainer.optimizers = [fresh[0], *trainer.optimizers[1:]]


def _prune(trainer: Trainer, module: Any) -> None:
    for upper in parts(module, Upper):
        mask = torch.ones_like(upper.lin.weight)
        mask[:, ::2] = 0
        prune.custom_from_mask(upper.lin, "weight", mask)


def _thaw(trainer: Trainer, module: Any) -> None:
    for upper in parts(module, Upper):
        upper.late.requires_grad_(True)


def _freeze(trainer: Trainer, module: Any) -> None:
    for lower in parts(module, Lower):
        list(lower.conv.parameters())[-1].requires_grad_(False)


def _reparametrize(trainer: Trainer, module: Any) -> None:
    for lower in parts(module, Lower):
        parametrize.register_parametrization(lower.conv, "bias", Doubled())


def _order(trainer: Trainer, module: Any) -> None:
    for lower in parts(module, Lower):
        lower.conv.to(memory_format=torch.channels_last)


BEFORE_A_STEP: dict[str, Callable[[Any, Any], object]] = {
    "freeze": _freeze,
    "thaw": _thaw,
    "replace": lambda trainer, module: trainer.strategy.setup_optimizers(trainer),
    "replace one": _replace_one,
    "prune": _prune,
    "reparametrize": _reparametrize,
    "layout": _order,
}
