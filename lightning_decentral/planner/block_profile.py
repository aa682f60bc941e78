"""Profiles a training step block by block: seconds of forward, backward and update; bytes of each.

seconds(block) = median over passes (`shared.compute.block_cost`) of its forward and of its backward
update(block)  = seconds of the whole update * (its update alone) / (sum over blocks of their updates alone)
products_per_second = operations of Newton-Schulz on the hidden matrices / its seconds, median over repeats"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim.newton_schulz import orthogonalize
from lightning_decentral.optim.roles import muon_groups
from lightning_decentral.planner.plan.optimizer_cost import operations
from lightning_decentral.shared.compute.block_cost import BlockPass, Run, Seconds, measure, parameter_bytes
from lightning_decentral.shared.compute.hardware import duration
from lightning_decentral.shared.plan.profile import BlockCost, Sides

WARM_UP = 2
REPEATS = 7
WARM_UP_TURNS, TURNS = 1, 3  # Timed calls of Newton-Schulz.


def measure_blocks(
    root: nn.Module,
    names: Sequence[str],  # modules at whose inputs a block ends and the next begins (`partial.joints`)
    run: Run,  # runs one forward and returns its loss
    optimizers: Sequence[Optimizer],  # their moments change in the measurement, the weights don't
    device: torch.device,
    done: Callable[[], None] = lambda: None,  # called after each of `WARM_UP + REPEATS` passes
) -> tuple[BlockCost, ...]:
    """Measure the blocks of a training step, from the inputs to the loss; one block without names."""
    members = _members(root, names, run, device)
    costs = measure(root, names, [parameter_bytes(parameters) for parameters in members], run)
    passes = [_pass(root, names, run, device, done) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    forward = _medians([p.forward() for p in passes])
    backward = _medians([p.backward() for p in passes])
    update = _update(optimizers, members, device)
    root.zero_grad(set_to_none=True)
    outputs = [*passes[-1].output_bytes[1:], 0]
    known = hidden_of(root)
    hidden = [sides(block, known) for block in members]
    rows = zip(costs, forward, backward, update, outputs, hidden, strict=True)
    return tuple(
        replace(c, forward_seconds=f, backward_seconds=b, update_seconds=u, output_bytes=o, hidden=h)
        for c, f, b, u, o, h in rows
    )


def _pass(root: nn.Module, names: Sequence[str], run: Run, device: torch.device, done: Callable[[], None]) -> BlockPass:
    root.zero_grad(set_to_none=True)
    found = BlockPass(root, names, device)
    found.run(run)
    done()
    if found.passes > 1:
        raise ValueError(
            f"the step runs {type(root).__name__} {found.passes} times, blocks are measured in one pass each"
        )
    return found


def _members(root: nn.Module, names: Sequence[str], run: Run, device: torch.device) -> list[list[nn.Parameter]]:
    """Group parameters by block, without those that no gradient reached."""
    members: list[list[nn.Parameter]] = [[] for _ in range(len(names) + 1)]
    found = BlockPass(root, names, device)
    trained = [p for p in root.parameters() if p.requires_grad]
    # The block in whose backward the gradient is complete (of a tied parameter the lower block): then it may be sent.
    hooks = [p.register_post_accumulate_grad_hook(lambda p: members[found.block].append(p)) for p in trained]
    try:
        found.run(run)
    finally:
        for hook in hooks:
            hook.remove()
    root.zero_grad(set_to_none=True)
    return members


def _medians(rows: Sequence[Seconds]) -> Seconds:
    return [median(column) for column in zip(*rows, strict=True)]


def _update(optimizers: Sequence[Optimizer], members: Sequence[list[nn.Parameter]], device: torch.device) -> Seconds:
    """Measure the seconds of each block's update with the present gradients, at a learning rate of 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def alone(block: int) -> float:
        kept = {p: p.grad for other in members if other is not members[block] for p in other}
        for parameter in kept:
            parameter.grad = None
        seconds = duration(step, device)
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return seconds if members[block] else 0.0

    try:
        for group in groups:
            group["lr"] = 0.0
        # The first call, in which optimizers may make their state, doesn't count.
        times = [(duration(step, device), [alone(b) for b in range(len(members))]) for _ in range(1 + REPEATS)][1:]
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    parts = _medians([part for _, part in times])
    return [median(whole for whole, _ in times) * part / (sum(parts) or 1.0) for part in parts]


def hidden_of(root: nn.Module) -> list[nn.Parameter]:
    """Parameters that are hidden matrices for `Muon`, in order."""
    hidden: list[nn.Parameter] = muon_groups(root)[0]["params"]
    return hidden


def sides(matrices: Iterable[Tensor], among: Collection[nn.Parameter]) -> tuple[Sides, ...]:
    """Sides of the matrices that are among these parameters; a filter [out, in, ...] is a matrix [out, rest]."""
    taken = set(among)
    pairs = ((len(m), m.numel() // len(m)) for m in matrices if m in taken)
    return tuple((min(pair), max(pair)) for pair in pairs)


@torch.no_grad()
def products_per_second(matrices: Sequence[nn.Parameter], device: torch.device) -> float:
    """Operations per second of `Muon`'s Newton-Schulz on copies; 0 without matrices, or if too fast to measure."""
    copies = [matrix.detach().clone() for matrix in matrices]
    if not copies:
        return 0.0
    turns = [duration(partial(orthogonalize, copies), device) for _ in range(WARM_UP_TURNS + TURNS)][WARM_UP_TURNS:]
    seconds = median(turns)
    return operations(sides(matrices, matrices)) / seconds if seconds > 0 else 0.0


def states_of(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the states that have their parameters' shapes, over all optimizers."""
    found: dict[str, int] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    found[name] = found.get(name, 0) + value.nbytes
    return tuple(found.items())
