"""Elastic token pipelines, each one member: `TokenPipelineStrategy(replicas=GossipReplicas(elastic=...))`.

An elastic mixin stands in front of the pipeline's strategy among the bases; neither folder imports the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.elastic.checkpoints import ElasticCheckpoints
from lightning_decentral.elastic.checks import Part
from lightning_decentral.elastic.process import OneProcess
from lightning_decentral.elastic.run import ElasticRun
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.holding import Holding, StagesHolding
from lightning_decentral.shared.checkpoint.saving import CheckpointedStrategy
from lightning_decentral.shared.compute.codec.codec import Plain
from lightning_decentral.shared.compute.layout import ModelLayout, lay_states, refuse_shared
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel
from lightning_decentral.shared.wire.objects import broadcast_world, collect_objects, gather_objects
from lightning_decentral.shared.wire.transport import Wire

OWN = ("state_dict", "optimizer_states")
"""Checkpoint entries that differ among the stages; other entries are the same on all stages."""


@cache
def elastic_pipeline(strategy: type) -> type:
    return type(f"Elastic{strategy.__name__}", (ElasticPipeline, strategy), {})


class StageCheckpoints(ElasticCheckpoints):
    """Checkpoints of a pipeline that is a member: one file of the whole model, without entries for a fixed world size;
    made by the checkpoints of the pipeline's strategy."""

    def __init__(self, worker: CheckpointedStrategy, mean_model: MeanModel, pipeline: Any) -> None:
        super().__init__(worker, mean_model, self)
        self._pipeline = pipeline

    @property
    def spread(self) -> bool:
        return self._pipeline.layout is not None

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Join the stages' checkpoints into one, on the first stage. Collective."""
        if not self.spread:
            return tree
        return {name: value for name, value in self._pipeline.whole(tree, {}).items() if name != KEY}

    @property
    def layout(self) -> Any:
        return self._pipeline.layout

    @layout.setter
    def layout(self, layout: Any) -> None:
        self._pipeline.layout = layout

    def load_optimizers(self, checkpoint: Mapping[str, Any], layout: Any) -> None:
        self._pipeline.load_optimizers(checkpoint, layout)


class ElasticPipeline(ElasticRun):
    """Elastic mixin in front of a pipeline's strategy: its stages are one member and train on one batch."""

    stages: int | None
    layout: Any
    plans: Any
    _stage: Any

    def __init__(self, *, replicas: Any, **options: Any) -> None:
        super().__init__(replicas=replicas, **options)
        self.elastic, self.topology, self.delay = replicas.elastic, replicas.topology, replicas.delay
        self.weights, self.evaluate = replicas.weights or replicas.combine.weights, "mean"
        self.codec, self.bucket_bytes, self.heals = Plain(), None, 0
        self.plan_rounds(replicas.combine)
        worker: Any = self
        self.checkpoints = StageCheckpoints(worker, self.mean_model, self.checkpoints)

    @property
    def _beneath(self) -> Any:
        """The pipeline's strategy, for methods that the elastic mixin overrides."""
        return super(OneProcess, self)

    @property
    def devices(self) -> int:  # type: ignore[override]
        return self.stages or self.num_nodes * self.num_processes

    @property
    def stage(self) -> int:
        assert self.cluster_environment is not None
        return self.cluster_environment.global_rank()

    part = stage
    pipeline = 0

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        super().refuse(module, fitting)
        if self.layout.pipelines > 1:
            raise ValueError(
                f"an elastic worker is one pipeline, this Trainer has {self.layout.pipelines} of {self.devices} "
                f"stages: start a torchrun with --nproc-per-node={self.devices} for each pipeline"
            )

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast among this pipeline's stages until the members are known, then among the members."""
        return (
            broadcast_world(obj, src) if self._member is None and self._early is None else super().broadcast(obj, src)
        )

    @property
    def watched_module(self) -> nn.Module:
        return nn.Module()  # `Ownership` refuses tensors that are registered later

    def parts(self, own: Part) -> Sequence[Part]:
        return [own] if self.wire is None else gather_objects(self.wire.roll, own)

    def place(self, fitting: bool) -> None:
        self._beneath.place(fitting)
        self.model_layout = ModelLayout(self._module.parameters())

    def prepare(self, wire: Wire | None) -> None:
        super().prepare(wire)
        refuse_shared(self._module)
        self._beneath.prepare(wire)

    def on_train_start(self) -> None:
        super().on_train_start()
        for optimizer in self.optimizers:
            lay_states(optimizer)

    def holding(self, member: Participant) -> Holding:
        return Holding(self.root_device) if self.wire is None else StagesHolding(self.root_device, member, self.wire)

    def whole(self, own: dict[str, Any]) -> dict[str, Any]:
        part = {name: own[name] for name in OWN}
        parts = [part] if self.wire is None else collect_objects(self.wire.roll, part)
        return {**{name: value for name, value in own.items() if name not in OWN}, "stages": parts}

    def _take(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        parts = checkpoint["stages"]
        mine = parts[self.stage] if self.stage < len(parts) else {"state_dict": {}}
        if len(parts) != self.devices or set(mine["state_dict"]) != set(self._module.state_dict()):
            raise ValueError(
                f"this pipeline has {self.devices} stages, the run's pipelines have {len(parts)}, or other blocks on a "
                "stage: give every worker the same stages and partition"
            )
        super()._take(trainer, {**checkpoint, **mine})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if "stages" in checkpoint:
            DDPStrategy.load_optimizer_state_dict(self, checkpoint)
        else:
            self._beneath.load_optimizer_state_dict(checkpoint)

    def gradients(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        return self.gradient_check.after(closure, optimizer, self.precision_plugin)

    def counted(self) -> list[nn.Parameter]:
        return [p for p in self._stage.holdings.counted if p.requires_grad]

    def release(self) -> None:
        self._mixers.release()
        self._beneath.release()
        self._held = Holding(self.root_device)

    def summary(self) -> dict[str, str]:
        return {**super().summary(), **self.plans.summary()}
