"""Cuts and depths that all workers agree on at the first batch, found by a dry run, and their description as text.

The cuts are worker 0's, or those of the resumed checkpoint. Each binding (Trainer, Fabric) defines when a step begins;
this module decides what is cut. The dry run is a training step on a copy of the LightningModule: repeatable, and
without effect on the training itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_decentral.partial.compute.frozen_update import Absent, Skip
from lightning_decentral.partial.compute.search import CutPlan, Cuts, check_wish
from lightning_decentral.partial.compute.trial import Decide, Found, own_state, write_back
from lightning_decentral.partial.plan.cost import Balance, SavedBytes, memory_fraction, selected_fraction
from lightning_decentral.partial.plan.depth import DepthAssignment, ended, top
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.block_cost import Run
from lightning_decentral.shared.compute.buckets import check_bucket_bytes
from lightning_decentral.shared.introduction import of_all_reduce, traffic
from lightning_decentral.shared.wire.meeting.notices import is_loss

STEPS = 10_000  # steps searched for changes of the trained segments, which may come late
ROWS = 8


def options(
    depth: DepthAssignment, cuts: Cuts, balance: Balance | None, absent: Absent | None, bucket_bytes: int | None = None
) -> tuple[DepthAssignment, Cuts, Balance, Absent, int | None]:
    """Check options, and fill in defaults for None. ValueError for options that no network could use."""
    check_wish(cuts)
    check_bucket_bytes(bucket_bytes)
    return depth, cuts, balance or SavedBytes(), absent or Skip(), bucket_bytes


def decided(gather: Callable[[Any], list[Any]], compute: Callable[[], Found]) -> Found:
    """Return worker 0's result of a computation that all workers run equally often, so that collectives match.
    `gather`: collects every worker's value, in order of rank; collective. ValueError: on every worker, if one worker's
    computation refused the cut, with the reason. RuntimeError: on the others, if it failed on one worker with any other
    error."""
    outcome: tuple[Found | None, str, str]
    try:
        outcome = compute(), "", ""
    except ValueError as error:
        outcome = None, str(error), ""
    except Exception as error:
        if not is_loss(error):  # a lost worker: no one is left to inform
            gather((None, "", f"{type(error).__name__}: {error}"))
        raise
    outcomes = gather(outcome)
    for rank, (_, _, failed) in enumerate(outcomes):
        if failed:
            raise RuntimeError(f"worker {rank} found no cuts: its step failed with {failed}")
    for _, refused, _ in outcomes:
        if refused:
            raise ValueError(refused)
    first: Found = outcomes[0][0]
    return first


def found_together(gather: Callable[[Any], list[Any]], find: Callable[[Decide], CutPlan]) -> CutPlan:
    """Find cuts together on all workers, and restore the random number generators' states. Collective."""
    before = worker_state.random_state()  # the search draws from the run's generators
    found = find(partial(decided, gather))
    worker_state.set_random_state(before)
    return found


def wished(cuts: Cuts, saved: Mapping[str, Any] | None) -> Cuts:
    """Return the resumed checkpoint's cuts if it was trained with the same `cuts` option, else this run's option."""
    # Not searched for again: a measured balance may differ today.
    return list(saved["boundaries"]) if saved and saved["wish"] == _text(cuts) else cuts


def remembered(driver: DepthController, cuts: Cuts) -> dict[str, Any]:
    """Return state for a checkpoint: the cuts, and the `cuts` option as text."""
    return {"wish": _text(cuts), "boundaries": list(driver.plan.boundaries)}


def _text(cuts: Cuts) -> str:
    return str(cuts) if isinstance(cuts, (int, str)) else ", ".join(cuts)


def introduced(depth: DepthAssignment, module: nn.Module, size: int) -> Sequence[str]:
    """Describe the method in one line; empty for a single worker."""
    if size == 1:
        return ()
    whole = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    sent = traffic(of_all_reduce(whole, size), whole, size)
    part = f"each trains the top of the network by {depth!r}, the first batch finds the cuts"
    return (f"partial_backprop: {size} workers, {part}, at most {sent}, all have the same model, which is evaluated",)


def described(driver: DepthController, network: str) -> str:
    """Describe the cuts, and the cost of each depth or selection, in a few lines."""
    plan = driver.plan
    if not plan.boundaries:
        return f"partial backprop trains {network} in full: the model has one layer, so there is nothing to cut"
    chain = f" of {plan.chain}" if plan.chain else ""
    head = f"partial backprop, {driver.assignment}: {plan.segments} segments{chain}"
    return "\n".join([head, f"  cut before {', '.join(plan.boundaries)}", *_rows(driver)])


def _rows(driver: DepthController) -> Iterator[str]:
    assignment, size, warm_up = driver.assignment, driver.place.size, int(driver.assignment.warm_up)
    # Steps to show: the first of the warm-up, then many early ones and fewer later ones.
    steps = {0, *(warm_up + step for step in (*range(100), *range(100, STEPS, 97)))}
    trained = {assignment.trained(rank, size, step, driver.plan.segments) for step in steps for rank in range(size)}
    kinds = sorted(trained, key=lambda own: (-len(own), own))
    costs, sizes = driver.plan.costs, [cost.parameter_bytes for cost in driver.plan.costs]
    for own in kinds[:ROWS]:
        depth = len(costs) - (lowest := driver.lowest(own))
        passing = own != top(depth, len(costs))
        some = f"segment{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        # What bypassed segments save depends on their layers: a matrix product saves nothing to pass a gradient on.
        yield (
            f"  {some if passing else f'depth {depth} of {len(costs)}'}: compute "
            f"{selected_fraction(costs, own, lowest):.2f}, saved activations {'at most ' * passing}"
            f"{memory_fraction(costs, depth):.2f}, gradients {sum(sizes[s] for s in own) / max(1, sum(sizes)):.2f} "
            "of full"
        )
    if len(kinds) > ROWS:
        yield f"  and {len(kinds) - ROWS} more"


# ---- the dry run -------------------------------------------------------------------------------------


def refuse_unserved(module: LightningModule) -> None:
    """Raise ValueError for a backward other than Lightning's, as it's unknown when its gradients are complete."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} optimizes manually, so it is unknown which backward completes its gradients: "
            "use automatic optimization, or strategy='ddp'"
        )
    if type(module).backward is not LightningModule.backward:
        raise ValueError(
            f"{name} overrides backward, and its own backward may run no autograd backward or several: "
            "remove LightningModule.backward, or use strategy='ddp'"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name}'s training_step draws its own batches (dataloader_iter), but the search for cuts repeats the "
            "first batch: take a batch as argument, or use strategy='ddp'"
        )
    if module._compiler_ctx is not None:
        raise ValueError(
            f"{name} was compiled as a whole, but a cut changes what runs: compile its blocks instead (block.compile())"
        )


def timed(depth: DepthAssignment, trainer: Trainer, saved: Mapping[str, Any]) -> DepthAssignment:
    """Return the assignment with its warm-up in steps of this run: the resumed checkpoint's (`warm_up_state`) if it had
    the same assignment, otherwise worker 0's estimate. Every worker calls this at the same point."""
    if saved.get("assignment") == repr(depth):  # a longer run resumes where the shorter one was
        return replace(depth, warm_up=saved["warm_up"])
    total_steps = trainer.estimated_stepping_batches
    if 0 < depth.warm_up < 1 and not ended(total_steps):
        rank_zero_warn(
            f"partial backprop begins at once: warm_up={depth.warm_up} is a fraction of the run, but this run has no "
            "known end. Give warm_up in steps, or max_steps to the Trainer"
        )
    return replace(depth, warm_up=trainer.strategy.broadcast(depth.timed(total_steps).warm_up))


def warm_up_state(depth: DepthAssignment, in_steps: DepthAssignment) -> dict[str, Any]:
    """State for a checkpoint: the assignment as given, and its warm-up in steps."""
    return {"assignment": repr(depth), "warm_up": in_steps.warm_up}


def step_of(trainer: Trainer, trial: Any, *args: Any, **kwargs: Any) -> Run:
    """Return a function that runs `trial.training_step(*args)` and returns its loss; logging stays off while the entry
    `log` is in the module's `__dict__`."""
    trial.trainer = trainer
    trial.__dict__["log"] = lambda *_, **__: None  # a trial's values are no metrics

    def run() -> Tensor:
        # Copies: a step may write into its batch, which the next run reads.
        copied = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
        own, named = tree_map_only(Tensor, copied, (args, kwargs))
        with trainer.strategy.precision_plugin.train_step_context():
            match trial.training_step(*own, **named):
                case Tensor() as loss:
                    return loss
                case {"loss": Tensor() as loss}:
                    return loss
        raise ValueError("the first training_step returned no loss, but cuts are verified by its gradients: return one")

    return run


def run_of(trainer: Trainer, *args: Any, **kwargs: Any) -> Callable[[torch.nn.Module], Run]:
    """Return a function f: f(copy) is a function that runs `copy.training_step(*args)`, each time alike."""
    return repeated(lambda trial: step_of(trainer, trial, *args, **kwargs))


def repeated(step_of: Callable[[Any], Run]) -> Callable[[torch.nn.Module], Run]:
    """Return a function from a module's copy to a function that repeats its step, each time from the same state.

    Restored are random numbers, buffers (fake quantization's ranges, a spectral norm's iterates) and plain attributes.
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
                    write_back(buffer, before[name])  # a step may have given a buffer its size
            put_back_own()
            return step()

        return run

    return prepared
