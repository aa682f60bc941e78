"""Lightning strategy of one rehearsed worker, whose collectives run between the threads of this process.

A Trainer's collectives reach the other workers' threads by torch.distributed's own calls (`in_process_group`)."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import BrokenBarrierError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import LBFGS, Optimizer

from lightning_decentral.optim.joined import ELEMENTWISE, JoinedUpdate
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings, loss_of, scale, seed_host
from lightning_decentral.planner.rehearsal.member import Member, MemberPlace
from lightning_decentral.planner.rehearsal.rehearsed_strategies import member_of
from lightning_decentral.planner.rehearsal.turns import OwnTurn, Quota, Way, WorkersBarrier
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.in_process import InProcessTransport, Mailboxes
from lightning_decentral.shared.wire.in_process_group import InProcessGroup, ThreadsWorld

LOOK = 10  # Steps between two measurements of the gradients' noise.


@dataclass
class Common:
    """State that the workers of a crew share."""

    strategy: object  # strategy to rehearse, only read
    loop: LoopSettings
    boxes: Mailboxes
    turn: OwnTurn
    quota: Quota
    look: WorkersBarrier  # barrier, in some steps, at which the noise of equal workers' gradients is measured
    meet: WorkersBarrier  # barrier of all workers
    folder: str  # folder for files that a module writes into its logger's folder
    world: ThreadsWorld = field(default_factory=ThreadsWorld)
    way: Way = field(default_factory=Way)  # how gradients are computed
    mixes: bool = True  # whether workers that drift have rounds

    def close(self) -> None:
        """End all waits of workers, and waits for them, future waits included."""
        for part in (self.quota, self.boxes, self.look, self.meet, self.way):
            part.close()


class Park(Callback):
    """Callback that waits, before each step and after loading its batch, until the step is requested."""

    def __init__(self, binding: "Binding") -> None:
        self._binding = binding

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data, steps = trainer.train_dataloader, len(self._binding.losses)
        if steps and isinstance(data, Iterator):  # otherwise the Trainer would begin empty epochs for ever
            self._binding.wait()
            raise ValueError(f"a worker has {steps} batches only: rehearse fewer steps")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._binding.wait()


class Binding(DDPStrategy):
    """Lightning strategy of one rehearsed worker; the module isn't wrapped. ValueError: at set-up, the module or the
    strategy can't be rehearsed."""

    member: Member

    def __init__(self, place: MemberPlace, common: Common) -> None:
        super().__init__()
        self._place, self._common = place, common
        self._group = InProcessGroup(InProcessTransport(common.boxes, "default", place.worker, place.workers))
        self.losses: list[Tensor] = []  # of each step, on the worker's own batch, before the update
        self.learning_rates: list[float] = []  # of each step, of the first parameter group

    # ---- ranks -----------------------------------------------------------------------------------------------------

    root_device = property(attrgetter("_place.device"))
    global_rank = property(attrgetter("_place.worker"))
    world_size = property(attrgetter("_place.workers"))

    @property
    def local_rank(self) -> int:
        return self._place.worker % self._place.per_node

    @property
    def node_rank(self) -> int:
        return self._place.worker // self._place.per_node

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        seeded = {"seed": self._seed} if self._common.loop.seed else {}
        return {"num_replicas": self.world_size, "rank": self.global_rank, **seeded}

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) + self._common.loop.seed

    def _configure_launcher(self) -> None:
        """Configure no launcher: the worker runs in its thread."""

    def set_world_ranks(self) -> None:
        """Do nothing: ranks come from the worker's place."""

    def setup_environment(self) -> None:
        if self._common.loop.seed or "PL_GLOBAL_SEED" in os.environ:
            seed_host(self._seed)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # Before Lightning's first barrier, around `prepare_data`, which would make a gloo group.
        self._common.world.join(self._group)
        super().barrier(*args, **kwargs)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        raise ValueError(
            f"{type(self._module).__name__} saves {filepath}, and a rehearsal trains many times and keeps nothing: "
            "save by a ModelCheckpoint of the Trainer, which a rehearsal leaves out"
        )

    def teardown(self) -> None:
        """Leave the model on its device, where it is evaluated."""

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        module, world = self._module, self._place.wire.world
        self.model = self.precision_plugin.convert_module(module).to(self.root_device)
        check_same_model(module, self._place.wire.roll)
        start_from_worker_0([*module.parameters(), *module.buffers()], world, self.root_device)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.member.begin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            name, count = type(self._module).__name__, len(self.optimizers)
            raise ValueError(f"configure_optimizers of {name} gave {count} optimizers: one can be rehearsed")
        if any(one.reduce_on_plateau for one in self.lr_scheduler_configs):
            raise ValueError("ReduceLROnPlateau asks for validation, which a rehearsal has not: take another schedule")
        optimizer = self.optimizers[0]
        scale(optimizer, [one.scheduler for one in self.lr_scheduler_configs], self._common.loop.rate)
        self._rates = self.rates_now()
        # An update may be made on flat copies, unless hooks of the optimizer would notice.
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        self._joined = JoinedUpdate(optimizer) if type(optimizer) in ELEMENTWISE and not hooked else None
        self.member = member_of(self._common.strategy, self._module, optimizer, self._place)
        if isinstance(optimizer, LBFGS) and not self.member.drifts:
            raise ValueError(
                "LBFGS searches by each worker's own loss, another number of times on each, and gradients are averaged "
                "each time: rehearse it under gossip"
            )

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    def wait(self) -> None:
        """Wait until a further step is requested."""
        self._common.quota.wait(self.global_rank, len(self.losses))
        if self.lr_scheduler_configs:  # schedulers have set the learning rates by now
            self._rates = self.rates_now()

    def rates_now(self) -> list[float]:
        return [float(group.get("lr", 1.0)) for group in self.optimizers[0].param_groups]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._begun = len(self.losses)
        try:
            output = self._update(
                optimizer, self.member.check.after(closure, optimizer, self.precision_plugin), **kwargs
            )
        except BaseException:
            self._common.close()
            with suppress(BrokenBarrierError):
                self._common.way.end(self.global_rank)
            raise
        self._common.way.end(self.global_rank)
        if self._common.loop.rate != 1 and self.rates_now() != self._rates:  # set by code that the factor can't reach
            raise ValueError(
                f"{type(self._module).__name__} sets learning rates by itself, which can't be multiplied by "
                f"{self._common.loop.rate:g}: give a scheduler in configure_optimizers, or rates=[1]"
            )
        if self._common.mixes or not self.member.drifts:
            self.member.mix()
        return output

    def _update(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Update as Lightning's precision plugin does; many small parameters as one."""
        if self._joined is None:
            return Strategy.optimizer_step(self, optimizer, closure, self._module, **kwargs)
        with torch.enable_grad():
            output = self.precision_plugin._wrap_closure(self._module, optimizer, closure)
        self._joined.step()
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.member.forward(len(self.losses), *args):
            output = self._common.way.forward(self.global_rank, partial(super().training_step, **kwargs), args)
        if self._begun == len(self.losses):  # called several times for an optimizer
            self.losses.append(torch.as_tensor(loss_of(output).detach()).double())
            self.learning_rates.append(self.rates_now()[0])
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward as Lightning does; gradients are averaged before hooks see them, as in ddp."""
        plugin, module = self.precision_plugin, self._module
        loss, ends = plugin.pre_backward(closure_loss, module), [] if self.member.drifts else [self._average]

        def end() -> None:
            while ends:
                ends.pop()()

        if is_overridden("backward", module) and loss.device.type == "cpu":  # hooks within see means, too
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(end))
        self.member.backward()
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        end()
        return plugin.post_backward(loss, module)

    def _average(self) -> None:
        self._common.way.end(self.global_rank)
        if self._begun % LOOK == 0:
            self._common.look()
        self.member.average()
