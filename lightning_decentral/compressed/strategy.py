"""`Trainer(strategy="compressed")`: data-parallel training whose all-reduce of gradients is quantized."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim.muon import Muon
from lightning_decentral.shared.compute.buckets import bucket_bytes_of, check_bucket_bytes
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.quantize import Int8
from lightning_decentral.shared.compute.device import DeviceSteps
from lightning_decentral.shared.introduction import coded_bytes, of_all_reduce, traffic
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.replica_strategy import ReplicaStrategy
from lightning_decentral.shared.updates import GradientCheck, NonFinite, Unchecked, Unfollowed
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas, of_all
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import FlatMean, mean_by, refuse_estimates
from lightning_decentral.shared.wire.owners import InPlace, by_owners
from lightning_decentral.shared.wire.transport import Transport, Wire


@checked
class CompressedStrategy(ReplicaStrategy):
    """g = (1/n) sum_i Q(g_i + e_i), coded once more on the way back: `ddp` at a fraction of its bytes.

    Gradients travel bucket by bucket while the backward goes on, as under DDP: their codes to the owners of parts, the
    owners' codes to all. What is rounded away is added in the next step, on both ways. All replicas take the same
    update and stay bit-equal. No wrapper: the module, its names and its checkpoints are those of one process.

    Args:
        codec: of the gradients. `Int8()`, the default, sends a quarter of the bytes; `Plain()` is `ddp` itself.
        bucket_bytes: gradients that travel together, at most, unless one parameter has more; by default an eighth of
            the model, 2 to 256 MiB: the codes of the last bucket can't hide behind the backward.
        orthogonal: under `Muon`, the codec in which what one worker made orthogonal goes to the others: each hidden
            matrix is then made so once, by its owner, and not by every worker. None, the default: by every worker. It
            pays where products are dear and links are not slow: what travels waits in the update, unhidden.
        nonfinite: what a step does whose gradients hold NaN or infinity: "stop" ends training, "skip" takes it without
            an update, on all workers alike; a loss scaler skips by itself.
        timeout: how long a worker waits for another, anywhere, before it ends.
        **ddp: what Lightning's DDPStrategy itself takes (start_method, process_group_backend, ...).

    Raises:
        ValueError: for an unknown option, a codec of differences, or no bytes in a bucket.

    Source: error feedback on both sides, Tang et al. 1905.05957 (DoubleSqueeze).
    """

    drifts: ClassVar[bool] = False  # replicas are equal after every step

    def __init__(
        self,
        *,
        codec: Codec | None = None,
        bucket_bytes: int | None = None,
        orthogonal: Codec | None = None,
        nonfinite: NonFinite = "stop",
        timeout: timedelta = TIMEOUT,
        **ddp: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp)
        self.codec = codec or Int8()
        self.bucket_bytes, self.orthogonal = bucket_bytes, orthogonal
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite)
        check_bucket_bytes(bucket_bytes)
        for given in (self.codec, orthogonal or self.codec):
            refuse_estimates(given)
        self._owners: Owners | None = None
        self._mean: FlatMean | None = None
        self._gradients: GradientAverage | None = None
        self._equal = EqualReplicas()
        self.followed = Unfollowed(self._replaced)

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def prepare(self, wire: Wire | None) -> None:
        self._trainer = self._module.trainer
        over = None if wire is None else of_all(wire)
        self._equal.begin(self._module, over, self._group.layouts, lambda: self.optimizers)
        if wire is None:
            return
        hosts = wire.hosts(None)
        assert hosts is not None
        self._mean = mean_by(self.codec, partial(of_all, wire), self.root_device)
        bucket_bytes = self.bucket_bytes or bucket_bytes_of(self._module.parameters())
        self._gradients = GradientAverage(self._mean, hosts, self.meet, bucket_bytes, self._where)
        self._equal.join(self._gradients)
        self.member = AveragedSteps(self._gradients, self._module, self.gradient_check, self._from_worker_0)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None or self.nonfinite == "skip":
            self._mean.guard(scale_of(scaler, self.root_device))
        if self.orthogonal is not None:
            self._owners = Owners(self.optimizers, self.orthogonal, of_all(wire), self.meet)

    def _where(self) -> tuple[int, int]:
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready, self._equal.updates or 0

    def _replaced(self) -> None:
        self._equal.replaced()
        if self._owners is not None:
            self._owners.serve(self.optimizers)

    def release(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        if self._owners is not None:
            self._owners.close()
        self._equal.close()
        self._gradients, self._mean, self._owners, self.member = None, None, None, DeviceSteps()

    # ---- after an update --------------------------------------------------------------------------------------------

    def advance(self, optimizer: Optimizer) -> None:
        self._equal.advance(self._trainer.current_epoch)

    def rounds(self) -> list[int]:
        return self._equal.rounds()

    def wanted(self) -> list[int]:
        return self._equal.wanted()

    # ---- checkpoints: those of ddp, and what was rounded away -------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self.codec.encodes or self.orthogonal is not None

    def plan(self) -> dict[str, str]:
        own = {} if self.orthogonal is None else {"orthogonal": repr(self.orthogonal)}
        return {"codec": repr(self.codec), **own}

    def progress_state(self) -> dict[str, Any]:
        turns = {} if self._owners is None else {"turns": self._owners.turns}
        return {} if self._gradients is None else {**self._gradients.state_dict(), **turns}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        if self._mean is not None and "codec" in state:
            self._mean.load_state_dict(state)
        if self._owners is not None:
            self._owners.turns = state.get("turns", 0)

    # ---- what users watch -------------------------------------------------------------------------------------------

    def introduction(self) -> Sequence[str]:
        return introduced(self.codec, self._module, self.world_size)

    @property
    def sent_bytes(self) -> int:
        """Gradients, and updates, that this worker sent since fit began, as codes."""
        updates = 0 if self._owners is None else self._owners.sent_bytes
        return updates + (0 if self._mean is None else self._mean.sent_bytes)


def introduced(codec: Codec, module: nn.Module, size: int) -> Sequence[str]:
    """The method in a line; none where a worker is alone."""
    if size == 1:
        return ()
    trained = [p for p in module.parameters() if p.requires_grad]
    messages = f"gradients averaged{f' as {type(codec).__name__} codes' if codec.encodes else ''}"
    sent = traffic(of_all_reduce(coded_bytes(codec, trained), size), sum(p.nbytes for p in trained), size)
    return (f"compressed: {size} workers, {messages}, {sent}, all have the same model, which is evaluated",)


class AveragedSteps(DeviceSteps):
    """Steps of a worker whose gradients are averaged within each backward; `take` gets what came while training."""

    def __init__(self, gradients: GradientAverage, module: nn.Module, check: Unchecked, take: InPlace) -> None:
        self._gradients, self._check, self._take = gradients, check, take
        self._parameters, self._skipped = list(module.parameters()), check.skipped

    def train(self, module: Any, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        before, self._parameters = self._parameters, list(module.parameters())
        self._gradients.watch(self._parameters)  # some may have been unfrozen since the last step
        if list(map(id, before)) != list(map(id, self._parameters)):
            # A module that came while training: each worker has drawn another, maybe.
            self._take([p for p in self._parameters if p not in set(before)])
        return step()

    def averaging(self, closure: Callable[[], Any]) -> Any:
        return self._gradients.around(closure)

    def before(self, loss: Any) -> None:
        self._gradients.before(loss)  # thawed within the step, too

    def blocked(self) -> AbstractContextManager[None]:
        return self._gradients.blocked()

    def updated(self, optimizer: Any) -> None:
        before, self._skipped = self._skipped, self._check.skipped
        self._gradients.updated(optimizer, self._skipped > before)


class Owners:
    """Muon's matrices are made orthogonal by their owners, until `close`."""

    def __init__(
        self, optimizers: Sequence[Optimizer], codec: Codec, over: Transport, meet: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._muons: list[Muon] = []
        self._codec, self._over, self._meet = codec, over, meet
        self.turns, self.sent_bytes = 0, 0
        self.serve(optimizers)

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """ValueError where none of them is a Muon."""
        self.close()
        self._muons = [optimizer for optimizer in optimizers if isinstance(optimizer, Muon)]
        if not self._muons:
            raise ValueError("no optimizer is a Muon, whose matrices could be shared out: leave orthogonal out")
        for muon in self._muons:
            # On the instance, over the method of its class: `close` has only to take it away.
            muon.change = self._change  # type: ignore[method-assign]

    def _change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        self.sent_bytes += self._meet(lambda: by_owners(change, tensors, self._codec, self._over, self.turns))
        self.turns += 1

    def close(self) -> None:
        for muon in self._muons:
            vars(muon).pop("change", None)
