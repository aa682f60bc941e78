"""One host of `network/speed.py`: trains a model that sleeps instead of computing, with one method after another."""

import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common.hardware import machine_seconds, waited_seconds
from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import Exponential, Gossip, Int8, OnePeerExponential, Ring

torch.set_num_threads(1)
logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

Plan = dict[str, Any]


class Layer(torch.autograd.Function):
    """Sleeps `seconds` forward and twice as long backward, and has a gradient for every parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None, *(torch.full_like(weight, 1e-6) for weight in ctx.saved_tensors)


class Sleeper(nn.Module):
    """`layers` layers of equal size and time; one host in each step is `straggler` times slower."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        each = plan["parameters"] // plan["layers"]
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(each)) for _ in range(plan["layers"])])
        self.plan, self.step = plan, 0

    def forward(self, x: Tensor) -> Tensor:
        plan = self.plan
        slow = random.Random(plan["seed"] + self.step).randrange(plan["hosts"])
        seconds = plan["compute"] / plan["layers"] / 3
        if slow == int(os.environ["NODE_RANK"]):
            seconds *= plan["straggler"]
        self.step += 1
        x = x.clone().requires_grad_()
        for weight in self.weights:
            x = Layer.apply(x, seconds, weight)
        return x.sum()


class Linears(nn.Module):
    """Square layers that compute 64 rows a step, as many as the others and of about as many numbers. All hosts share
    the processors."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        width = round((plan["parameters"] / plan["layers"]) ** 0.5)
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(plan["layers"])])
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.expand(64, self.width) + 1).square().mean()


MODELS: dict[str, Callable[[Plan], nn.Module]] = {"sleeping": Sleeper, "linear": Linears}


class Module(LightningModule):
    """The model under SGD."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.net = MODELS[plan["model"]](plan)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Callback that notes when each step ended, by the clock that all hosts share.

    It notes processor seconds, too: of this host, of the whole machine, and those for which this host waited.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.busy: list[float] = []
        self.machine: list[float] = []
        self.waited: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()

    def tick(self) -> None:
        """A step has ended."""
        self.ends.append(time.monotonic())
        self.busy.append(time.process_time())
        self.machine.append(machine_seconds())
        self.waited.append(waited_seconds())


class NoBroadcast(Callback):
    """Takes out Lightning's broadcast of a flag before every batch, to see what it costs."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def all_reduce_bytes(plan: Plan) -> float:
    """2 (n - 1) / n of the gradients: what a ring sends from each host."""
    return 8 * plan["parameters"] * (plan["hosts"] - 1) / plan["hosts"]


def with_lightning(make: Callable[[], Strategy], *callbacks: Callback) -> Callable[[Plan], dict[str, Any]]:
    """A run under a Trainer."""

    def run(plan: Plan) -> dict[str, Any]:
        clock, sent = Clock(), Sent(all_reduce_bytes(plan))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=plan["hosts"],
            strategy=make(),
            max_steps=plan["steps"],
            callbacks=[clock, sent, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        images = TensorDataset(torch.zeros(plan["steps"] * plan["hosts"], 1))
        trainer.fit(Module(plan), DataLoader(images))
        return {"ends": clock.ends, "busy": clock.busy, "sent": sent.per_step}

    return run


class Sent(Callback):
    """Bytes that this host sends per step: as our strategies count them, none by itself, an all-reduce's under ddp."""

    def __init__(self, all_reduce: float) -> None:
        self.per_step = all_reduce

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, SingleDeviceStrategy):
            self.per_step = 0.0
        if isinstance(trainer.strategy, CompressedStrategy):
            self.per_step = trainer.strategy.sent_bytes / trainer.global_step
        if isinstance(trainer.strategy, GossipStrategy):
            trainer.strategy.settle()  # the last rounds may have to leave
            self.per_step = trainer.strategy.traffic().bytes_sent / trainer.global_step


def with_decent_dp(plan: Plan) -> dict[str, Any]:
    """The seed paper's own package in its own loop, one-peer exponential graph."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()

    def sgd(parameters: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=1e-3)

    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    model = DecentralizedDataParallel(
        MODELS[plan["model"]](plan), optim_fn=sgd, topology="one-peer-exp", bucket_size_in_mb=4
    )
    clock = Clock()
    for _ in range(plan["steps"]):
        model.zero_grad()
        model(torch.zeros(1, 1)).backward()
        clock.tick()
    return {"ends": clock.ends, "busy": clock.busy, "sent": 4 * plan["parameters"]}


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp, 4 MB buckets": lambda: DDPStrategy(bucket_cap_mb=4),
    "compressed": CompressedStrategy,
    "gossip": GossipStrategy,
    "gossip, one-peer exponential": lambda: GossipStrategy(topology=OnePeerExponential()),
    "gossip, exponential": lambda: GossipStrategy(topology=Exponential()),
    "gossip, ring": lambda: GossipStrategy(topology=Ring()),
    "gossip, delay 0": lambda: GossipStrategy(delay=0),
    "gossip, delay 2": lambda: GossipStrategy(delay=2, combine=Gossip(rate=0.6)),
    "gossip, delay 4": lambda: GossipStrategy(delay=4, combine=Gossip(rate=0.4)),
    "gossip, int8": lambda: GossipStrategy(codec=Int8()),
    "gossip, int8, delay 2": lambda: GossipStrategy(codec=Int8(), delay=2, combine=Gossip(rate=0.6)),
}
METHODS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    **{name: with_lightning(make) for name, make in STRATEGIES.items()},
    "ddp, 4 MB buckets, no broadcast": with_lightning(STRATEGIES["ddp, 4 MB buckets"], NoBroadcast()),
    "decent-dp": with_decent_dp,
    "alone": with_lightning(lambda: SingleDeviceStrategy(torch.device("cpu"))),  # every host by itself
}


def main() -> None:
    """Every method of the plan in turn, in one process group; writes `place-rank.json` for each."""
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    rank = int(os.environ["NODE_RANK"])
    for place, method in enumerate(plan["methods"]):
        record = METHODS[method](plan)
        (folder / f"{place}-{rank}.json").write_text(json.dumps(record))
