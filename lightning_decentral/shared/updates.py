"""Updates that a strategy doesn't see: by a replaced optimizer, past the strategy, or without any optimizer.

What a method does after an update (a round, say) follows `optimizer_step`. Whatever else moves parameters is found: a
step by a hook of torch's optimizers, at once; everything else where an epoch ends, or after `LOOK_BATCHES`, by numbers
of each parameter that have changed while no round was counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_decentral.shared.wire.fsdp import local

LOOK_BATCHES = 128
"""Batches between looks within a long epoch."""

Mixed = tuple[int, Sequence[nn.Parameter]]
"""Number of rounds that were counted, and the parameters that they mix."""


class Follows(Protocol):
    """Method whose work on optimizers goes beyond their steps."""

    def replaced(self) -> None:
        """The optimizers are others than before, on all workers in the same step; before the first of their updates."""

    def mixed(self) -> Sequence[Mixed]:
        """Parameters that move by rounds, and the number of rounds."""


def taken_by_anybody() -> None:
    """Gradients are averaged, whichever optimizer takes them."""


class Unfollowed:
    """Nothing moves by rounds; `replaced` is called where optimizers are others than before."""

    def __init__(self, replaced: Callable[[], None] = taken_by_anybody) -> None:
        self._replaced = replaced

    def replaced(self) -> None:
        self._replaced()

    def mixed(self) -> Sequence[Mixed]:
        return ()


class Trained(Protocol):
    """Strategy whose updates are followed."""

    @property
    def followed(self) -> Follows: ...
    @property
    def drifts(self) -> bool: ...
    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def lightning_module(self) -> Any: ...


class Rounds(Trained, Protocol):
    """Strategy that reports its rounds, one number for each optimizer (`RollCall` documents what they are for)."""

    def rounds(self) -> list[int]:
        """Rounds taken."""

    def wanted(self) -> list[int]:
        """Rounds that the others must have launched before this worker can go on."""

    def take_part(self, index: int) -> None:
        """Run one round of the optimizer with that index, without an update."""


IN_TRAINER = ("what self.optimizers() returns", "self.optimizers(use_pl_optimizer=False)")
IN_LOOP = ("what fabric.setup returned", "the optimizer that it was given")
"""(what to step, what not), where the loop is the user's."""


class Updates:
    """Updates of one fit. Use it as a context around the steps that the strategy takes.

    Args:
        steps: (what to step, what not).

    Raises:
        RuntimeError: where an optimizer, or a part of one, steps past the strategy.
    """

    def __init__(self, of: Trained, steps: tuple[str, str] = IN_TRAINER) -> None:
        self._of, self._inside, self._steps = of, False, steps
        self._known = list(of.optimizers)
        self._moved = Moved(of)
        # Of all optimizers of the process: what steps may be a part of another, or nobody's.
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def __enter__(self) -> None:
        if self._known != self._of.optimizers:  # other objects: an optimizer equals itself alone
            self._known = list(self._of.optimizers)
            self._of.followed.replaced()
        self._inside = True

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def close(self) -> None:
        self._hook.remove()

    def batch(self, last: bool) -> None:
        """Check after each batch; `last` of its epoch."""
        self._moved.batch(last)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside:
            return
        name, (step, bare) = type(optimizer).__name__, self._steps
        if any(optimizer is known for known in self._of.optimizers):
            raise RuntimeError(
                f"{name} stepped past the strategy, so that its parameters are never averaged: step {step}, not {bare}"
            )
        # Where replicas take the same updates gradients have been averaged: they stay equal.
        if self._of.drifts and (whole := _whole(optimizer, self._of.optimizers)):
            raise RuntimeError(
                f"{name} stepped past the strategy as a part of {whole}, so that its parameters are never averaged: "
                f"make it one update, step(closure) of {step}, in which {whole} calls its parts"
            )
        self._moved.past = name


def _whole(part: Optimizer, optimizers: Sequence[Optimizer]) -> str:
    """Name of the optimizer that the part shares groups of parameters with; empty: of none."""
    own = {id(group) for group in part.param_groups}
    return next((type(o).__name__ for o in optimizers if any(id(group) in own for group in o.param_groups)), "")


class Moved:
    """Finds parameters that have moved since the last look while no round was counted.

    Attributes:
        past: an optimizer, none of the trainer's, that has stepped since the last look.

    Raises:
        RuntimeError: in `batch`, where an optimizer has moved them, or where it's the second look; at the first a
            warning.
    """

    def __init__(self, of: Trained) -> None:
        self._of, self.past = of, ""
        self._batches, self._looks = 0, 0
        self._said: set[str] = set()
        self._before = self._now()

    def batch(self, last: bool) -> None:
        self._batches += 1
        if last or self._batches >= LOOK_BATCHES:
            self._look()
            self._batches, self.past = 0, ""

    def _look(self) -> None:
        before, self._before = self._before, self._now()
        moved = {p: now for p, now in self._before.items() if p in before and before[p][1] != now[1]}
        unseen = [p for p, (rounds, _) in moved.items() if rounds >= 0 and rounds == before[p][0]]
        self._looks = self._looks + 1 if unseen else 0
        if unseen:
            self._tell(
                f"{self._name(unseen[0])} moved in the last {self._batches} batches while no round was counted, so "
                "that the workers drift apart: update it by step() of what self.optimizers() returns, once after "
                "whatever else writes to it"
            )
        never = [self._name(p) for p, (rounds, _) in moved.items() if rounds < 0]
        if never and never[0] not in self._said:
            self._said.add(never[0])
            rank_zero_warn(
                f"{never[0]}, one of {len(never)}, moves and no optimizer of the trainer has it, so that it's each "
                "worker's own until the mean is taken: give it to an optimizer, or average it where you write to it"
            )

    def _tell(self, line: str) -> None:
        if self.past:
            raise RuntimeError(f"{self.past} stepped past the strategy: {line}")
        if self._looks > 1:
            raise RuntimeError(line)
        rank_zero_warn(line)

    @torch.no_grad()
    def _now(self) -> Mapping[nn.Parameter, tuple[int, tuple[int, ...]]]:
        """{parameter: (rounds counted, or -1: it isn't mixed; numbers that change where it moves)}."""
        rounds = {p: counted for counted, mixed in self._of.followed.mixed() for p in mixed}
        parameters = [p for p in self._of.lightning_module.parameters() if rounds and p.numel()]
        if not parameters:
            return {}
        rows = torch.stack([_numbers(local(p)).to(local(parameters[0]).device) for p in parameters])
        bits: list[list[int]] = rows.view(torch.int64).tolist()  # NaN is NaN
        return {p: (rounds.get(p, -1), tuple(row)) for p, row in zip(parameters, bits, strict=True)}

    def _name(self, parameter: nn.Parameter) -> str:
        named: dict[nn.Parameter, str] = {p: name for name, p in self._of.lightning_module.named_parameters()}
        return named[parameter]


def _numbers(tensor: Tensor) -> Tensor:
    """(sum, norm), float64 [2]."""
    wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = wide if wide.is_floating_point() and wide.element_size() > 1 else wide.float()
    return torch.stack([whole.sum(dtype=torch.float64), torch.linalg.vector_norm(whole, dtype=torch.float64)])
