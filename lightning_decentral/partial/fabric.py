"""Strategy `Fabric(strategy="partial_backprop")`: the backward stops at a cut in the user's own loop."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.partial.agreed import (
    described,
    found_together,
    introduced,
    options,
    remembered,
    repeated,
    wished,
)
from lightning_decentral.partial.compute.frozen_update import Absent
from lightning_decentral.partial.compute.search import CutPlan, Cuts, search
from lightning_decentral.partial.compute.trial import Decide
from lightning_decentral.partial.plan.cost import Balance
from lightning_decentral.partial.plan.depth import DepthAssignment, Temporal
from lightning_decentral.partial.wire.depth_controller import CutSteps, DepthController
from lightning_decentral.partial.wire.reducer import Rank
from lightning_decentral.shared.fabric.loop import LOOK_STEPS
from lightning_decentral.shared.fabric.strategy import FabricWorkers
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.updates import GradientCheck, NonFinite
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.transport import of_all


class CutModule(nn.Module):
    """Module that the user's loop calls: its forward runs within a cut."""

    def __init__(self, module: nn.Module, cut: Callable[..., AbstractContextManager[None]]) -> None:
        super().__init__()
        self.module, self._cut = module, cut

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._cut(*args, **kwargs):
            return self.module(*args, **kwargs)


@checked
class FabricPartialBackpropStrategy(FabricWorkers):
    """Partial backpropagation as in `PartialBackpropStrategy`, for a loop of the user's own that calls the model,
    `fabric.backward` and `optimizer.step()`.

    The first forward finds and verifies the cuts on a copy of the model, with a random weighting of its outputs as the
    loss: a cut that holds for the outputs holds for any loss of them. Under `fabric.no_backward_sync` gradients are
    only accumulated. One model is trained; all workers make the same update and stay bit-equal.

    Args:
        depth: as for `PartialBackpropStrategy`, with its warm-up in steps; by default `Temporal(warm_up=0)`.
        cuts, balance, absent, bucket_bytes, nonfinite: as for `PartialBackpropStrategy`.
        **ddp: options of Fabric's DDPStrategy (start_method, process_group_backend, ...), and `timeout`.

    Raises:
        ValueError: here for an unknown option, impossible cuts, a warm-up that is a fraction of the run; at set-up for
            unequal shares of the batch, a second trained model; at the first forward, on every worker, for cuts that
            fail the verification (with the reason).
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
        self.depth, self.cuts, self.balance, self.absent, self.bucket_bytes = options(
            depth or Temporal(warm_up=0), cuts, balance, absent, bucket_bytes
        )
        if 0 < self.depth.warm_up < 1:
            raise ValueError(f"a loop with Fabric has no known end: give warm_up in steps, got {self.depth.warm_up}")
        self._module: nn.Module | None = None
        self._cut_steps, self._equal = CutSteps(self.absent), EqualReplicas()
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite, self._cut_steps.settle)
        self._saved: dict[str, Any] | None = None
        self._before = 0

    @property
    def driver(self) -> DepthController | None:
        """Controller of the cuts in use, from the first forward on."""
        return self._cut_steps.driver

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        module = super().setup_module(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # a frozen model, as a teacher
        if self._module is not None:
            raise ValueError("partial backprop cuts one trained model: set up one module that has all, or use gossip")
        shares = {self.depth.share(rank, self.world_size) for rank in range(self.world_size)}
        if len(shares) > 1:
            raise ValueError(f"{self.depth} asks for unequal batches, which only a Trainer can give: use Staircase")
        self._module = module
        self._equal.begin(
            module, None if self.wire is None else of_all(self.wire.group), self._group.layouts, lambda: self.optimizers
        )
        return CutModule(module, self._cut)

    def _drive(self, *args: Any, **kwargs: Any) -> DepthController:
        module = self._module
        assert module is not None
        if "forward" in vars(module):  # Fabric replaces it where a marked method comes first, and a copy would miss it
            raise ValueError(f"{type(module).__name__}'s forward is replaced: call the model itself first")

        def find(decide: Decide) -> CutPlan:
            step = repeated(lambda trial: lambda: weighted(trial(*args, **kwargs)))
            return search(module, wished(self.cuts, self._saved), self.balance, step, decide)

        with self._telling():
            plan = found_together(self.gather, find)
        place = Rank(self.global_rank, (1 / self.world_size,) * self.world_size)
        driver = DepthController(module, plan, self.depth, place)
        self._cut_steps.drive(driver, self.wire, self._equal, self.bucket_bytes)
        if self.global_rank == 0:
            print(described(driver, type(module).__name__))
        self._saved = None
        return driver

    @property
    def _step(self) -> int:
        return self._before + self.steps

    def _cut(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        assert self._module is not None
        if not (self._module.training and torch.is_grad_enabled()):
            return nullcontext()
        return (self.driver or self._drive(*args, **kwargs)).together(self._step)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._cut_steps.blocked()

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.driver is None:
            raise RuntimeError("backward before any forward in training mode: call the model from fabric.setup")
        self._group.set_ups.begin()
        with self._telling():
            self._cut_steps.begin()
        super().backward(tensor, module, *args, **kwargs)
        with self._telling():
            self._cut_steps.end()

    def advance(self, optimizer: Optimizer) -> None:
        if self._begins and self._module is not None:
            self._equal.advance(self.steps // LOOK_STEPS)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return True

    def progress_state(self) -> dict[str, Any]:
        return {"step": self._step, **({} if self.driver is None else remembered(self.driver, self.cuts))}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self.restart()
        self._before = state["step"] - self.steps
        self._saved = state if "wish" in state else None

    def restart(self) -> None:
        self._cut_steps.close()
        self._saved = None

    def introduction(self) -> Sequence[str]:
        return introduced(self.depth, self.lightning_module, self.world_size)

    @property
    def sent_bytes(self) -> float:
        """Bytes of gradients that this worker sent since the cuts were made (its part of collective calls)."""
        return self._cut_steps.sent_bytes


def weighted(output: Any) -> Tensor:
    """sum of r * output over all tensors of an output, with random r: any loss has such a gradient by the outputs.
    ValueError: no output has a gradient."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("the first forward returned no tensor with a gradient, which verifies cuts: return one")
    generator = torch.Generator().manual_seed(0)
    terms = [(leaf * torch.randn(leaf.shape, generator=generator).to(leaf)).sum() for leaf in leaves]
    return torch.stack([term.float() for term in terms]).mean()
