"""`Fabric(strategy="partial_backprop")`: the backward stops at a cut in a loop of the user's own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.partial.agreed import found_together, remembered, wished
from lightning_decentral.partial.compute.frozen_update import Absent, Skip, settle
from lightning_decentral.partial.compute.search import CutPlan, Cuts, check_wish, search
from lightning_decentral.partial.compute.trial import Decide
from lightning_decentral.partial.dry_run import repeated
from lightning_decentral.partial.plan.cost import Balance, SavedBytes
from lightning_decentral.partial.plan.depth import DepthAssignment, Temporal
from lightning_decentral.partial.start import described
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.partial.wire.reducer import Rank, Reducer
from lightning_decentral.shared.fabric.strategy import FabricWorkers
from lightning_decentral.shared.nonfinite import GradientCheck, NonFinite
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.wire.meeting.layouts import Trained
from lightning_decentral.shared.wire.running_buffers import RunningBuffers

LOOK_ROUNDS = 100
"""So often all buffers are compared, to find those that change: a loop of the user's own says nothing of epochs."""


class Network(nn.Module):
    """What the loop calls: a forward within a cut."""

    def __init__(self, module: nn.Module, cut: Callable[..., AbstractContextManager[None]]) -> None:
        super().__init__()
        self.module, self._cut = module, cut

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._cut(*args, **kwargs):
            return self.module(*args, **kwargs)


@checked
class FabricPartialBackpropStrategy(FabricWorkers):
    """grad of segment s = mean over exactly the workers that train s, as `PartialBackpropStrategy`, where the user's
    own loop calls the model, `fabric.backward` and `optimizer.step()`.

    The first forward finds and verifies the cuts on a copy of the model, by a random weighting of its outputs in the
    loss's place: what crosses a cut for that crosses it for any loss of the outputs. Under `fabric.no_backward_sync`
    gradients are only accumulated. One trained model; all workers take the same update and stay bit-equal.

    Args:
        depth: as for `PartialBackpropStrategy`, its warm-up in steps; by default `Temporal(warm_up=0)`.
        cuts, balance, absent, bucket_bytes, nonfinite: as for `PartialBackpropStrategy`.
        **ddp: what Fabric's DDPStrategy itself takes (start_method, process_group_backend, ...), and `timeout`.

    Raises:
        ValueError: here for an unknown option, impossible cuts, a warm-up that is a part of the run; at set-up for
            shares of the batch that differ, a second trained model; at the first forward, on every worker, for cuts
            that aren't (with the reason).
    """

    drifts: ClassVar[bool] = False

    def __init__(
        self,
        *,
        depth: DepthAssignment | None = None,
        cuts: Cuts = "auto",
        balance: Balance | None = None,
        absent: Absent | None = None,
        bucket_bytes: int | None = None,
        nonfinite: NonFinite = "stop",
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite)
        check_wish(cuts)
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}: leave it out for the default")
        self.depth = depth or Temporal(warm_up=0)
        if 0 < self.depth.warm_up < 1:
            raise ValueError(f"a loop with Fabric has no known end: give warm_up in steps, got {self.depth.warm_up}")
        self.cuts, self.balance, self.absent = cuts, balance or SavedBytes(), absent or Skip()
        self.bucket_bytes = bucket_bytes
        self.driver: DepthController | None = None  # the cuts in use, from the first forward on
        self._module: nn.Module | None = None
        self._reducer: Reducer | None = None
        self._buffers: RunningBuffers | None = None
        self._saved: dict[str, Any] | None = None
        self._before, self._blocked = 0, False

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        module = super().setup_module(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # a teacher
        if self._module is not None:
            raise ValueError("partial backprop cuts one trained model: set up one that holds the others, or use gossip")
        shares = {self.depth.share(rank, self.world_size) for rank in range(self.world_size)}
        if len(shares) > 1:
            raise ValueError(f"{self.depth} asks for unequal batches, which only a Trainer hands out: use Staircase")
        self._module = module
        if self.wire is not None:
            buffers = self.wire.group(None)
            assert buffers is not None
            self._buffers = RunningBuffers(module, buffers)
        return Network(module, self._cut)

    def adopt(self, optimizer: Optimizer) -> None:
        """Gradients are averaged segment by segment."""

    def _drive(self, *args: Any, **kwargs: Any) -> DepthController:
        module = self._module
        assert module is not None
        if "forward" in vars(module):  # so does Fabric where a marked method comes first, and no copy would follow
            raise ValueError(f"{type(module).__name__}'s forward is replaced: call the model itself first")

        def find(decide: Decide) -> CutPlan:
            step = repeated(lambda trial: lambda: weighted(trial(*args, **kwargs)))
            return search(module, wished(self.cuts, self._saved), self.balance, step, decide)

        with self._telling():
            plan = found_together(self.gather, find)
        place = Rank(self.global_rank, (1 / self.world_size,) * self.world_size)
        driver = DepthController(module, plan, self.depth, place)
        if self.wire is not None:
            self._reducer = Reducer(driver.segments, place, self.wire.group, self.wire.hosts, self.bucket_bytes)
            assert self._buffers is not None
            trained = Trained(module.named_parameters, lambda: self.optimizers)
            self._reducer.news, self._reducer.layouts = self._buffers.changed, self._attendance.layouts(trained)
        if self.global_rank == 0:
            print(described(driver, type(module).__name__))
        self.driver, self._saved = driver, None
        return driver

    # ---- one step ---------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._before + self.steps

    @contextmanager
    def _cut(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        assert self._module is not None
        if not (self._module.training and torch.is_grad_enabled()):
            yield
            return
        driver = self.driver or self._drive(*args, **kwargs)
        with driver.together(self._step):
            yield

    @contextmanager
    def accumulating(self, module: nn.Module) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.driver is None:
            raise RuntimeError("backward before any forward in training mode: call the model as fabric.setup gave it")
        self._attendance.set_ups.begin()
        reducer = None if self._blocked else self._reducer
        if reducer is not None:
            with self._telling():
                with self.driver.bypass.lifted():
                    reducer.refresh()
                reducer.begin(self.driver.contributors(self._step))
        super().backward(tensor, module, *args, **kwargs)
        self.driver.bypass.end()
        if reducer is not None:
            with self._telling():
                reducer.finish()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        step, closure = self._step, kwargs.get("closure")  # the update moves the step on

        def closed() -> Any:
            loss = None if closure is None else closure()
            if self.driver is not None:
                settle(self.absent, optimizer, self.driver.absent(step))
            return loss

        if closure is None:
            closed()
        return super().optimizer_step(optimizer, **({} if closure is None else {"closure": closed}))

    def advance(self, optimizer: Optimizer) -> None:
        if self._turn.begun and self._buffers is not None:
            heard = self._reducer is not None and self._reducer.heard()
            self._buffers.share(heard or self.steps % LOOK_ROUNDS == 0)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return True

    def plan(self) -> dict[str, str]:
        return {}

    def progress_state(self) -> dict[str, Any]:
        return {"step": self._step, **({} if self.driver is None else remembered(self.driver, self.cuts))}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self.restart()
        self._before = state["step"] - self.steps
        self._saved = state if "wish" in state else None

    def restart(self) -> None:
        if self.driver is not None:
            self.driver.remove()
        if self._reducer is not None:
            self._reducer.layouts.close()
            self._reducer.close()
        self.driver, self._reducer, self._saved = None, None, None

    @property
    def sent_bytes(self) -> float:
        """Gradients that this worker sent since the cuts were made (its part of collective calls)."""
        return 0.0 if self._reducer is None else self._reducer.sent_bytes


def weighted(output: Any) -> Tensor:
    """sum of r * output over all tensors of an output, r random: any loss's gradient by the outputs is such an r.

    Raises:
        ValueError: nothing in it has a gradient.
    """
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("the first forward returned nothing with a gradient, by which cuts are verified: return it")
    generator = torch.Generator().manual_seed(0)
    terms = [(leaf * torch.randn(leaf.shape, generator=generator).to(leaf)).sum() for leaf in leaves]
    return torch.stack([term.float() for term in terms]).mean()
