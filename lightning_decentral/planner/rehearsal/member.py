"""One worker's side of a rehearsed strategy: its interface, its rank among the workers, and averages of gradients.

    in a run                          in a rehearsal
    a process, with its own rank      a thread, whose rank is set with its turn (`turns`)
    torch.distributed                 `shared.wire.in_process`
    an all-reduce of gradients        worker 0 reads all gradients, the others copy its mean

Codes are made and reduced where a result is needed, not while backward runs: their messages take no time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_decentral.compressed.strategy import AveragedSteps
from lightning_decentral.planner.rehearsal.turns import CPU
from lightning_decentral.shared.compute.buckets import bucket_bytes_of
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.device import Future
from lightning_decentral.shared.updates import Unchecked
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import CompressedMean, ExactMean, FlatMean, InFlight
from lightning_decentral.shared.wire.meeting.comparison import unasked
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import Wire, of_all


@dataclass(frozen=True)
class MemberPlace:
    """One worker's rank among the workers of this process, and its functions to communicate."""

    wire: Wire
    broadcast: Callable[[Any], Any]  # sends worker 0's value to all
    meet: Callable[[], None]  # barrier of all workers
    in_turn: Callable[[], None]  # makes workers go on one by one until the next step, if threads compute gradients
    worker: int
    workers: int
    per_node: int  # workers on a node
    steps: int  # steps of the whole rehearsal
    device: torch.device = CPU  # device of the worker


class Member:
    """Base of a worker's side of a strategy, called in the order of Lightning's loop; this base sends nothing.

    Every call except `forward` and `backward` is collective: all workers call it, each in its thread."""

    drifts: ClassVar[bool] = True  # whether workers differ after an update
    concurrent: ClassVar[bool] = True  # whether several workers may compute steps at once
    check: Unchecked = Unchecked()  # the strategy's check of gradients before an update

    def begin(self) -> None:
        """Prepare the first step."""

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        """Context around a `training_step` with these arguments."""
        return nullcontext()

    def backward(self) -> None:
        """Prepare the module's own backward, through all of the graph, or a part of it."""

    def average(self) -> None:
        """.grad <- the averaged gradients for the update, after the backward; not called for workers that drift."""

    def mix(self) -> None:
        """Communicate after the update, as the strategy does."""

    def release(self) -> None:
        """Give the module's parameters their own storage again."""

    @property
    def sent_bytes(self) -> float:
        return 0.0


class ReplicaMember(Member):
    """Member whose replica stays equal to the others': updates by averaged gradients, and worker 0's running
    statistics, by the strategies' own `EqualReplicas`."""

    drifts: ClassVar[bool] = False

    def __init__(self, module: LightningModule, place: MemberPlace, check: Unchecked) -> None:
        self._module, self._place, self.check, self._equal = module, place, check, EqualReplicas()

    def begin(self) -> None:
        self._equal.begin(self._module, of_all(self._place.wire.group), unasked, list)

    def mix(self) -> None:
        self._equal.advance(self._module.current_epoch)

    def release(self) -> None:
        self._equal.close()


class TotalOfFirst(ExactMean):
    """Exact mean that worker 0 computes, by reading the other workers' gradients."""

    def total(self, flat: Tensor) -> Pending:
        summed = self.over.reduce(flat, target=0)
        return Together([]) if self.over.rank else summed


class NotTaken(InFlight):
    """Codes of other owners' parts that this worker receives and doesn't decode."""

    def take(self, owner: int, codes: list[Tensor]) -> None:
        """Do nothing: worker 0 decodes the codes."""


class WhenAsked(Future[Any]):
    """Future whose call runs once, in the first thread that asks for its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call: Any = call

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            # Called once, then dropped: it may refer to objects that refer to this result.
            call, self._call = self._call, None
            try:
                with torch.no_grad():
                    self.set_result(call())
            except BaseException as error:  # for all callers
                self.set_exception(error)
        return super().result(timeout)


@dataclass
class CallersQueue:
    """Queue whose calls run in the caller's thread: on sending if `at_once`, else when a result is needed."""

    at_once: bool

    def send(self, call: Callable[[], Any]) -> WhenAsked:
        sent = WhenAsked(call)
        if self.at_once:
            sent.result()
        return sent


class CodedOfFirst(CompressedMean):
    """Compressed mean that sends codes at once, and reduces them when a worker waits for the mean."""

    def __init__(self, codec: Codec, wire: Wire) -> None:
        super().__init__(codec, of_all(wire.group), of_all(wire.group), CPU)
        self.leaving, self.owning = CallersQueue(at_once=True), CallersQueue(at_once=False)
        self.flight = NotTaken if self.over.rank else InFlight


class AveragingMember(ReplicaMember):
    """Member whose gradients are averaged with all other workers', encoded by a codec."""

    def __init__(
        self, module: LightningModule, place: MemberPlace, codec: Codec, bucket_bytes: int | None, check: Unchecked
    ) -> None:
        super().__init__(module, place, check)
        self._codec, self._after_backward = codec, ExitStack()
        self._parameters = list(module.parameters())  # walking through the module would take longer than averaging
        self._bucket_bytes = bucket_bytes or bucket_bytes_of(self._parameters)

    def begin(self) -> None:
        super().begin()
        wire, encodes = self._place.wire, self._codec.encodes
        hosts = of_all(wire.hosts)
        self._mean: FlatMean = CodedOfFirst(self._codec, wire) if encodes else TotalOfFirst(of_all(wire.group))
        self._gradients = GradientAverage(self._mean, hosts, lambda call: call(), self._bucket_bytes)
        self._equal.join(self._gradients)
        self._steps = AveragedSteps(self._gradients, self._module, self.check, lambda came: None)
        if self.check.nonfinite == "skip":
            self._mean.guard(None)
        # No message during a backward pass: it would wait for workers whose turn comes later.
        self._after_backward.enter_context(self._gradients.blocked())

    def average(self) -> None:
        self._gradients.watch(self._parameters)
        self._gradients.begin()
        self._gradients.finish()
        # .grad <- worker 0's: copying is faster than adding up, or decoding, all messages on each worker.
        rows = self._place.broadcast([p.grad for p in self._parameters])
        pairs = [] if self._place.worker == 0 else list(zip(self._parameters, rows, strict=True))
        dense = [(p.grad, row) for p, row in pairs if _dense(p.grad) and _dense(row)]
        if dense:
            own, means = zip(*dense, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(own, means)
        for parameter, row in pairs:
            if not (_dense(parameter.grad) and _dense(row)):
                parameter.grad = None if row is None else row.clone()
        self._place.meet()  # a copy, as worker 0 clips its gradients in place

    def mix(self) -> None:
        self._steps.updated(self._module.trainer.optimizers[0])
        super().mix()

    def release(self) -> None:
        self._after_backward.close()
        self._gradients.close()
        super().release()

    @property
    def sent_bytes(self) -> float:
        return self._mean.sent_bytes


def _dense(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse


class DDPMember(AveragingMember):
    """Member of `ddp`: exact mean gradients of the parameters trained at set-up, all of which each worker must use;
    worker 0's buffers are copied to all before a forward. ValueError: in a step that leaves a parameter out, or trains
    another."""

    def __init__(self, module: LightningModule, place: MemberPlace, *, finds_unused: bool) -> None:
        super().__init__(module, place, Plain(), None, Unchecked())
        self._at_setup = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._finds_unused = finds_unused

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        start_from_worker_0(list(self._module.buffers()), self._place.wire.world, self._place.device)
        return nullcontext()

    def average(self) -> None:
        for name, parameter, trained in self._at_setup:
            if trained and parameter.grad is None and not self._finds_unused:
                raise ValueError(
                    f"ddp ends with {name}, which gets no gradient on worker {self._place.worker}: freeze it "
                    "(requires_grad=False), or give DDPStrategy(find_unused_parameters=True)"
                )
            if parameter.grad is not None and not trained:
                raise ValueError(f"ddp doesn't average {name}, which was frozen at set-up: train it from the start on")
        super().average()

    def mix(self) -> None:
        """Do nothing: buffers are copied before the next forward."""
