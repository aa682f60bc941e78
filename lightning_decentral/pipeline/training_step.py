"""Training and evaluation steps of an unmodified LightningModule through the pipeline.

The step of the user runs once per micro-batch on every stage up to its call of the model, which says what goes in. On
the last stage it runs again once the answer is there; what it returns goes back.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_decentral.pipeline.compute.intercept import Once, answering, called
from lightning_decentral.pipeline.compute.loss import Share, TargetCount, total
from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.schedule import Action
from lightning_decentral.pipeline.plan.slicing import Uniform
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.evaluation import callbacks_of
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.wire.objects import gather_objects

FIXED, LOGGED = 5, 120
Step = Callable[[Any], Any]


class Logged(NamedTuple):
    """One call of `self.log`."""

    name: str
    options: dict[str, Any]


class Logs:
    """What the user's step logs, kept until every stage can log it."""

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        self._known: dict[int, list[Logged]] = {}
        self._calls: list[Logged] = []
        self.values: list[list[AsyncRead]] = []
        """Of each micro-batch; not waited for before the step has ended."""

    def begin(self) -> None:
        self._calls, self.values = [], []

    def recording(self, keep: bool) -> "_Recording":
        """Within, `self.log` of the module keeps, or drops, what it is given."""
        if keep:
            self._calls, self.values = [], [*self.values, []]
        return _Recording(self._module, self._take if keep else _drop)

    def _take(self, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, Metric):
            raise ValueError(
                f"self.log({name!r}, ...) got a {type(value).__name__} in training_step, which only the last stage of "
                "a pipeline updates: log its value instead"
            )
        self._calls.append(Logged(name, options))
        # A copy: the user may go on to change it.
        self.values[-1].append(AsyncRead(torch.as_tensor(value).detach().clone().reshape(())))

    @property
    def signature(self) -> int:
        """The same for the same names and options."""
        # Not `hash`, which differs between processes.
        return zlib.crc32(repr(self._calls).encode())

    def publish(self, signature: int, values: Sequence[float], pipe: StageRunner, device: torch.device) -> None:
        """Log on every stage what the last one was given. Collective where the names are new."""
        if signature not in self._known:
            rows = [self._calls] if pipe.over is None else gather_objects(pipe.over, self._calls)
            self._known[signature] = rows[-1]
        for (name, options), value in zip(self._known[signature], values, strict=True):
            self._module.log(name, torch.tensor(value, dtype=torch.float64, device=device), **options)


def _drop(name: str, value: Any, **_: Any) -> None:
    pass


class _Recording:
    def __init__(self, module: Any, take: Callable[..., None]) -> None:
        self._module, self._take = module, take

    def __enter__(self) -> None:
        self._module.log = self._take

    def __exit__(self, *_: object) -> None:
        del self._module.log  # the class's own again


class Outcome(NamedTuple):
    """What all stages know after a step.

    Args:
        factor: gradients are to be multiplied by it.
        finite: every stage's gradients are finite.
    """

    loss: float
    factor: float
    finite: bool


class TrainingStep:
    """A step, from the user's batch to gradients in `.grad`.

    Args:
        scale: what the loss is multiplied by on its way back, for half precision.
    """

    def __init__(self, pipe: StageRunner, module: LightningModule, logs: Logs, microbatches: int, scale: float) -> None:
        self._pipe, self._module, self._logs = pipe, module, logs
        self._microbatches, self._scale = microbatches, scale
        self._losses: list[tuple[float, AsyncRead]] = []
        self._shares: list[Share] = []
        self._parts: list[Any] = []
        self._rest: tuple[Any, ...] = ()
        self.calls: list[Call] = []
        self._inputs: list[AsyncRead] = []
        self.spans: dict[Action, Span] = {}

    def read(self, batch: Any, *rest: Any) -> None:
        """Cut the batch into micro-batches and see what the step asks of the model for each."""
        self._parts, self._rest = split(batch, self._microbatches), rest
        self._logs.begin()
        # The last stage runs the step again in `_close`, where it must draw the same numbers.
        devices = [self._pipe.device] if self._pipe.device.type == "cuda" else []  # not all that this host has
        drawing = torch.random.fork_rng(devices, enabled=self._pipe.place.last)
        with drawing, self._logs.recording(keep=False), torch.no_grad():
            self.calls = [called(self._pipe.model, lambda part=part: self._step(part)) for part in self._parts]  # type: ignore[misc]
        self._inputs = [AsyncRead(call.inputs.detach()) for call in self.calls]  # on their way before the step begins

    def _step(self, part: Any) -> Any:
        return self._module.training_step(part, *self._rest)

    def run(self, slices: Sequence[int]) -> None:
        """All chunks there and back."""
        self.spans = self._pipe.train(self.calls, slices, self._close).spans

    def _close(self, microbatch: int, output: Tensor) -> Tensor:
        model = self._pipe.model
        once = Once(lambda call: model.answer(call, output), type(model.module).__name__)
        with answering(model, once), self._logs.recording(keep=True), TargetCount() as count:
            result = self._step(self._parts[microbatch])
        loss = result["loss"] if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step returned {type(loss).__name__}: a token pipeline needs a loss in each")
        weight = self._weight(count, loss)
        self._losses.append((weight, AsyncRead(loss.detach())))
        if weight == 0:  # a mean over nothing is nan, and so is zero times its gradient
            return output.sum() * 0.0
        return loss * (weight * self._scale)

    def _weight(self, count: TargetCount, loss: Tensor) -> float:
        if len(self.calls) == 1:
            return 1.0  # without asking for the number of targets, which a device would have to tell
        targets = count.targets(loss)
        if targets is None:
            raise ValueError(
                f"microbatches={len(self.calls)} needs a training_step that returns one mean of cross-entropy, as it "
                "is and unweighted: only that can be put together from parts; use microbatches=1 for any other loss"
            )
        # By all positions, not by all targets, which are known only when the first micro-batches have gone back. No
        # weight exceeds 1, so no half-precision gradient exceeds that of the loss itself.
        return targets / sum(call.inputs.shape[0] * self._pipe.model.length(call) for call in self.calls)

    def conclude(self, finite: Tensor, device: torch.device) -> Outcome:
        """Tell all stages how the step went, and log what it logged. Collective.

        Args:
            finite: a scalar on the device: this stage's gradients are.

        Raises:
            ValueError: the stages read different batches.
        """
        # One gather for all: loss, factor, signature, finite, checksum, number of values, values. float64 holds a CRC.
        row = torch.zeros(FIXED + 1 + LOGGED, dtype=torch.float64)
        row[4] = checksum([tensor.read() for tensor in self._inputs])
        if self._pipe.place.last:
            self._shares = [Share(weight, float(loss.read())) for weight, loss in self._losses]
            values = self._values()
            loss, factor = total(self._shares)
            row[:3] = torch.tensor([loss, factor, self._logs.signature], dtype=torch.float64)
            row[5] = len(values)
            row[6 : 6 + len(values)] = torch.tensor(values, dtype=torch.float64)
        row = row.to(device)
        row[3] = finite
        rows = self._pipe.gather(row)
        if len(set(rows[:, 4].tolist())) > 1:
            raise ValueError(
                "the stages of one pipeline read different batches: let Lightning place its sampler "
                "(use_distributed_sampler=True), or give every stage the same batches"
            )
        last = rows[-1].tolist()
        self._logs.publish(int(last[2]), last[6 : 6 + int(last[5])], self._pipe, device)
        return Outcome(last[0], last[1], bool(rows[:, 3].all()))

    def _values(self) -> list[float]:
        """Means over the micro-batches, weighted as their losses are."""
        if len(self._shares) == 1 or not any(share.weight for share in self._shares):
            values = _read(self._logs.values[-1])
        else:
            weight = sum(share.weight for share in self._shares)
            columns = zip(*map(_read, self._logs.values), strict=True)
            values = [sum(s.weight * v for s, v in zip(self._shares, c, strict=True)) / weight for c in columns]
        if len(values) > LOGGED:
            raise ValueError(f"training_step logs {len(values)} values: a token pipeline carries at most {LOGGED}")
        return values


def _read(values: Sequence[AsyncRead]) -> list[float]:
    return [float(value.read()) for value in values]


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
    return [apply_to_collection(batch, Tensor, lambda tensor, m=m: tensor.tensor_split(parts)[m]) for m in range(parts)]


def checksum(inputs: Sequence[Tensor]) -> float:
    """The same for the same inputs of all calls, on the host, and hardly for others."""
    result = 0.0
    for tensor in inputs:
        flat = tensor.flatten().double()
        # Weighed by place: the same tokens in another order are another batch.
        result += float((flat * (torch.arange(flat.numel(), dtype=torch.float64) % 1009 + 1)).sum())
    return result


def refuse_unserved(module: LightningModule) -> None:
    """ValueError for what needs the backward, or the whole model, in one place."""
    if not module.automatic_optimization:
        raise ValueError("a token pipeline runs the backward itself: set automatic_optimization = True")
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(module.trainer)):
        raise ValueError(
            "ModelPruning chooses from the whole model, and a stage has a part of it: prune before or after the fit, "
            "or use strategy='compressed'"
        )


def evaluated(pipe: StageRunner, plans: SlicePlanner, step: Callable[[], Any]) -> Any:
    """What a validation, test or predict step of the user's returns, its model calls answered by the pipeline.

    The same step with the same answers on every stage, so that whatever it logs or gathers is whole. It may call the
    model any number of times.
    """

    def answer(call: Call) -> Any:
        length = pipe.model.length(call)
        # Nothing is measured for an evaluation: with 2 P equal slices the bubble is below a third.
        slices = Uniform(min(length, 2 * pipe.size)).slices(length, plans.situation(pipe.size))
        return pipe.model.answer(call, pipe.evaluate(call, slices))

    with answering(pipe.model, answer):
        return step()
