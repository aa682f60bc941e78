"""Faults of a single worker while all train, and workers with an impossible rank or world size."""

import os
from collections.abc import Callable, Iterator

import torch
from lightning.pytorch import LightningModule

from faults.kinds import STEP, Act, hook, on
from faults.row import Row, struck
from faults.runs import LINE
from faults.worker import Fault

ALIKE = ("compressed", "partial_backprop")
"""Methods under which all replicas are equal after each update."""


def _act(act: Callable[[LightningModule], object]) -> Act:
    def acting(module: LightningModule | None) -> None:
        assert module is not None
        act(module)

    return acting


def _shift(module: LightningModule) -> None:
    with torch.no_grad():
        next(module.parameters()).view(-1)[0] += 1


def _shift_buffer(module: LightningModule) -> None:
    next(b for b in module.buffers() if b.is_floating_point()).view(-1)[0] += 1


CALLS: dict[str, Callable[[LightningModule], object]] = {
    "log with sync_dist": lambda module: module.log("alone", torch.ones(()), sync_dist=True, on_step=True),
    "all_gather": lambda module: module.all_gather(torch.ones(1)),
    "barrier": lambda module: module.trainer.strategy.barrier(),
}

PLACES: dict[str, dict[str, str]] = {
    "GLOO_SOCKET_IFNAME of an interface that isn't there": {"GLOO_SOCKET_IFNAME": "nope0"},
    "MASTER_PORT=70000": {"MASTER_PORT": "70000"},
    "MASTER_PORT=abc": {"MASTER_PORT": "abc"},
    "MASTER_ADDR that nobody knows": {"MASTER_ADDR": "no.such.host.invalid"},
    "LOCAL_RANK=3 of 2 devices": {"LOCAL_RANK": "3"},
}


def variables(words: dict[str, str]) -> Fault:
    """A worker has other environment variables than the others."""
    return lambda worker: os.environ.update(words)


def rows() -> Iterator[Row]:
    at = hook("on_train_batch_end", STEP)
    for method in ("gossip", *ALIKE):
        for call, act in CALLS.items():
            if method == "gossip" or act is CALLS["log with sync_dist"]:
                yield struck("one worker alone", f"worker 1 calls {call}", method, [on(1, at(_act(act)))], (), (LINE,))
        grown = [on(1, at(_act(lambda module: module.register_buffer("late", torch.zeros(3)))))]
        yield struck("one worker alone", "worker 1 registers a buffer", method, grown, (), (LINE,), pattern="apart")
    for method in ALIKE:
        yield struck(
            "one worker alone", "a parameter of worker 1 is changed", method, [on(1, at(_act(_shift)))], (), (LINE,),
            pattern="must be equal",
        )  # fmt: skip
        yield struck("one worker alone", "a buffer of worker 1 is changed", method, [on(1, at(_act(_shift_buffer)))])
    for fault, words in PLACES.items():
        yield struck("places", f"worker 1 with {fault}", "gossip", [on(1, variables(words))], (), (LINE,))
