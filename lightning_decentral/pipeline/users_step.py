"""Training step of an unmodified LightningModule through the pipeline: the user's step runs on every stage, up to its
call of the model, which gives the inputs. On the last one it waits there, goes on with the model's output, and returns
the loss."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_decentral.pipeline.compute.intercept import Suspended, called
from lightning_decentral.pipeline.compute.loss import TargetCount, total, weighed
from lightning_decentral.pipeline.compute.model import Call, part_of, remember, tensors_in
from lightning_decentral.pipeline.logs import Logs
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.stage_runner import StageRunner, checksum, rows_of
from lightning_decentral.shared.compute.device import AsyncRead

KNOWN, FIXED, LOGGED = 3, 3, 120
MOVING = ("transfer_batch_to_device", "on_after_batch_transfer")  # The user's hooks that move a batch.


class TrainingStep:
    """Runs a training step, from the user's batch to gradients in `.grad`. `scale`: factor of the loss before its
    backward, for half precision."""

    def __init__(self, pipe: StageRunner, module: LightningModule, logs: Logs, microbatches: int, scale: float) -> None:
        self._pipe, self._module, self._logs = pipe, module, logs
        self._microbatches, self._scale = microbatches, scale
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._parts: list[Any] = []
        self.calls: list[Call] = []
        self._waiting: list[Suspended] = []
        self._counts: list[TargetCount] = []
        self._inputs: list[AsyncRead] = []

    def read(self, batch: Any, *rest: Any) -> None:
        """Cut the batch into micro-batches and run the user's step for each, up to its call of the model. On the last
        stage the step waits in that call."""
        model, place = self._pipe.model, self._pipe.place
        self._parts = split(batch, self._microbatches)
        self._logs.begin(self._microbatches)
        for microbatch, part in enumerate(self._parts):
            step = partial(self._module.training_step, part, *rest)
            with self._logs.recording(microbatch if place.last else None):
                if place.last:
                    self._counts.append(count := TargetCount())
                    self._waiting.append(Suspended(model, count(step), self._pipe.device))
                call = self._waiting[-1].call if place.last else called(model, step)
            if call.inputs.requires_grad:  # the inputs would get no gradient
                raise ValueError(
                    f"training_step gives {type(model.module).__name__} inputs that need gradients, a pipeline "
                    "returns no gradients of inputs: put the layers that make them into the model, detach them, or use "
                    "strategy='spilled'"
                )
            self.calls.append(call)
        self._inputs = [AsyncRead(call.inputs.detach()) for call in self.calls]  # copied before the step begins

    def close(self) -> None:
        """End all of the user's steps that still wait, also after an exception."""
        for step in self._waiting:
            step.end()

    def finish(self, microbatch: int, output: Tensor) -> Tensor:  # (batch, length, vocabulary)
        """Answer the step's call of the model with the output, and return its loss, weighted: a scalar."""
        model, step = self._pipe.model, self._waiting[microbatch]
        before = self._seen()
        with self._logs.recording(microbatch):
            result = step.go_on(lambda call: model.answer(call, output))
        if self._seen() != before:
            raise ValueError(
                f"training_step freezes, thaws or writes to parameters after its call of {type(model.module).__name__}."
                " Only the last stage of a pipeline runs that part: do it before the call, or in a hook"
            )
        loss = self._logs.returned(result)
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step returned {type(loss).__name__}, a token pipeline needs a loss: return one")
        weight, loss = self._weight(self._counts[microbatch], loss), loss.reshape(())
        self._losses.append((weight, loss.detach()))
        return weighed(loss, weight) * self._scale

    def _seen(self) -> list[tuple[object, ...]]:
        """State of the parameters that a user's step may change after its call, which only the last stage runs."""
        inside = set(self._pipe.model.module.parameters())
        return [(p.requires_grad, *((p.data_ptr(), p._version) if p in inside else ()))
                for p in self._module.parameters()]  # fmt: skip

    def _weight(self, count: TargetCount, loss: Tensor) -> Tensor:
        """Weight of a micro-batch's loss within the batch's loss: a scalar, float64."""
        if len(self.calls) == 1:
            return torch.ones((), dtype=torch.float64, device=loss.device)  # the loss itself, whichever mean
        targets = count.targets(loss)
        if targets is None:
            raise ValueError(
                f"microbatches={len(self.calls)} needs a training_step that returns one mean of cross-entropy, "
                "unweighted and unchanged: only that is computed from parts. Use microbatches=1 for any other loss"
            )
        # Weighted by all positions, not by all targets: their number is known only after the first backwards. No weight
        # exceeds 1, so no half-precision gradient exceeds that of the loss itself.
        return targets.double() / sum(call.inputs.shape[0] * self._pipe.model.length(call) for call in self.calls)

    def conclude(self, gradients: Sequence[Tensor], holdings: Ownership) -> tuple[Tensor, dict[Any, Any]]:
        """Share the step's outcome with all stages, log its values, and scale this stage's gradients, of losses
        weighted by all positions, in place. Collective.

        Hosts exchange checksums and counts, devices their computed values: no host waits for its own device, except for
        the batch that this step began with.

        Returns the batch's loss, a scalar on the device, and what the step returned in addition; None for values that
        this stage doesn't know. ValueError: the stages read different batches, or the step gave the model different
        inputs on two stages. RuntimeError: a parameter of several stages is trained on some of them only."""
        pipe, logs = self._pipe, self._logs
        # checksum, signature (a CRC), number of values, flags of trained parameters
        known = torch.cat([torch.zeros(KNOWN, dtype=torch.float64), holdings.flags()])
        known[0] = checksum([tensor.read() for tensor in self._inputs])
        row = torch.zeros(FIXED + LOGGED, dtype=torch.float64, device=pipe.device)  # loss, factor, finite, values
        if pipe.place.last:
            computed = self._computed()
            known[1], known[2] = logs.signature, len(computed) - 2
            row[:2], row[FIXED : FIXED + len(computed) - 2] = computed[:2], computed[2:]
        row[2] = finite(gradients, pipe.device)
        all_known, rows = rows_of(known, pipe.hosts), rows_of(row, pipe.over)
        if len(set(all_known[:, 0].tolist())) > 1:
            self._refuse_unlike()
        holdings.refuse_uneven(all_known[:, KNOWN:])
        last, (_, signature, count) = rows[-1], all_known[-1, :KNOWN].tolist()
        others = logs.publish(int(signature), last[FIXED : FIXED + int(count)].unbind(), pipe)
        # Lightning's own backward multiplies by `scale` again. Infinite on all stages if one isn't finite: every stage
        # must skip the step or stop, and a scaler back off.
        multiply(gradients, torch.where(rows[:, 2].all(), last[1] / self._scale, torch.inf))
        return last[0], others

    def _refuse_unlike(self) -> None:
        """Raise ValueError that states why the model's inputs differ between the stages. Collective."""
        batch = [tensor.detach().cpu() for tensor in tensors_in(self._parts)]
        batches = rows_of(torch.tensor([checksum(batch)], dtype=torch.float64), self._pipe.hosts)
        if len(set(batches[:, 0].tolist())) > 1:
            raise ValueError(
                "the stages of one pipeline read different batches: let Lightning replace the sampler "
                "(use_distributed_sampler=True), or give every stage the same batches"
            )
        raise ValueError(
            f"training_step gives {type(self._pipe.model.module).__name__} different inputs on two stages from the "
            "same batch, because code after the call of the model runs only on the last stage. Let nothing before the "
            "call depend on the rank, or on what was drawn or counted after the call"
        )

    def _computed(self) -> Tensor:
        """Return [loss, factor, *logged values] on the last stage: means over the micro-batches, weighted like the
        losses."""
        columns = self._logs.columns()
        if len(columns) > LOGGED:
            raise ValueError(
                f"training_step logs {len(columns)} values, a token pipeline sends at most {LOGGED}: log fewer"
            )
        weights, losses = zip(*self._losses, strict=True)
        place = losses[0].device
        flat = [
            value.double() if value.device.type == place.type
            # Filled with a number of the host: the host would wait for a copy.
            else torch.full((), float(value), dtype=torch.float64, device=place)
            for column in (weights, losses, *columns) for value in column
        ]  # fmt: skip
        weighing, *values = torch.stack(flat).view(-1, len(losses)).unbind()
        means, factor = total(weighing, torch.stack(values))
        # Without targets the logged values have no mean: the last micro-batch's are taken.
        shown = torch.where(factor > 0, means, torch.stack(values)[:, -1])
        return torch.cat([means[:1], factor[None], shown[1:]])


def finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether no element of any tensor is NaN or infinite: a scalar on the device. The host doesn't wait."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # an empty tensor has no largest element
    norms = torch._foreach_norm(filled, torch.inf) if filled else ()
    return torch.stack([torch.zeros((), device=device), *norms]).isfinite().all()


def multiply(tensors: Sequence[Tensor], by: Tensor) -> None:
    """Multiply each tensor by a scalar tensor, in place. The host doesn't wait."""
    for dtype in {tensor.dtype for tensor in tensors}:
        exact, same = torch.promote_types(dtype, torch.float32), [t for t in tensors if t.dtype == dtype]
        if exact == dtype:
            torch._foreach_mul_(same, by.to(dtype))
        else:  # half precision would round the scalar, too
            for tensor in same:
                tensor.copy_(tensor.to(exact).mul_(by))


def moved(module: LightningModule, batch: Any, move: Callable[[], Any]) -> Any:
    """Run `move()` on the host's batch and remember which of its masks hide nothing, unless hooks of the user
    move or change the batch."""
    owners = (module, module.trainer.datamodule)  # type: ignore[attr-defined]
    own = any(is_overridden(hook, owner) for hook in MOVING for owner in owners)
    if own or module.trainer.strategy.root_device.type == "cpu":
        return move()
    before = [*tensors_in(batch)]  # now: a batch with its own `to` may be changed in place
    remember(before, [*tensors_in(result := move())])
    return result


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into micro-batches along the first axis of its tensors.

    Raises:
        ValueError: fewer sequences than parts, or tensors with different numbers of sequences.
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
