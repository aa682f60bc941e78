"""A worker of one device or several under Lightning: its steps, in which the devices of an island work together."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.islands import refuse_unsharded, sharded_state
from lightning_decentral.gossip.wire.island import Island
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.shared.evaluation import callbacks_of
from lightning_decentral.shared.replica import ReplicaStrategy


class IslandStrategy(ReplicaStrategy):
    """Forwards the steps of a device to its part of the island."""

    island: Island
    member: IslandMember
    """This device's part; alone until `arrange`."""

    def arrange(self) -> None:
        if self.wire is not None:
            callbacks = callbacks_of(self._module.trainer)
            refuse_unsharded(self.island, self._module, callbacks, self.precision_plugin)
            # Before the optimizers exist: FSDP gives the module other parameters.
            self.member = self.island.join(self.wire, self.root_device, self.meet)
            self.member.arrange(self._module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self.member.train(self._module, *self._calls("training_step", args, kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.member.evaluate(*self._calls("validation_step", args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.member.evaluate(*self._calls("test_step", args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.member.evaluate(*self._calls("predict_step", args, kwargs))

    def _calls(self, name: str, args: Any, kwargs: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """A step of the module by itself, and inside the module's own call."""
        module = self._module
        return (
            lambda: getattr(module, name)(*args, **kwargs),
            lambda: self._forward_redirection(module, module, name, *args, **kwargs),
        )

    def averaged(self) -> list[Tensor]:
        self.member.rest()
        return super().averaged()

    def restore_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        if self.member.shards > 1:
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            states = [sharded_state(optimizer, state, self.checkpoints.resuming) for optimizer, state in pairs]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().restore_optimizers(checkpoint)

    def block_backward_sync(self) -> Any:
        return self.member.blocked()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        # Under manual optimization the devices of an island have averaged gradients in the backward.
        whole = (lambda: self.member.averaging(closure)) if self._module.automatic_optimization else closure
        return super().optimizer_step(optimizer, whole, model, **kwargs)
