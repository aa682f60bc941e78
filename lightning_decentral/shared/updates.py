"""Checks of optimizer steps: gradients with NaN before a step, and parameters that change without the strategy.

Gradients are checked for NaN and infinity before the update where all workers have the same gradients.

A method's work after an update (a round, say) follows `optimizer_step`. Other changes of parameters are found: an
optimizer's step at once, by a hook of torch's optimizers; any other change when an epoch ends, or after `LOOK_BATCHES`,
by a parameter's sum and norm, which have changed while no round was counted."""

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
    """Leaves gradients unchecked: they differ between workers, or a loss scaler checks them."""

    nonfinite: str = "stop"  # what happens in a step whose gradients hold NaN or infinity
    skipped = 0  # number of steps without an update so far

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        """Return a closure that runs the given one, then checks its gradients, before the update."""
        return closure

    def of_step(self, given: dict[str, Any], optimizer: Optimizer, precision: Precision) -> dict[str, Any]:
        """Return the arguments of `optimizer.step` in a user's loop; check gradients now, or behind its closure."""
        if given.get("closure") is not None:
            return {**given, "closure": self.after(given["closure"], optimizer, precision)}
        self.after(lambda: None, optimizer, precision)()
        return given


class BeforeUpdate(Unchecked):
    """Calls `call` with the optimizer once its gradients exist, before the update; checks nothing. Parameters that were
    thawed within the step are known by then, and no parameter has changed yet."""

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
    """Checks gradients that are equal on all workers for NaN and infinity: all decide alike, without communication.

    "stop" raises a FloatingPointError on all workers: at once on the host, one step later on a device, so that the host
    doesn't wait for it. "skip" leaves the update out, and worker 0 reports that; the host waits for the device.
    ValueError: `nonfinite` is neither of the two. `settle` is called with the optimizer once its gradients exist,
    before they are checked."""

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
            return  # a loss scaler's first steps overflow, and the scaler skips them itself
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters]
        found = AsyncRead(torch.isfinite(scale(gradients)))
        last: AsyncRead | None = found
        if self.nonfinite == "stop" and not found.on_host:  # judged at the next step, so that the host needn't wait
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


LOOK_BATCHES = 128  # Batches between two checks within a long epoch.

Mixed = tuple[int, Sequence[nn.Parameter]]  # (number of rounds that were counted, the parameters that these rounds mix)


class Follows(Protocol):
    """A training method that must be notified of replaced optimizers, and that mixes parameters in rounds."""

    def replaced(self) -> None:
        """Adopt new optimizers, on all workers in the same step, before the first update by one of them."""

    def mixed(self) -> Sequence[Mixed]:
        """Return the number of rounds so far, with the parameters that rounds change."""


class Unfollowed:
    """A training method without rounds; calls `replaced`, if given, when the optimizers are replaced."""

    def __init__(self, replaced: Callable[[], None] | None = None) -> None:
        self._replaced = replaced

    def replaced(self) -> None:
        if self._replaced is not None:
            self._replaced()

    def mixed(self) -> Sequence[Mixed]:
        return ()


class FollowedStrategy(Protocol):
    """Strategy whose optimizer steps `Updates` follows."""

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
"""(object to call step() on, object not to), where the loop is the user's."""


class Updates:
    """Follows the optimizer steps of one fit: a context around the strategy's own steps; call `moved` in each batch.
    `steps` is for error texts, as `IN_LOOP`. RuntimeError: an optimizer, or a part of one, steps past the strategy."""

    def __init__(self, strategy: FollowedStrategy, steps: tuple[str, str] = IN_TRAINER) -> None:
        self._strategy, self._inside, self._steps = strategy, False, steps
        self._known = list(strategy.optimizers)
        self.moved = Moved(strategy)
        # A hook on all optimizers of the process: one that steps may be a part of another, or unknown to the strategy.
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def __enter__(self) -> None:
        if self._known != self._strategy.optimizers:  # compared by identity
            self._known = list(self._strategy.optimizers)
            self._strategy.followed.replaced()
        self._inside = True

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def close(self) -> None:
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside:
            return
        name, (step, bare) = type(optimizer).__name__, self._steps
        if any(optimizer is known for known in self._strategy.optimizers):
            raise RuntimeError(
                f"{name} stepped past the strategy, so its parameters are never averaged: step {step}, not {bare}"
            )
        own = {id(group) for group in optimizer.param_groups}
        sharing = (o for o in self._strategy.optimizers if any(id(group) in own for group in o.param_groups))
        # Where gradients are averaged all replicas take the same updates, and stay equal.
        if self._strategy.drifts and (whole := next((type(o).__name__ for o in sharing), "")):
            raise RuntimeError(
                f"{name} stepped past the strategy as a part of {whole}, so its parameters are never averaged: "
                f"make it one update, step(closure) of {step}, in which {whole} calls its parts"
            )
        self.moved.past = name


class Moved:
    """Finds parameters that have changed since the last look while no round was counted. `batch` warns after one such
    look. RuntimeError, by `batch`: after two running, or where an optimizer that isn't the Trainer's changed them."""

    def __init__(self, strategy: FollowedStrategy) -> None:
        self._strategy = strategy
        self.past = ""  # name of an optimizer that isn't the Trainer's and has stepped since the last look
        self._batches, self._looks = 0, 0
        self._reported: set[str] = set()
        self._before = self._now()

    def batch(self, last: bool) -> None:
        """Count a batch, and look at the parameters after the `last` of an epoch, or after `LOOK_BATCHES`."""
        self._batches += 1
        if last or self._batches >= LOOK_BATCHES:
            self._look()
            self._batches, self.past = 0, ""

    def _look(self) -> None:
        before, self._before = self._before, self._now()
        moved = {p: now for p, now in self._before.items() if p in before and before[p][1] != now[1]}
        unseen = [p for p, (rounds, _) in moved.items() if rounds >= 0 and rounds == before[p][0]]
        self._looks = self._looks + 1 if unseen else 0
        names = {p: name for name, p in self._strategy.lightning_module.named_parameters()}
        if unseen:
            line = (
                f"{names[unseen[0]]} changed in the last {self._batches} batches while no round was counted, so "
                "the workers diverge: call step() of what self.optimizers() returns, once after whatever else "
                "writes to this parameter"
            )
            if self.past or self._looks > 1:
                raise RuntimeError(f"{self.past} stepped past the strategy: {line}" if self.past else line)
            rank_zero_warn(line)
        never = [names[p] for p, (rounds, _) in moved.items() if rounds < 0]
        if never and never[0] not in self._reported:
            self._reported.add(never[0])
            rank_zero_warn(
                f"{never[0]}, one of {len(never)} parameters, changes but belongs to no optimizer of the Trainer, so "
                "the workers diverge: give this parameter to an optimizer, or average it where you write to it"
            )

    @torch.no_grad()
    def _now(self) -> Mapping[nn.Parameter, tuple[int, tuple[int, ...]]]:
        """Return {parameter: (number of rounds, -1 where rounds don't mix it; bits of its sum and norm)}."""
        rounds = {p: counted for counted, mixed in self._strategy.followed.mixed() for p in mixed}
        parameters = [p for p in self._strategy.lightning_module.parameters() if rounds and p.numel()]
        if not parameters:
            return {}
        rows = []  # (sum, norm), float64
        for tensor in map(local, parameters):
            wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            whole = wide if wide.is_floating_point() and wide.element_size() > 1 else wide.float()
            norm = torch.linalg.vector_norm(whole, dtype=torch.float64)
            rows.append(torch.stack([whole.sum(dtype=torch.float64), norm]).to(local(parameters[0]).device))
        bits: list[list[int]] = torch.stack(rows).view(torch.int64).tolist()  # compared as bits: NaN equals itself
        return {p: (rounds.get(p, -1), tuple(row)) for p, row in zip(parameters, bits, strict=True)}
