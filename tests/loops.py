"""A loop with Fabric as users write it, run by forked workers: accumulation, clipping, saving, resuming, the mean."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from tests.partial.towers import Network, batch_of
from tests.simulated import trainers
from tests.tiny import in_processes

STEPS = 6


@dataclass(frozen=True)
class Loop:
    """What a loop does beside its steps.

    Args:
        accumulate: backwards for each update.
        save_at, shown: after which step `folder/step.ckpt` is saved, and whether the mean stands meanwhile.
        resume: a file to go on from.
        finish: end with the mean for all workers.
        sick_at: the step, from 0, in which worker 1's loss is NaN.
        look: asked, after every step, on every worker; what it returns is kept by the step.
    """

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    norm: bool = False
    dropout: float = 0.0
    accumulate: int = 1
    clip: float | None = None
    steps: int = STEPS
    save_at: int = -1
    shown: bool = False
    resume: Path | None = None
    finish: bool = False
    sick_at: int = -1
    look: Callable[[Fabric, nn.Module], Any] | None = None

    def __call__(self, fabric: Fabric, folder: Path) -> None:
        """Writes parameters and buffers after each step, and what was seen, to `folder/rank.pt`."""
        fabric.seed_everything(7 + fabric.global_rank, verbose=False)
        module = nn.Sequential(Network(tied=True, norm=self.norm), nn.Dropout(self.dropout))
        model, optimizer = fabric.setup(module, self.optimizer(module.parameters(), lr=0.05))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if self.resume is not None:
            fabric.load(self.resume, state)
        rows, seen = [], []
        while state["step"] < self.steps:
            self._step(fabric, model, optimizer, state["step"])
            state["step"] += 1
            rows.append(_copied(model))
            seen += [self.look(fabric, model)] if self.look else []
            if state["step"] == self.save_at:
                with fabric.strategy.mean() if self.shown else nullcontext():
                    fabric.save(folder / "step.ckpt", state)
        if self.finish:
            fabric.strategy.finish()
            rows.append(_copied(model))
        torch.save({"rows": rows, "seen": seen}, folder / f"{fabric.global_rank}.pt")
        fabric.barrier()

    def _step(self, fabric: Fabric, model: Any, optimizer: Any, step: int) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: self._backward(fabric, model, optimizer, step))
            return
        self._backward(fabric, model, optimizer, step)
        if self.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=self.clip)
        optimizer.step()

    def _backward(self, fabric: Fabric, model: Any, optimizer: Any, step: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(self.accumulate):
            with fabric.no_backward_sync(model, enabled=part < self.accumulate - 1):
                x, y = fabric.to_device(batch_of(fabric.global_rank, step * self.accumulate + part))
                loss = nn.functional.cross_entropy(model(x), y) / self.accumulate
                if (fabric.global_rank, step) == (1, self.sick_at):
                    loss = loss * float("nan")
                fabric.backward(loss)
        return loss


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _launched(strategy: Any, size: int, loop: Loop, folder: Path, there: bool) -> None:
    with trainers.device(seed=0) if there else nullcontext():
        accelerator = trainers.Accelerator() if there else "cpu"
        Fabric(accelerator=accelerator, devices=size, strategy=strategy).launch(loop, folder)


def run(
    folder: Path, strategy: Any, loop: Loop, size: int = 3, name: str = "loop", there: bool = False
) -> list[dict[str, Any]]:
    """What every worker wrote.

    Args:
        there: on devices, which are simulated.
    """
    place = folder / name
    place.mkdir()
    in_processes(_launched, strategy, size, loop, place, there)
    return [torch.load(place / f"{rank}.pt") for rank in range(size)]


def equal(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    """Bit for bit, step by step."""
    return len(a) == len(b) and all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
