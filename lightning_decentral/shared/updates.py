"""Updates of the optimizers: their gradients before, whatever moves parameters past the strategy afterwards.

Gradients that hold NaN or infinity are judged before the update, where all workers take the same ones.

What a method does after an update (a round, say) follows `optimizer_step`. Whatever else moves parameters is found: a
step by a hook of torch's optimizers, at once; everything else where an epoch ends, or after `LOOK_BATCHES`, by numbers
of each parameter that have changed while no round was counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.compute.health import scale
from lightning_decentral.shared.wire.fsdp import local

NonFinite = Literal["stop", "skip"]


class Unchecked:
    """Gradients are each worker's own affair, or a loss scaler's.

    Attributes:
        nonfinite: what becomes of a step whose gradients hold NaN or infinity.
        skipped: steps taken without an update so far.
    """

    nonfinite: str = "stop"
    skipped = 0

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        """The closure, and behind it a judgement of its gradients, before the update."""
        return closure

    def of_step(self, given: dict[str, Any], optimizer: Optimizer, precision: Precision) -> dict[str, Any]:
        """Arguments that a user's loop gives `optimizer.step`: gradients are there already, or come by its closure."""
        if given.get("closure") is not None:
            return {**given, "closure": self.after(given["closure"], optimizer, precision)}
        self.after(lambda: None, optimizer, precision)()
        return given


class BeforeUpdate(Unchecked):
    """Nothing is judged; `call` is given the optimizer once its gradients are there, before the update.

    What is thawed within the step is known by then, and no parameter has moved yet.
    """

    def __init__(self, call: Callable[[Optimizer], None]) -> None:
        self._call = call

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        def called() -> Any:
            output = closure()
            self._there(optimizer, precision)
            return output

        return called

    def _there(self, optimizer: Optimizer, precision: Precision) -> None:
        self._call(optimizer)


class GradientCheck(BeforeUpdate):
    """Gradients that are equal on all workers are judged alike on all of them: nobody has to be asked, none waits.

    Args:
        nonfinite: "stop" raises a FloatingPointError on all workers: at once on the host, one step later on a device,
            which nobody waits for. "skip" takes the step without an update, and worker 0 reports it; a device is waited
            for.
        settle: given the optimizer once its gradients are there, before they are judged.

    Raises:
        ValueError: another value.
    """

    def __init__(self, nonfinite: NonFinite, settle: Callable[[Optimizer], None] | None = None) -> None:
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite must be 'stop' or 'skip', got {nonfinite!r}")
        self.nonfinite, self._settle = nonfinite, settle
        self._last: AsyncRead | None = None

    def _there(self, optimizer: Optimizer, precision: Precision) -> None:
        if self._settle is not None:
            self._settle(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters or getattr(precision, "scaler", None):
            return  # a scaler's first steps overflow, and it skips them by itself
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters]
        found = AsyncRead(torch.isfinite(scale(gradients)))
        last: AsyncRead | None = found
        if self.nonfinite == "stop" and not found.on_host:  # judged by the next step: nobody waits for a device
            last, self._last = self._last, found
        if last is None or last.read():
            return
        if self.nonfinite == "stop":
            raise FloatingPointError(
                "the gradients hold NaN or infinity on all workers: lower the learning rate, clip gradients "
                "(gradient_clip_val), find the operation with detect_anomaly=True, or leave out such steps with "
                "nonfinite='skip'"
            )
        # Without gradients an optimizer leaves parameters and their state alone; zeros would still decay them.
        for parameter in parameters:
            parameter.grad = None
        self.skipped += 1
        rank_zero_warn(f"the gradients of a step hold NaN or infinity: no worker updates ({self.skipped} skipped)")


LOOK_BATCHES = 128  # Batches between looks within a long epoch.

Mixed = tuple[int, Sequence[nn.Parameter]]  # Number of rounds that were counted, and the parameters that they mix.


class Follows(Protocol):
    """Method whose work on optimizers goes beyond their steps."""

    def replaced(self) -> None:
        """The optimizers are others than before, on all workers in the same step; before the first of their updates."""

    def mixed(self) -> Sequence[Mixed]:
        """Parameters that move by rounds, and the number of rounds."""


class Unfollowed:
    """Nothing moves by rounds; `replaced` is called where optimizers are others than before, if it matters whose."""

    def __init__(self, replaced: Callable[[], None] | None = None) -> None:
        self._replaced = replaced

    def replaced(self) -> None:
        if self._replaced is not None:
            self._replaced()

    def mixed(self) -> Sequence[Mixed]:
        return ()


class FollowedStrategy(Protocol):
    """Strategy whose updates are followed."""

    @property
    def followed(self) -> Follows: ...
    @property
    def drifts(self) -> bool: ...
    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def lightning_module(self) -> Any: ...


IN_TRAINER = ("what self.optimizers() returns", "self.optimizers(use_pl_optimizer=False)")
IN_LOOP = ("what fabric.setup returned", "the optimizer that it was given")
"""(what to step, what not), where the loop is the user's."""


class Updates:
    """Updates of one fit. Use it as a context around the steps that the strategy takes; `moved` is asked each batch.

    Args:
        steps: (what to step, what not).

    Raises:
        RuntimeError: where an optimizer, or a part of one, steps past the strategy.
    """

    def __init__(self, of: FollowedStrategy, steps: tuple[str, str] = IN_TRAINER) -> None:
        self._of, self._inside, self._steps = of, False, steps
        self._known = list(of.optimizers)
        self.moved = Moved(of)
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

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside:
            return
        name, (step, bare) = type(optimizer).__name__, self._steps
        if any(optimizer is known for known in self._of.optimizers):
            raise RuntimeError(
                f"{name} stepped past the strategy, so that its parameters are never averaged: step {step}, not {bare}"
            )
        own = {id(group) for group in optimizer.param_groups}
        sharing = (o for o in self._of.optimizers if any(id(group) in own for group in o.param_groups))
        # Where replicas take the same updates gradients have been averaged: they stay equal.
        if self._of.drifts and (whole := next((type(o).__name__ for o in sharing), "")):
            raise RuntimeError(
                f"{name} stepped past the strategy as a part of {whole}, so that its parameters are never averaged: "
                f"make it one update, step(closure) of {step}, in which {whole} calls its parts"
            )
        self.moved.past = name


class Moved:
    """Finds parameters that have moved since the last look while no round was counted.

    Attributes:
        past: an optimizer, none of the trainer's, that has stepped since the last look.

    Raises:
        RuntimeError: in `batch`, where an optimizer has moved them, or where it's the second look; at the first a
            warning.
    """

    def __init__(self, of: FollowedStrategy) -> None:
        self._of, self.past = of, ""
        self._batches, self._looks = 0, 0
        self._reported: set[str] = set()
        self._before = self._now()

    def batch(self, last: bool) -> None:
        """Check after each batch; `last` of its epoch."""
        self._batches += 1
        if last or self._batches >= LOOK_BATCHES:
            self._look()
            self._batches, self.past = 0, ""

    def _look(self) -> None:
        before, self._before = self._before, self._now()
        moved = {p: now for p, now in self._before.items() if p in before and before[p][1] != now[1]}
        unseen = [p for p, (rounds, _) in moved.items() if rounds >= 0 and rounds == before[p][0]]
        self._looks = self._looks + 1 if unseen else 0
        names = {p: name for name, p in self._of.lightning_module.named_parameters()}
        if unseen:
            line = (
                f"{names[unseen[0]]} moved in the last {self._batches} batches while no round was counted, so "
                "that the workers diverge: update it by step() of what self.optimizers() returns, once after "
                "whatever else writes to it"
            )
            if self.past or self._looks > 1:
                raise RuntimeError(f"{self.past} stepped past the strategy: {line}" if self.past else line)
            rank_zero_warn(line)
        never = [names[p] for p, (rounds, _) in moved.items() if rounds < 0]
        if never and never[0] not in self._reported:
            self._reported.add(never[0])
            rank_zero_warn(
                f"{never[0]}, one of {len(never)}, moves and no optimizer of the trainer has it, so that it's each "
                "worker's own until the mean is taken: give it to an optimizer, or average it where you write to it"
            )

    @torch.no_grad()
    def _now(self) -> Mapping[nn.Parameter, tuple[int, tuple[int, ...]]]:
        """{parameter: (rounds counted, or -1: it isn't mixed; numbers that change where it moves)}."""
        rounds = {p: counted for counted, mixed in self._of.followed.mixed() for p in mixed}
        parameters = [p for p in self._of.lightning_module.parameters() if rounds and p.numel()]
        if not parameters:
            return {}
        rows = []  # (sum, norm), float64
        for tensor in map(local, parameters):
            wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            whole = wide if wide.is_floating_point() and wide.element_size() > 1 else wide.float()
            norm = torch.linalg.vector_norm(whole, dtype=torch.float64)
            rows.append(torch.stack([whole.sum(dtype=torch.float64), norm]).to(local(parameters[0]).device))
        bits: list[list[int]] = torch.stack(rows).view(torch.int64).tolist()  # NaN is NaN
        return {p: (rounds.get(p, -1), tuple(row)) for p, row in zip(parameters, bits, strict=True)}
