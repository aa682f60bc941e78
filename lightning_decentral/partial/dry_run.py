"""Dry run: a training step of a copy of the LightningModule, repeatable and without a trace in the run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_decentral.partial.compute.trial import own_state, write_back
from lightning_decentral.partial.plan.depth import DepthAssignment, ended
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.block_cost import Run


def refuse_unserved(module: LightningModule) -> None:
    """ValueError for modules whose backward isn't Lightning's: nobody knows when their gradients are complete."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} optimizes manually, so nobody knows which backward completes its gradients: "
            "use automatic optimization, or strategy='ddp'"
        )
    if type(module).backward is not LightningModule.backward:
        raise ValueError(
            f"{name} overrides backward by hand, which may run none or several: "
            "remove LightningModule.backward, or use strategy='ddp'"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name}'s training_step draws its own batches (dataloader_iter), and the search for cuts repeats the "
            "first one: take a batch, or use strategy='ddp'"
        )
    if module._compiler_ctx is not None:
        raise ValueError(
            f"{name} was compiled as a whole, the cut changes what runs: compile its blocks instead (block.compile())"
        )


def timed(depth: DepthAssignment, trainer: Trainer, saved: Mapping[str, Any]) -> DepthAssignment:
    """The assignment with its warm-up in steps of this run. Every worker calls it at the same point.

    Those of the checkpoint that is resumed (`warm_up_state`) where it had the same assignment; otherwise worker 0's
    estimate.
    """
    if saved.get("assignment") == repr(depth):  # a longer run goes on where the shorter one was
        return replace(depth, warm_up=saved["warm_up"])
    total_steps = trainer.estimated_stepping_batches
    if 0 < depth.warm_up < 1 and not ended(total_steps):
        rank_zero_warn(
            f"partial backprop begins at once: a warm_up of {depth.warm_up} is a part of the run, and this run has no "
            "known end; give warm_up in steps, or max_steps to the Trainer"
        )
    return replace(depth, warm_up=trainer.strategy.broadcast(depth.timed(total_steps).warm_up))


def warm_up_state(depth: DepthAssignment, in_steps: DepthAssignment) -> dict[str, Any]:
    """State for a checkpoint: the assignment as it was asked for, and its warm-up in steps."""
    return {"assignment": repr(depth), "warm_up": in_steps.warm_up}


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        ValueError: there is none.
    """
    match output:
        case Tensor() as loss:
            return loss
        case {"loss": Tensor() as loss}:
            return loss
        case _:
            raise ValueError(
                "the first training_step returned no loss, and cuts are verified by its gradients: return one"
            )


def step_of(trainer: Trainer, trial: Any, *args: Any, **kwargs: Any) -> Run:
    """A function that runs `trial.training_step(*args)` and returns its loss; logs nothing as long as the entry `log`
    stays in the module's `__dict__`."""
    trial.trainer = trainer
    trial.__dict__["log"] = lambda *_, **__: None  # what a trial computes is nobody's metric

    def run() -> Tensor:
        # Copies, as a step may write into its batch, which the next one reads.
        copied = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
        own, named = tree_map_only(Tensor, copied, (args, kwargs))
        with trainer.strategy.precision_plugin.train_step_context():
            return loss_of(trial.training_step(*own, **named))

    return run


def run_of(trainer: Trainer, *args: Any, **kwargs: Any) -> Callable[[torch.nn.Module], Run]:
    """Return f: f(copy) is a function that runs `copy.training_step(*args)`, each time alike."""
    return repeated(lambda trial: step_of(trainer, trial, *args, **kwargs))


def repeated(step_of: Callable[[Any], Run]) -> Callable[[torch.nn.Module], Run]:
    """Function from a copy of the module to one that repeats its step: the same random numbers, buffers and plain
    attributes. A step changes these: ranges that fake quantization has seen, the iterates of a spectral norm, counters.
    """
    random = worker_state.random_state()

    def prepared(trial: Any) -> Run:
        step = step_of(trial)
        before = {name: buffer.detach().clone() for name, buffer in trial.named_buffers()}
        put_back_own = own_state(trial)

        def run() -> Tensor:
            worker_state.set_random_state(random)
            for name, buffer in trial.named_buffers():
                if name in before:
                    write_back(buffer, before[name])  # one may have been given its size by a step
            put_back_own()
            return step()

        return run

    return prepared
