"""Strategy `Trainer(strategy="spilled")`: CPU offload, for a model that is larger than its device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_decentral.shared.checkpoint.reading import refuse_other_number, report_mean
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.layout import refuse_lazy
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.refusals import named
from lightning_decentral.shared.wire.transport import connected, everyone
from lightning_decentral.spilled.compute.engine import Engine
from lightning_decentral.spilled.compute.transfer import device_of
from lightning_decentral.spilled.compute.update import OnHost, Update, Updating
from lightning_decentral.spilled.plan.shards import ShardPlan, summary

UNLIMITED = 2**63
USABLE = 0.9  # share of the free memory on a CUDA device: allocator rounding and libraries need the rest


@checked
class SpilledStrategy(SingleDeviceStrategy):
    """CPU offload: train a model within `memory_bytes` of its device, with unchanged results.

    Parameters, gradients and optimizer state stay on the host. Consecutive blocks form shards; a shard's parameters are
    copied to the device for its forward and again for its backward, the next shard's while this one computes. The
    backward runs each block's forward again from its input, with the same random numbers. The update runs on the host,
    by any optimizer, or on the device, to which parameters, gradients and state are then copied a few at a time.

    Args:
        memory_bytes: total for the device; by default 0.9 of the free memory on a CUDA device, and no limit on the CPU,
            which only stands in for a device.
        blocks: "auto", or names of modules that are loaded by themselves.
        resident: names of modules and parameters whose copies stay on the device during a whole step.
        update: `OnHost()` or `OnDevice()`; None: on the host.
        accelerator, checkpoint_io, precision_plugin: as for any of Lightning's strategies.

    Raises:
        ValueError: here for impossible options, several devices, a device that is neither CPU nor CUDA; at set-up for
            manual optimization, a compiled module or a block larger than the budget; after the first step for a budget
            that is too small (names the block, its bytes, the least budget).

    Source: model spilling, Nagrecha et al. 2110.08633.
    """

    strategy_name = "spilled"

    def __init__(
        self,
        *,
        memory_bytes: int | None = None,
        blocks: str | Sequence[str] = "auto",
        resident: Sequence[str] = (),
        update: Update | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        if memory_bytes is not None and memory_bytes <= 0:
            raise ValueError(f"memory_bytes must be positive, got {memory_bytes}: leave it out to use what is free")
        self.memory_bytes, self.blocks, self.resident = memory_bytes, blocks, resident
        self.update = update or OnHost()
        self._updating: Updating | None = None
        self.engine: Engine | None = None  # between set-up and teardown
        self._budget_bytes: int | None = None

    # ---- one device ---------------------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        return []  # Lightning sets its own devices only if there are none, and this list must be asked for

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(f"the spilled strategy trains on one device, got {len(devices)}: give devices=1")
        if devices[0].type not in ("cpu", "cuda"):
            raise ValueError(f"the spilled strategy can't copy to {devices[0].type}: use a CUDA device or the CPU")
        self._root_device = devices[0]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make tensors in `configure_model` on the host."""
        there, self._root_device = self._root_device, torch.device("cpu")
        try:
            with super().tensor_init_context(empty_init):
                yield
        finally:
            self._root_device = there

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        if connected():
            raise ValueError(
                f"the spilled strategy trains on one device, and this process has joined {everyone().size} workers: "
                "start one (num_workers=1), or several runs"
            )
        refuse_lazy(module.parameters())
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} optimizes manually, but parameters on the device during its step would miss "
                "the update: use automatic optimization"
            )
        super().setup(trainer)
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            self.precision_plugin.scaler = host_scaler(self.precision_plugin.scaler)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.update.refuse(optimizer)

    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        place = self.root_device
        _update_properties(module, device=place)  # module.device: where it computes, though parameters stay on the host
        options: Any = {"blocks": self.blocks, "resident": self.resident, "announce": self._announce}
        self._budget_bytes = self.memory_bytes
        if self._budget_bytes is None and place.type == "cuda":
            self._budget_bytes = int(USABLE * cuda.free_bytes(place))
        self.engine = Engine(module, device_of(place), self._budget_bytes or UNLIMITED, **options)
        self._updating = self.update.begin(self.engine.device, self._budget_bytes or UNLIMITED)

    def _announce(self, kind: str, plan: ShardPlan) -> None:
        where = {"device": "the CPU stands in for one, which saves nothing"} if self.root_device.type == "cpu" else {}
        lines = {**summary(plan, self._budget_bytes), **where}
        rank_zero_info("\n".join([f"spilled {kind}:", *(f"  {name}: {text}" for name, text in lines.items())]))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            report_mean(checkpoint_path, checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        refuse_other_number(checkpoint, self.optimizers)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.detach()
        self.engine = self._updating = None
        super().teardown()

    @property
    def _running(self) -> Engine:
        assert self.engine is not None, "steps run between set-up and teardown"
        return self.engine

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._running.step("training", (args, kwargs), backward=True):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        with self._running.counting():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._running.finish()
        return loss

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._updating is not None, "steps run between set-up and teardown"
        with self._updating(optimizer, self._running.parameters):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._running.step("validation", (args, kwargs)):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._running.step("test", (args, kwargs)):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._running.step("predict", (args, kwargs)):
            return super().predict_step(*args, **kwargs)

    def __repr__(self) -> str:
        return named(self)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the package registers its names itself; SingleDeviceStrategy's would be `single_device`."""


def host_scaler(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Copy a gradient scaler for gradients on the host: its scale is on the host, too, and read without a wait."""
    own = torch.amp.GradScaler("cpu")
    own.load_state_dict(scaler.state_dict())
    own.scale(torch.zeros(()))  # the scale is made on the first loss's device
    return own
