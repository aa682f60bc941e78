"""Which worker is which stage of which pipeline, and what it's connected to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.pipeline.compute.deferred_init import Deferred
from lightning_decentral.pipeline.compute.intercept import answering
from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.slicing import Uniform
from lightning_decentral.pipeline.wire.slice_planner import Plans
from lightning_decentral.pipeline.wire.stage_runner import Pipe
from lightning_decentral.shared.mean_model import MeanModel
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.replicas import AverageGradients, Bond, Replicas
from lightning_decentral.shared.wire.transport import Transport, Wire, connect, connected


class PipelineWorkers(DDPStrategy):
    """Worker w is stage w % P of pipeline w // P, without a wrapper module.

    Args:
        stages: P; None: all workers.
    """

    def __init__(self, *, stages: int | None, timeout: timedelta | None = default_pg_timeout, **ddp: Any) -> None:
        super().__init__(timeout=timeout, **ddp)
        if stages is not None and stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self.stages = stages
        self._wire: Wire | None = None
        self._over: Transport | None = None
        self._back: Transport | None = None
        self._replicas: Transport | None = None

    @property
    def num_stages(self) -> int:
        """P."""
        return self.stages or self.num_nodes * self.num_processes

    @property
    def num_pipelines(self) -> int:
        """Replicas of the pipeline."""
        return self.num_nodes * self.num_processes // self.num_stages

    @property
    def pipeline(self) -> int:
        """Which pipeline this worker belongs to."""
        return self.global_rank // self.num_stages

    @property
    def stage(self) -> int:
        """Which stage of it this worker is."""
        return self.global_rank % self.num_stages

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All stages of a pipeline read the same batches."""
        return {"num_replicas": self.num_pipelines, "rank": self.pipeline}

    def setup_environment(self) -> None:
        """Check the numbers, then connect."""
        self._check_workers()
        super().setup_environment()

    def _check_workers(self) -> None:
        workers = self.num_nodes * self.num_processes
        if workers % self.num_stages:
            raise ValueError(
                f"{workers} workers are no multiple of stages={self.stages}: use devices x num_nodes = "
                f"{self.num_stages} x pipelines, or leave stages out"
            )

    def configure_ddp(self) -> None:
        """No wrapper."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _connect(self, module: LightningModule) -> None:
        if not connected():
            return
        if self._wire is None:
            self._wire = connect(self.root_device, self._timeout)
            stages, workers = self.num_stages, range(self.world_size)
            for first in workers[::stages]:
                group = workers[first : first + stages]
                self._over, self._back = (self._wire.group(group) or own for own in (self._over, self._back))
            self._replicas = self._stage_group()
        check_same_model(module, self._wire.roll)
        built = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]  # the others are drawn alike
        start_from_worker_0(built, self._wire.flags)

    def _stage_group(self) -> Transport:
        """A new group of the workers that are this stage. Collective."""
        assert self._wire is not None
        groups = [self._wire.group(range(self.world_size)[s :: self.num_stages]) for s in range(self.num_stages)]
        return next(own for own in groups if own is not None)

    @property
    def alone(self) -> bool:
        """An exception has taken this worker off the others' path: nothing collective may be called any more."""
        trainer = self._module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.interrupted

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        if not self.alone:
            super().barrier(*args, **kwargs)


class Pipelines(MeanModel, PipelineWorkers):
    """The part of `TokenPipelineStrategy` that keeps equal stages together.

    Args:
        replicas: what they do together.
    """

    def __init__(self, *, replicas: Replicas | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.replicas = replicas or AverageGradients()
        self._bond = Bond()

    def _check_workers(self) -> None:
        super()._check_workers()
        if self.num_pipelines > 1:
            self.replicas.check(self.num_pipelines, self._pipelines_per_node)

    @property
    def _pipelines_per_node(self) -> int:
        """1 where a pipeline has several nodes."""
        return max(1, self.num_processes // self.num_stages)

    @property
    def _drifting(self) -> bool:
        return self.num_pipelines > 1 and self.replicas.drifts

    def _join(self) -> None:
        """Once the optimizers exist. Collective."""
        if self._wire is not None and self.num_pipelines > 1:
            self._bond = self.replicas.join(self._stage_group, self.root_device, self._pipelines_per_node)
            self._bond.prepare(self.optimizers)

    def _part_ways(self) -> None:
        self._bond.release()
        self._bond, self._swap, self._apart = Bond(), None, False

    # ---- steps --------------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The user's update, then what the replicas do."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._apart = self._drifting
        self._bond.updated(optimizer)
        return output

    # ---- the mean of the pipelines --------------------------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the replicas of this stage, by their shares; all must call it."""
        assert self._replicas is not None
        return mean(tensors, self._replicas, self._bond.share())

    def settle(self) -> None:
        """Land what is in flight."""
        self._bond.settle()


class PipelineBuilding(PipelineWorkers):
    """The part of `TokenPipelineStrategy` that builds modules.

    What is built in `__init__` has memory at once; what `configure_model` builds waits until its stage is known.
    """

    def __init__(self, **workers: Any) -> None:
        super().__init__(**workers)
        self._deferred = Deferred()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`. Every worker draws what worker 0 would draw on its CPU. Collective."""
        own = torch.get_rng_state()
        first = self.broadcast(own)
        torch.set_rng_state(first)
        with torch.device("cpu"), self._deferred:
            yield
        if not torch.equal(own, first):
            torch.set_rng_state(own)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's; where there is no memory yet it's written down."""
        with self._deferred.again():
            super().load_model_state_dict(checkpoint, strict=strict)

    def _convert(self, module: nn.Module) -> nn.Module:
        with self._deferred.again():
            return self.precision_plugin.convert_module(module)

    def _materialize(self, whole: list[Tensor], kept: set[nn.Parameter]) -> None:
        """Memory for this stage's parameters and for what isn't a parameter; `whole`: all tensors of the module."""
        gone = [t for t in whole if isinstance(t, nn.Parameter) and t not in kept]
        out = set(gone)
        self._deferred.materialize([t for t in whole if t not in out], gone)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes; each once."""
    plain = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return list(dict.fromkeys([*module.parameters(), *module.buffers(), *plain]))


class PipelineEvaluation(PipelineWorkers):
    """The part of `TokenPipelineStrategy` that evaluates. A step may call the model any number of times."""

    plans: Plans
    _pipe: Pipe | None = None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, its model calls answered by the pipeline."""
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, its model calls answered by the pipeline."""
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, its model calls answered by the pipeline."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._module.predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same step with the same answers on every stage, so that whatever it logs or gathers is whole."""
        assert self._pipe is not None
        pipe = self._pipe

        def answer(call: Call) -> Any:
            length = pipe.model.length(call)
            slices = Uniform(min(length, 2 * self.num_stages)).slices(length, self.plans.situation(self.num_stages))
            return pipe.model.answer(call, pipe.evaluate(call, slices))

        with answering(pipe.model, answer):
            return step(*args, **kwargs)
