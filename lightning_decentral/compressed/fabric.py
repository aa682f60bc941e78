"""Strategy for Lightning Fabric, `Fabric(strategy="compressed")`: a quantized all-reduce of gradients."""

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.compressed.strategy import introduced
from lightning_decentral.shared.compute.buckets import bucket_bytes_of, check_bucket_bytes
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.quantize import Int8
from lightning_decentral.shared.fabric.loop import LOOK_STEPS
from lightning_decentral.shared.fabric.strategy import FabricWorkers
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.updates import GradientCheck, NonFinite
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import mean_by, refuse_estimates
from lightning_decentral.shared.wire.transport import Wire, of_all


class Reduced:
    """Averages one module's gradients within each backward that isn't blocked, and its running statistics."""

    def __init__(
        self, module: nn.Module, wire: Wire, strategy: "FabricCompressedStrategy", taken: Set[nn.Parameter]
    ) -> None:
        self.module, self._taken = module, taken  # parameters of modules set up before, which already average them
        hosts = of_all(wire.hosts)
        self.mean = mean_by(strategy.codec, partial(of_all, wire.group), strategy.root_device)
        bucket_bytes = strategy.bucket_bytes or bucket_bytes_of(module.parameters())
        scaler = getattr(strategy.precision, "scaler", None)
        if scaler is not None or strategy.nonfinite == "skip":
            self.mean.guard(scale_of(scaler, strategy.root_device))
        self.gradients = GradientAverage(self.mean, hosts, strategy.waiting, bucket_bytes)
        self.equal = EqualReplicas()
        self.equal.begin(module, of_all(wire.group), strategy._group.layouts, lambda: strategy.optimizers)
        self.equal.join(self.gradients)
        self.watch()

    def watch(self) -> None:
        """Average the parameters that are trained now: some may have been unfrozen since the last step."""
        self.gradients.watch([p for p in self.module.parameters() if p not in self._taken])


@checked
class FabricCompressedStrategy(FabricWorkers):
    """g = (1/n) sum_i Q(g_i + e_i), as in `CompressedStrategy`, where the user's own loop calls `fabric.backward`.

    Gradients are sent while the backward runs; under `fabric.no_backward_sync` they are only accumulated. All workers
    take the same update and stay equal bit for bit.

    Args:
        codec, bucket_bytes, nonfinite: as for `CompressedStrategy`; each module has its own buckets.
        **ddp: arguments of Fabric's DDPStrategy (start_method, process_group_backend, ...), and `timeout`.

    Raises:
        ValueError: for an unknown option, a codec of differences, or no bytes in a bucket.
    """

    drifts: ClassVar[bool] = False

    def __init__(
        self, *, codec: Codec | None = None, bucket_bytes: int | None = None, nonfinite: NonFinite = "stop", **ddp: Any
    ) -> None:
        super().__init__(**ddp)
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite)
        self.codec, self.bucket_bytes = codec or Int8(), bucket_bytes
        check_bucket_bytes(bucket_bytes)
        refuse_estimates(self.codec)
        self._reduced: list[Reduced] = []

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        module = super().setup_module(module)
        if self.wire is not None and not any(each.module is module for each in self._reduced):
            taken = {p for each in self._reduced for p in each.module.parameters()}
            self._reduced.append(Reduced(module, self.wire, self, taken))
        return module

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        own = next((each for each in self._reduced if each.module is module), None)
        return super().accumulating(module) if own is None else own.gradients.blocked()

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._group.set_ups.begin()
        with self._telling():
            for each in self._reduced:
                each.watch()
        super().backward(tensor, module, *args, **kwargs)

    def waiting(self, call: Any) -> None:
        """Run a call that waits for the other workers."""
        with self._telling():
            call()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        skipped = self.gradient_check.skipped
        output = super().optimizer_step(optimizer, **kwargs)
        for each in self._reduced:
            each.gradients.updated(optimizer, self.gradient_check.skipped > skipped)
        return output

    def advance(self, optimizer: Optimizer) -> None:
        for each in self._reduced if self._begins else ():
            each.equal.advance(self.steps // LOOK_STEPS)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self.codec.encodes

    def plan(self) -> dict[str, str]:
        return {"codec": repr(self.codec)}

    def progress_state(self) -> dict[str, Any]:
        return {"means": [each.mean.state_dict() for each in self._reduced]}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        for each, saved in zip(self._reduced, state["means"], strict=True):
            each.mean.load_state_dict(saved)

    def restart(self) -> None:
        for each in self._reduced:
            each.mean.forget()

    @property
    def sent_bytes(self) -> int:
        """Bytes of encoded gradients that this worker sent since the modules were set up."""
        return sum(each.mean.sent_bytes for each in self._reduced)

    def introduction(self) -> Sequence[str]:
        return introduced(self.codec, self.lightning_module, self.world_size)
