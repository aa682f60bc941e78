"""Health of replicas where they are shown or saved: a mean without those that are sick, a named error for unequal ones.

Whether replicas drift or take the same updates, a number that one of them alone holds (NaN, infinity, 1e30) reaches
neither a validation nor a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.health import Ailment, Unequal, ailing, mean_of_others, mend, none_sound, unequal
from lightning_decentral.shared.wire.transport import Transport, Wire


class Replica(Protocol):
    """What is asked of the strategy whose replicas are judged."""

    heals: int
    devices_per_worker: int

    @property
    def wire(self) -> Wire | None: ...
    @property
    def lightning_module(self) -> LightningModule | None: ...
    @property
    def drifts(self) -> bool: ...
    @property
    def alone(self) -> bool: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def replica_group(self) -> Transport | None: ...
    def rounds(self) -> list[int]: ...
    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def gather(self, value: Any) -> list[Any]: ...
    def meet(self, call: Callable[[], Any]) -> Any: ...


class ReplicaHealth:
    """Of one strategy.

    Args:
        of: the strategy.

    Attributes:
        left_out: workers, once for each mean that was taken without them.
    """

    def __init__(self, of: Replica) -> None:
        self.left_out, self._warned = 0, False
        self._of = of

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As the strategy's `mean_of`, bit for bit, where all are sound; otherwise the mean of the others, and worker 0
        says so. Collective.

        Raises:
            FloatingPointError: nobody is sound; on all workers.
        """
        over, devices = self._of.replica_group(), self._of.devices_per_worker
        assert over is not None
        sick: dict[int, Ailment] = self._of.meet(lambda: ailing(tensors, over, devices))
        self._agree(tensors, {self._number(r, over): ailment for r, ailment in sick.items()}, over.size // devices)
        if not sick:
            return self._of.mean_of(tensors)
        left_out = over.rank // devices in sick
        means = mean_of_others(tensors, self._of.mean_of, left_out)
        if left_out and self._of.heals:
            mend(tensors, means)
        return means

    def _agree(self, tensors: Sequence[Tensor], sick: Mapping[int, Ailment], workers: int) -> None:
        """Every worker knows what any found: a stage of a pipeline sees its own replicas alone."""
        self.left_out += len(sick)
        # Where nobody is left, all end alike.
        reports = self._of.gather([none_sound(sick, workers), self._said(tensors, sick)])
        if problems := [problem for problem, _ in reports if problem]:
            raise FloatingPointError(problems[0])
        for line in dict.fromkeys(line for _, lines in reports for line in lines):
            rank_zero_warn(line)

    def check_equal(self) -> None:
        """See that replicas that take the same updates are the same. Collective; nothing where they may differ.

        Warns of one that differs by no more than hardware may make it.

        Raises:
            FloatingPointError: one isn't, by worker, parameter and values; on all workers.
        """
        if self._of.wire is None or self._of.alone or self._of.drifts or not self._of.rounds():
            return
        over = self._of.replica_group()
        assert over is not None
        assert self._of.lightning_module is not None
        named = dict(self._of.lightning_module.named_parameters())
        found: Unequal | None = self._of.meet(lambda: unequal(list(named.values()), over))
        said = found.said(list(named)[found.tensor], lambda replica: self._number(replica, over)) if found else ""
        for problem, slight in sorted(self._of.gather((said, found is not None and found.slight)), key=itemgetter(1)):
            if problem and not slight:
                raise FloatingPointError(problem)
            if problem and not self._warned:
                rank_zero_warn(problem)
                self._warned = True

    def _number(self, replica: int, over: Transport) -> int:
        """The worker that has this number among the replicas: there may be others between them, of other stages."""
        stride = self._of.world_size // over.size
        return replica * stride + self._of.global_rank % stride

    def _said(self, tensors: Sequence[Tensor], sick: Mapping[int, Ailment]) -> list[str]:
        module = self._of.lightning_module
        assert module is not None
        names = {local(t).data_ptr(): name for name, t in (*module.named_buffers(), *module.named_parameters())}
        lines = []
        for worker, ailment in sick.items():
            tensor = local(tensors[ailment.tensor])
            name = names.get(tensor.data_ptr(), f"a tensor of shape {tuple(tensor.shape)}")
            lines.append(f"worker {worker} is left out of the mean model: its {name} {ailment}")
        return lines
