"""One host of `network/accuracy.py`: trains a recipe by one method after another and keeps its model at marks."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from common.quiet_recipe import built, composed
from lightning_decentral.recipes.learner import Learner
from lightning_decentral.recipes.loaders import Loaders
from lightning_decentral.shared.wire.mean import of_mean
from loss.peers import LOCAL, DiLoCo, with_decent_dp
from network.asleep import put_to_sleep
from network.speed_worker import Clock, Plan, Sent, all_reduce_bytes

NO_END = ["trainer.max_epochs=-1", "+trainer.limit_val_batches=0"]
"""Steps end a run, and nothing interrupts it."""


def flat(model: Learner) -> Tensor:
    """A copy of all that a mean model is made of, as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in of_mean([model.network])[0]])


class Marks(Clock):
    """The clock, and this host's model after every `every` batches: a copy in memory, so that training goes on.

    Writes `{place}-{rank}.json` (begin, what the clock noted, bytes sent per step, bytes of the parameters) and `.pt`
    [marks, numbers].
    """

    def __init__(self, folder: Path, place: str, every: int, sent: Sent) -> None:
        super().__init__()
        self._path, self._every, self._sent = folder / place, every, sent
        self._begin = 0.0
        self._rows: list[Tensor] = []

    def on_train_start(self, *_: Any) -> None:
        self.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Learner, *_: Any) -> None:
        self.mark(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Learner) -> None:
        self.write(trainer.global_rank, pl_module)

    def begin(self) -> None:
        self._begin = time.monotonic()

    def mark(self, model: Learner) -> None:
        """A step has ended."""
        if (len(self.ends) + 1) % self._every == 0:
            self._rows.append(flat(model))
        self.tick()

    def write(self, rank: int, model: Learner) -> None:
        path = f"{self._path}-{rank}"
        torch.save(torch.stack(self._rows), f"{path}.pt")
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        record = {"begin": self._begin, "ends": self.ends, "sent": self._sent.per_step, "bytes": size}
        record |= {"busy": self.busy, "machine": self.machine, "waited": self.waited}
        Path(f"{path}.json").write_text(json.dumps(record))


class Hook(Callback):
    """A hook of torch's on what `ddp` averages, registered by hand: Lightning does so on CUDA alone.

    `fp16` halves the bytes; `powersgd` sends two factors of rank 4 for a matrix, after ten steps that average all of
    it (torch's own recommendation is a start from a warm model).
    """

    def __init__(self, name: str, sent: Sent) -> None:
        self._name, self._sent = name, sent
        self._state: Any = None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        hook: Any = default_hooks.fp16_compress_hook
        if self._name == "powersgd":
            hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        trainer.strategy.model.register_comm_hook(self._state, hook)

    def on_train_end(self, *_: Any) -> None:
        _, before, after = self._state.compression_stats() if self._state is not None else (0, 2, 1)
        self._sent.per_step *= after / before


OWN = ("hook=", "accumulate=", "peer=")
"""Words that are a benchmark's, not Hydra's."""


def train(plan: Plan, place: str, words: list[str], trainer_words: list[str]) -> tuple[Trainer, Learner, Loaders]:
    """One method on all workers: Hydra's overrides, and `hook=NAME`, `accumulate=BATCHES` of an update, `peer=NAME`.

    A step is a batch of each worker, of which an update may take several.
    """
    own = dict(word.split("=") for word in words if word.startswith(OWN))
    words, together = [word for word in words if not word.startswith(OWN)], int(own.get("accumulate", 1))
    settings = [f"trainer.max_steps={-(-plan['steps'] // together)}", *NO_END, *trainer_words]
    settings += [f"trainer.accumulate_grad_batches={together}"]
    cfg = composed([*plan["words"], *words, *settings], plan["seed"])
    data, model, trainer = built(cfg)
    if plan.get("asleep") is not None:
        put_to_sleep(model, plan["asleep"], own_update=plan.get("own_update", False))
    numbers = sum(p.numel() for p in model.parameters())
    sent = Sent(all_reduce_bytes({"parameters": numbers, "hosts": trainer.world_size}) / together)
    marks = Marks(plan["folder"], place, plan["every"], sent)
    if own.get("peer") == "decent_dp":
        sent.per_step = 4 * numbers
        marks.begin()
        with_decent_dp(cfg, data, model, plan["hosts"], plan["steps"], lambda: marks.mark(model))
        marks.write(int(os.environ["NODE_RANK"]), model)
        return trainer, model, data
    if own.get("peer") == "torchft":
        sent.per_step /= LOCAL
        trainer.callbacks.append(DiLoCo(plan["hosts"], int(place)))
    trainer.callbacks += [sent, *([Hook(own["hook"], sent)] if "hook" in own else []), marks]
    trainer.fit(model, datamodule=data)
    return trainer, model, data


def train_alone(plan: Plan, host: int) -> None:
    """Every host by itself, all at once; writes `alone-{host}.json`: when each step ended."""
    own = [word for word in plan.get("alone", []) if not word.startswith("strategy")]
    settings = [*own, "strategy=auto", f"trainer.max_steps={plan['alone_steps']}", *NO_END]
    data, model, trainer = built(composed([*plan["words"], *settings], plan["seed"]))
    clock = Clock()
    trainer.callbacks.append(clock)
    if plan.get("asleep") is not None:
        put_to_sleep(model, plan["asleep"], own_update=plan.get("own_update", False))
    trainer.fit(model, datamodule=data)
    (plan["folder"] / f"alone-{host}.json").write_text(json.dumps(clock.ends))


def main() -> None:
    """Train alone, then by every method of the plan in turn, in one process group."""
    folder = Path(sys.argv[1])
    plan: Plan = json.loads((folder / "plan.json").read_text()) | {"folder": folder}
    train_alone(plan, int(os.environ["NODE_RANK"]))
    for place, words in enumerate(plan["methods"]):
        train(plan, str(place), words, [f"trainer.num_nodes={plan['hosts']}"])
