"""Workers that were given different settings, code, versions or data."""

from collections.abc import Iterator
from datetime import timedelta

import torch
from lightning.pytorch import LightningModule
from torch import nn

from faults.kinds import changed, made, module, on, strategy, trainer, version
from faults.row import EITHER, Row, struck
from faults.runs import GOES_ON, LINE
from faults.worker import Fault
from lightning_decentral import gossip, partial, pipeline

GROUP = "settings that differ"

GOSSIP: dict[str, Fault] = {
    "delay 0 beside 1": strategy(delay=0),
    "codec Int8 beside Plain": strategy(codec=gossip.Int8()),
    "topology Complete beside Ring": strategy(topology=gossip.Complete()),
    "another seed of RandomMatching": strategy(topology=gossip.RandomMatching(seed=7)),
    "rule PushSum beside Gossip": strategy(combine=gossip.PushSum()),
    "another rate": strategy(combine=gossip.Gossip(rate=0.5)),
    "weights Dyadic beside the topology's": strategy(weights=gossip.Dyadic()),
    "another bucket_bytes": strategy(bucket_bytes=64),
    "evaluate own beside mean": strategy(evaluate="own"),
    "another timeout": strategy(timeout=timedelta(minutes=3)),
    "precision bf16-mixed beside 32": trainer(precision="bf16-mixed"),
    "precision 64 beside 32": trainer(precision="64-true"),
    "accumulate_grad_batches 2 beside 1": trainer(accumulate_grad_batches=2),
    "gradient clipping beside none": trainer(gradient_clip_val=0.1),
    "max_steps 5 beside none": trainer(max_steps=5),
    "max_epochs 2 beside 3": trainer(max_epochs=2),
    "limit_train_batches 2 beside none": trainer(limit_train_batches=2),
    "limit_val_batches 1 beside none": trainer(limit_val_batches=1),
    "no validation beside validation": trainer(limit_val_batches=0),
    "val_check_interval 2 beside the epoch's end": trainer(val_check_interval=2),
    "check_val_every_n_epoch 2 beside 1": trainer(check_val_every_n_epoch=2),
    "two sanity validation steps beside none": trainer(num_sanity_val_steps=2),
    "a wider model": module(width=16),
    "package 0.0.1 beside this one": version("lightning_decentral", "0.0.1"),
    "torch 2.6.0 beside this one": version("torch", "2.6.0"),
    "Lightning 2.4.0 beside this one": version("lightning.pytorch", "2.4.0"),
}


def _doubled(plain: LightningModule) -> LightningModule:
    return plain.double()


def _with_buffer(plain: LightningModule) -> LightningModule:
    plain.register_buffer("more", torch.zeros(3))
    return plain


def _frozen(plain: LightningModule) -> LightningModule:
    plain.get_submodule("first").requires_grad_(False)
    return plain


def _renamed(plain: LightningModule) -> LightningModule:
    plain.add_module("extra", nn.Linear(2, 2))
    return plain


MODELS = {
    "a model in float64": made(_doubled),
    "one more buffer": made(_with_buffer),
    "a frozen layer": made(_frozen),
    "one more layer": made(_renamed),
}

HARMLESS = {"another learning rate": module(learning_rate=0.02), "another momentum": module(momentum=0.5)}

OTHERS: dict[str, dict[str, Fault]] = {
    "partial_backprop": {
        "another depth": strategy(depth=partial.Full()),
        "other cuts": strategy(cuts=["norm"]),
        "accumulate_grad_batches 2 beside 1": trainer(accumulate_grad_batches=2),
        "max_steps 5 beside none": trainer(max_steps=5),
    },
    "token_pipeline": {
        "other slices": strategy(slicing=pipeline.Given((4, 4))),
        "microbatches 2 beside 1": strategy(microbatches=2),
        "accumulate_grad_batches 2 beside 1": trainer(accumulate_grad_batches=2),
        "max_steps 5 beside none": trainer(max_steps=5),
    },
}


def rows() -> Iterator[Row]:
    for fault, act in {**GOSSIP, **MODELS}.items():
        yield _refused(fault, "gossip", [strategy(topology=_ring(fault)), on(1, act)])
    halves = [strategy(codec=gossip.BFloat16()), on(1, strategy(codec=gossip.Float16()))]
    yield _refused("codec Float16 beside BFloat16", "gossip", halves)
    other = [on(1, changed(method="partial_backprop"))]
    yield _refused("strategy partial_backprop beside gossip", "gossip", other)
    for method, faults in OTHERS.items():
        for fault, act in faults.items():
            yield _refused(fault, method, [on(1, act)])
    for fault, act in HARMLESS.items():
        yield struck(GROUP, fault, "gossip", [on(1, act)], (), (GOES_ON,))
    for method in ("gossip", "partial_backprop"):
        due = (GOES_ON,) if method == "gossip" else EITHER
        yield struck("data", "3 batches beside 4", method, [on(1, changed(lengths=(3, 2)))], (), due)
        yield struck("data", "1 validation batch beside 2", method, [on(1, changed(lengths=(4, 1)))], (), EITHER)
        yield struck("data", "no batches beside 4", method, [on(1, changed(lengths=(0, 2)))], (), EITHER)


def _refused(fault: str, method: str, faults: list[Fault]) -> Row:
    """Return a row that ends by a line about settings, not about a worker that went away over them."""
    return struck(GROUP, fault, method, faults, (), (LINE,), pattern="^ValueError")


def _ring(fault: str) -> gossip.Topology:
    """Return the topology of the other worker where topologies differ."""
    return gossip.RandomMatching(seed=3) if "RandomMatching" in fault else gossip.Ring()
