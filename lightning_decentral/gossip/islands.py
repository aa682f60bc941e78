"""What islands of several devices change in the binding: the number of workers, gradients, and who waits for whom."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.wire.island import Island, Solo
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.shared.replica import ReplicaStrategy
from lightning_decentral.shared.wire.fsdp import full_tensor, like, local, mapped, own_part


class IslandStrategy(ReplicaStrategy):
    """A strategy whose replicas are islands of devices.

    Args:
        island: what one worker is.
    """

    def __init__(self, *, island: Island | None = None, **replica: Any) -> None:
        super().__init__(**replica)
        self.island = island or Solo()
        self._member = IslandMember(None, 1, self._meet)

    @property
    def workers(self) -> int:
        """Islands."""
        return self.island.workers(self.num_nodes * self.num_processes, self.num_processes)

    @property
    def workers_per_node(self) -> int:
        """Islands that share a node's network card; 1 where an island has several nodes."""
        return max(1, self.num_processes // self.island.devices)

    @property
    def worker(self) -> int:
        """The number of this device's island."""
        return self.global_rank // self.island.devices

    @property
    def layout(self) -> str:
        """Which devices can take over whose state."""
        return "" if self.island.devices == 1 else f"{type(self.island).__name__}({self.island.devices})"

    def arrange(self) -> None:
        """Join the island, before the optimizers exist."""
        if self._wire is not None:
            self._refuse_unsharded()
            self._member = self.island.join(self._wire, self.root_device, self._meet)
            self._member.arrange(self._module)

    def _refuse_unsharded(self) -> None:
        if self.island.shards == 1:
            return
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"precision 16-mixed scales the loss, and devices of {self.island!r} would skip different updates: "
                "use bf16-mixed"
            )
        if not self._module.automatic_optimization:
            raise ValueError(
                f"manual optimization runs the backward inside training_step, where {self.island!r} would lose the "
                "gradients: use AllReduce, or automatic optimization"
            )
        types = sorted({str(p.dtype) for p in self._module.parameters()})
        if len(types) > 1:
            raise ValueError(
                f"{self.island!r} needs parameters of one type, got {' and '.join(types)}: convert the module, "
                "or use AllReduce"
            )
        for callback in self._trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise ValueError(
                    f"{type(callback).__name__} copies whole models, {self.island!r} holds shards: use AllReduce"
                )

    def release(self) -> None:
        """Leave the module as it was."""
        self._member.close(self.alone)
        self._member = IslandMember(None, 1, self._meet)

    # ---- steps --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        step, redirect = self._calls("training_step", args, kwargs)
        with self.precision_plugin.train_step_context():
            return self._member.train(self._module, step, redirect)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        with self.precision_plugin.val_step_context():
            return self._member.evaluate(*self._calls("validation_step", args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        with self.precision_plugin.test_step_context():
            return self._member.evaluate(*self._calls("test_step", args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        with self.precision_plugin.predict_step_context():
            return self._member.evaluate(*self._calls("predict_step", args, kwargs))

    def _calls(self, name: str, args: Any, kwargs: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """A step of the module by itself, and inside the module's own call."""
        module = self._module
        return (
            lambda: getattr(module, name)(*args, **kwargs),
            lambda: self._forward_redirection(module, module, name, *args, **kwargs),
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are only accumulated meanwhile."""
        with self._member.blocked():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """With the island's gradients; under manual optimization its devices have averaged them in the backward."""
        whole = (lambda: self._member.averaging(closure)) if self._module.automatic_optimization else closure
        return super().optimizer_step(optimizer, whole, model, **kwargs)

    # ---- the mean model -----------------------------------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the workers, shard by shard."""
        return self._member.mean(tensors, super().mean_of)

    def mean_of_buckets(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean of flat tensors over the workers."""
        return self._member.mean_of_buckets(tensors, super().mean_of)

    def _averaged(self) -> list[Tensor]:
        self._member.rest()
        return super()._averaged()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Sharded tensors as one process would have them, on worker 0; collective."""
        if self.alone and self._member.shards > 1:
            raise RuntimeError(f"a device of {self.island!r} can't save the model without the others")
        gathered: dict[str, Any] = mapped(self._gathered, tree)
        return gathered

    def _gathered(self, tensor: Tensor) -> Tensor:
        full = full_tensor(tensor)
        return full.cpu() if self.is_global_zero else full[:0]

    def part(self, tree: dict[str, Any]) -> dict[str, Any]:
        """This device's shards as plain tensors."""
        parts: dict[str, Any] = mapped(lambda tensor: local(tensor).clone(), tree)
        return parts

    def restored(self, own: dict[str, Any], mean: Mapping[str, Any]) -> dict[str, Any]:
        """What Lightning loads into the module, which is whole at that time; the shards follow in `_resume`."""
        if self.island.shards == 1:
            return own
        assert self._restored is not None
        self._restored["shards"] = own["state_dict"]
        return {**own, "state_dict": mean["state_dict"]}

    def _resume(self) -> None:
        super()._resume()
        if self._restored is not None and "shards" in self._restored:
            self._member.load(self._module, self._restored["shards"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """This device's part of it."""
        if self._member.shards > 1:
            states = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            checkpoint = {**checkpoint, "optimizer_states": [self._sharded_state(*pair) for pair in states]}
        super().load_optimizer_state_dict(checkpoint)

    def _sharded_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        rows = {n: state["state"].get(n, {}) for n in numbers}
        placed = {
            n: {key: self._placed(value, p) for key, value in rows[n].items()}
            for n, p in zip(numbers, parameters, strict=True)
        }
        return {**state, "state": {n: row for n, row in placed.items() if row}}

    def _placed(self, value: Any, parameter: nn.Parameter) -> Any:
        """A moment like its parameter; a step count stays what it is."""
        if not isinstance(value, Tensor) or value.dim() != parameter.dim():
            return value
        return like(parameter, (value if self.resuming else own_part(value, parameter)).to(parameter.device))
