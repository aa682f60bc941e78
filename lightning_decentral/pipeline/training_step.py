"""Training and evaluation steps of an unmodified LightningModule through the pipeline.

The step of the user runs once per micro-batch on every stage up to its call of the model, which gives the inputs. On
the last stage it waits there and goes on once the answer is there; what it returns goes back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_decentral.pipeline.compute.intercept import Suspended, called
from lightning_decentral.pipeline.compute.loss import TargetCount, total, weighed
from lightning_decentral.pipeline.compute.model import Call, Pipelined, part_of, remember, tensors_in
from lightning_decentral.pipeline.logs import Logs
from lightning_decentral.pipeline.plan.schedule import Action
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.stage_runner import StageRunner, checksum, rows_of
from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.plan.timeline import Span

KNOWN, FIXED, LOGGED = 3, 3, 120
MOVING = ("transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of the user's that move a batch."""


class Outcome(NamedTuple):
    """Result of a step that all stages know: scalars of a device, whose host hasn't waited for them.

    Args:
        factor: gradients are to be multiplied by it.
        finite: every stage's gradients are finite.
        others: what the step returned with its loss; None for each value where this stage doesn't know it.
    """

    loss: Tensor
    factor: Tensor
    finite: Tensor
    others: dict[Any, Any]


class TrainingStep:
    """A step, from the user's batch to gradients in `.grad`.

    Args:
        scale: what the loss is multiplied by on its way back, for half precision.
    """

    def __init__(self, pipe: StageRunner, module: LightningModule, logs: Logs, microbatches: int, scale: float) -> None:
        self._pipe, self._module, self._logs = pipe, module, logs
        self._microbatches, self._scale = microbatches, scale
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._parts: list[Any] = []
        self._rest: tuple[Any, ...] = ()
        self.calls: list[Call] = []
        self._waiting: list[Suspended] = []
        self._counts: list[TargetCount] = []
        self._inputs: list[AsyncRead] = []

    def read(self, batch: Any, *rest: Any) -> None:
        """Cut the batch into micro-batches and see what the step asks of the model for each."""
        self._parts, self._rest = split(batch, self._microbatches), rest
        self._logs.begin(self._microbatches)
        self.calls = [self._read(microbatch) for microbatch in range(self._microbatches)]
        self._inputs = [AsyncRead(call.inputs.detach()) for call in self.calls]  # on their way before the step begins

    def _read(self, microbatch: int) -> Call:
        """Run the step as far as its call of the model. On the last stage it waits there."""
        if self._pipe.place.last:
            self._counts.append(TargetCount())
            with self._logs.recording(microbatch):
                step = partial(self._counted, microbatch)
                self._waiting.append(Suspended(self._pipe.model, step, self._pipe.device))
            call = self._waiting[-1].call
        else:
            with self._logs.recording(None):
                call = called(self._pipe.model, partial(self._step, microbatch))
        _refuse_differentiable(self._pipe.model, call)
        return call

    def _step(self, microbatch: int) -> Any:
        return self._module.training_step(self._parts[microbatch], *self._rest)

    def _counted(self, microbatch: int) -> Any:
        with self._counts[microbatch]:
            return self._step(microbatch)

    def close(self) -> None:
        """End all steps that still wait, whatever has happened."""
        for step in self._waiting:
            step.end()

    def run(self, slices: Sequence[int]) -> dict[Action, Span]:
        """Run all chunks forward and backward; when each action computed."""
        return self._pipe.train(self.calls, slices, self._close).spans

    def _close(self, microbatch: int, output: Tensor) -> Tensor:
        model, step = self._pipe.model, self._waiting[microbatch]
        before = self._seen()
        with self._logs.recording(microbatch):
            result = step.go_on(lambda call: model.answer(call, output))
        if self._seen() != before:
            raise ValueError(
                "training_step freezes, thaws or writes to parameters behind its call of "
                f"{type(model.module).__name__}, where only the last stage of a pipeline comes: do it before the call, "
                "or in a hook"
            )
        loss = self._logs.returned(result)
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step returned {type(loss).__name__}: a token pipeline needs a loss in each")
        weight, loss = self._weight(self._counts[microbatch], loss), loss.reshape(())
        self._losses.append((weight, loss.detach()))
        return weighed(loss, weight) * self._scale

    def _seen(self) -> list[tuple[object, ...]]:
        """State of the parameters that a step may change behind its call, on the last stage alone."""
        inside = set(self._pipe.model.module.parameters())
        return [(p.requires_grad, *((p.data_ptr(), p._version) if p in inside else ()))
                for p in self._module.parameters()]  # fmt: skip

    def _weight(self, count: TargetCount, loss: Tensor) -> Tensor:
        """Weight of a micro-batch's loss in the batch's: a scalar, float64."""
        if len(self.calls) == 1:
            return torch.ones((), dtype=torch.float64, device=loss.device)  # whatever mean it is
        targets = count.targets(loss)
        if targets is None:
            raise ValueError(
                f"microbatches={len(self.calls)} needs a training_step that returns one mean of cross-entropy, as it "
                "is and unweighted: only that can be put together from parts; use microbatches=1 for any other loss"
            )
        # By all positions, not by all targets, which are known only when the first micro-batches have gone back. No
        # weight exceeds 1, so no half-precision gradient exceeds that of the loss itself.
        return targets.double() / sum(call.inputs.shape[0] * self._pipe.model.length(call) for call in self.calls)

    def conclude(self, finite: Tensor, holdings: Ownership) -> Outcome:
        """Send all stages how the step went, and log what it logged. Collective.

        Hosts exchange what they know, devices what they have computed: none waits for its own, but for the
        batch that this step began with.

        Args:
            finite: a scalar on the device: this stage's gradients are.

        Raises:
            ValueError: the stages read different batches, or a step gave the model other inputs on one than on another.
            RuntimeError: what stands on several stages is trained on some of them.
        """
        pipe, logs = self._pipe, self._logs
        # checksum, signature (a CRC), number of values, what is trained
        known = torch.cat([torch.zeros(KNOWN, dtype=torch.float64), holdings.flags()])
        known[0] = checksum([tensor.read() for tensor in self._inputs])
        row = torch.zeros(FIXED + LOGGED, dtype=torch.float64, device=pipe.device)  # loss, factor, finite, values
        if pipe.place.last:
            computed = self._computed()
            known[1], known[2] = logs.signature, len(computed) - 2
            row[:2], row[FIXED : FIXED + len(computed) - 2] = computed[:2], computed[2:]
        row[2] = finite
        all_known, rows = rows_of(known, pipe.hosts), rows_of(row, pipe.over)
        if len(set(all_known[:, 0].tolist())) > 1:
            raise self._unlike()
        holdings.refuse_uneven(all_known[:, KNOWN:])
        last, (_, signature, count) = rows[-1], all_known[-1, :KNOWN].tolist()
        others = logs.publish(int(signature), last[FIXED : FIXED + int(count)].unbind(), pipe)
        return Outcome(last[0], last[1], rows[:, 2].all(), others)

    def _unlike(self) -> ValueError:
        """Error that states why the model's inputs differ between the stages. Collective."""
        batch = [tensor.detach().cpu() for tensor in tensors_in(self._parts)]
        batches = rows_of(torch.tensor([checksum(batch)], dtype=torch.float64), self._pipe.hosts)
        if len(set(batches[:, 0].tolist())) > 1:
            return ValueError(
                "the stages of one pipeline read different batches: let Lightning place its sampler "
                "(use_distributed_sampler=True), or give every stage the same batches"
            )
        return ValueError(
            f"training_step gives {type(self._pipe.model.module).__name__} other inputs on one stage than on another, "
            "from the same batch: behind its call of the model it runs on the last stage alone, so let nothing before "
            "the call depend on what was drawn or counted behind it, nor on the rank"
        )

    def _computed(self) -> Tensor:
        """[2 + values], on the last stage: loss, factor, and what was logged, as means over the micro-batches, weighted
        as their losses are."""
        columns = self._logs.columns()
        if len(columns) > LOGGED:
            raise ValueError(f"training_step logs {len(columns)} values: a token pipeline carries at most {LOGGED}")
        weights, losses = zip(*self._losses, strict=True)
        flat = [_scalar(value, losses[0]) for column in (weights, losses, *columns) for value in column]
        weighing, *values = torch.stack(flat).view(-1, len(losses)).unbind()
        means, factor = total(weighing, torch.stack(values))
        # Without targets there is no mean of what was logged, and the last micro-batch's stands for it.
        shown = torch.where(factor > 0, means, torch.stack(values)[:, -1])
        return torch.cat([means[:1], factor[None], shown[1:]])


def _refuse_differentiable(model: Pipelined, call: Call) -> None:
    """ValueError for inputs that need gradients, which would get none."""
    if call.inputs.requires_grad:
        raise ValueError(
            f"training_step gives {type(model.module).__name__} inputs that need gradients, which no pipeline carries "
            "back: put the layers that make them into the model, detach them, or use strategy='spilled'"
        )


def _scalar(value: Tensor, other: Tensor) -> Tensor:
    """The scalar in float64 on the other's device; one of the host is filled in, as a copy would be waited for."""
    there = value.device.type == other.device.type
    return value.double() if there else torch.full((), float(value), dtype=torch.float64, device=other.device)


def moved(module: LightningModule, batch: Any, move: Callable[[], Any]) -> Any:
    """Run `move()` on the host's batch. Which of its masks hide nothing stays known, unless hooks of the user
    move it, or change it there."""
    owners = (module, module.trainer.datamodule)  # type: ignore[attr-defined]
    own = any(is_overridden(hook, owner) for hook in MOVING for owner in owners)
    if own or module.trainer.strategy.root_device.type == "cpu":
        return move()
    before = [*tensors_in(batch)]  # now: a batch with a `to` of its own may be changed in place
    remember(before, [*tensors_in(result := move())])
    return result


def split(batch: Any, parts: int) -> list[Any]:
    """The batch cut along the first axis of its tensors.

    Raises:
        ValueError: fewer sequences than parts, or tensors that disagree on how many there are.
    """
    if parts == 1:
        return [batch]
    sizes: set[int] = set()
    apply_to_collection(batch, Tensor, lambda tensor: sizes.add(tensor.shape[0] if tensor.dim() else 1))
    if len(sizes) != 1 or next(iter(sizes)) < parts:
        raise ValueError(
            f"microbatches={parts}, but the tensors of the batch have {sorted(sizes)} rows: give every tensor the same "
            f"number of rows, {parts} at least"
        )
    return [apply_to_collection(batch, Tensor, lambda tensor, m=m: part_of(tensor, parts, m)) for m in range(parts)]
