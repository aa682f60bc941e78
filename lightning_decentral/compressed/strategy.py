"""Strategy for `Trainer(strategy="compressed")`: data-parallel training with a quantized all-reduce of gradients."""

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
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import FlatMean, mean_by, refuse_estimates
from lightning_decentral.shared.wire.owners import InPlace, by_owners
from lightning_decentral.shared.wire.transport import Transport, Wire, of_all


@checked
class CompressedStrategy(ReplicaStrategy):
    """g = (1/n) sum_i Q(g_i + e_i), encoded again for the broadcast of the mean: `ddp` at a fraction of its bytes.

    Gradients are averaged bucket by bucket while the backward runs, as under DDP: workers send codes to the owners of
    parts, which send the encoded means to all. The rounding errors of both are added in the next step. All replicas
    take the same update and stay equal bit for bit. The module isn't wrapped: its names and checkpoints don't change.

    Args:
        codec: codec of the gradients. `Int8()`, the default, sends a quarter of the bytes; `Plain()` is `ddp` itself.
        bucket_bytes: largest bytes of gradients averaged together, unless one parameter has more; by default an eighth
            of the model, 2 to 256 MiB: the last bucket's communication can't overlap the backward.
        orthogonal: under `Muon`, a codec for orthogonalized updates: each hidden matrix is then orthogonalized once, by
            its owner, which sends the result to the others. None, the default: every worker orthogonalizes all. A codec
            pays if matrix products are slow and links are fast, as this communication overlaps nothing.
        nonfinite: reaction to gradients with NaN or infinity: "stop" ends training, "skip" skips the update on all
            workers; a loss scaler skips by itself.
        timeout: how long a worker waits for another worker, in any call, before it ends with an error.
        **ddp: arguments of Lightning's DDPStrategy (start_method, process_group_backend, ...).

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
        over = None if wire is None else of_all(wire.group)
        self._equal.begin(self._module, over, self._group.layouts, lambda: self.optimizers)
        if wire is None:
            return
        hosts = of_all(wire.hosts)
        self._mean = mean_by(self.codec, partial(of_all, wire.group), self.root_device)
        bucket_bytes = self.bucket_bytes or bucket_bytes_of(self._module.parameters())
        self._gradients = GradientAverage(self._mean, hosts, self.meet, bucket_bytes, self._where)
        self._equal.join(self._gradients)
        self.member = AveragedSteps(self._gradients, self._module, self.gradient_check, self._from_worker_0)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None or self.nonfinite == "skip":
            self._mean.guard(scale_of(scaler, self.root_device))
        if self.orthogonal is not None:
            self._owners = Owners(self.optimizers, self.orthogonal, of_all(wire.group), self.meet)

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
        """Bytes of encoded gradients and updates that this worker sent since fit began."""
        updates = 0 if self._owners is None else self._owners.sent_bytes
        return updates + (0 if self._mean is None else self._mean.sent_bytes)

    @property
    def wait_seconds(self) -> float:
        """Seconds in which training waited for other workers' gradients since fit began."""
        return 0.0 if self._gradients is None else self._gradients.wait_seconds


def introduced(codec: Codec, module: nn.Module, size: int) -> Sequence[str]:
    """Describe the method in a line; nothing for a single worker."""
    if size == 1:
        return ()
    trained = [p for p in module.parameters() if p.requires_grad]
    messages = f"gradients averaged{f' as {type(codec).__name__} codes' if codec.encodes else ''}"
    sent = traffic(of_all_reduce(coded_bytes(codec, trained), size), sum(p.nbytes for p in trained), size)
    return (f"compressed: {size} workers, {messages}, {sent}, all have the same model, which is evaluated",)


class AveragedSteps(DeviceSteps):
    """Steps of a worker that averages gradients within each backward; `take` equalizes parameters added in training."""

    def __init__(self, gradients: GradientAverage, module: nn.Module, check: Unchecked, take: InPlace) -> None:
        self._gradients, self._check, self._take = gradients, check, take
        self._parameters, self._skipped = list(module.parameters()), check.skipped

    def train(self, module: Any, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        before, self._parameters = self._parameters, list(module.parameters())
        self._gradients.watch(self._parameters)  # some may have been unfrozen since the last step
        if list(map(id, before)) != list(map(id, self._parameters)):
            # A module added while training: workers may have drawn different values.
            self._take([p for p in self._parameters if p not in set(before)])
        return step()

    def averaging(self, closure: Callable[[], Any]) -> Any:
        return self._gradients.around(closure)

    def before(self, loss: Any) -> None:
        self._gradients.before(loss)  # includes parameters unfrozen within the step

    def blocked(self) -> AbstractContextManager[None]:
        return self._gradients.blocked()

    def updated(self, optimizer: Any) -> None:
        before, self._skipped = self._skipped, self._check.skipped
        self._gradients.updated(optimizer, self._skipped > before)


class Owners:
    """Lets each of Muon's matrices be orthogonalized by its owner alone, until `close`."""

    def __init__(
        self, optimizers: Sequence[Optimizer], codec: Codec, over: Transport, meet: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._muons: list[Muon] = []
        self._codec, self._over, self._meet = codec, over, meet
        self.turns, self.sent_bytes = 0, 0
        self.serve(optimizers)

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the `change` method of each Muon. ValueError: no optimizer is a Muon."""
        self.close()
        self._muons = [optimizer for optimizer in optimizers if isinstance(optimizer, Muon)]
        if not self._muons:
            raise ValueError("orthogonal needs Muon, and no optimizer is a Muon: leave orthogonal out")
        for muon in self._muons:
            # An instance attribute hides the method of the class: `close` only has to delete it.
            muon.change = self._change  # type: ignore[method-assign]

    def _change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        self.sent_bytes += self._meet(lambda: by_owners(change, tensors, self._codec, self._over, self.turns))
        self.turns += 1

    def close(self) -> None:
        for muon in self._muons:
            vars(muon).pop("change", None)
