"""Health of replicas where they are shown or saved: a mean without those that are sick, a named error for unequal ones.

Whether replicas drift or take the same updates, a number that one of them alone holds (NaN, infinity, 1e30) reaches
neither a validation nor a checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_decentral.shared.compute.health import TOLERANCE, Unequal, bits, looks, rates, unequal
from lightning_decentral.shared.compute.worker_state import digest
from lightning_decentral.shared.plan.described import first_difference
from lightning_decentral.shared.wire.fsdp import is_sharded, local, shards
from lightning_decentral.shared.wire.health import (
    Ailment,
    ailing,
    constants,
    mean_of_others,
    mend,
    mend_together,
    none_sound,
    of_worker,
)
from lightning_decentral.shared.wire.objects import check_same_call
from lightning_decentral.shared.wire.transport import everyone

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric
    import lightning_decentral.shared.setup_and_step as strategies

WHY = {
    "parameters": "They should be the same bit for bit: workers of different hardware round differently; among equal "
    "ones look for a learning rate of one worker alone, for what writes to its parameters, and at its memory",
    "buffers": "After each update they are worker 0's, which are saved: something has changed them since, on each "
    "worker by itself (a validation that updates them, say) or on one alone",
}

ROUNDING = 1e-4  # Part of a tensor's largest magnitude: workers that average exactly in every step differ by less.
OTHER_MODELS = (
    "all_gather(sync_grads=True) while the workers' models differ: the others' rows (negatives, say) are of other "
    "models than this worker's, and only near its own. For the loss of one model train by compressed or "
    "partial_backprop, or by GossipStrategy(topology=Complete(), delay=0)"
)


class ReplicaHealth:
    """Health of one strategy's replicas.

    Args:
        of: the strategy.

    Attributes:
        left_out: workers, once for each mean that was taken without them.
    """

    def __init__(self, of: "strategies.WorkersStrategy | fabric.FabricWorkers") -> None:
        self.left_out = 0
        self._of = of
        self._gathered = False  # whether a gather with gradients was looked at
        self._reported: dict[str, float] = {}  # the largest difference that was reported
        self._constants: dict[int, Tensor] = {}

    def look(self, buffers: Iterable[Tensor]) -> None:
        """Note before training, where buffers are equal on all workers, which elements aren't finite, so are sound."""
        self._constants |= constants(buffers)

    def mean(self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> list[Tensor]:
        """Means as the strategy's `mean_of`, bit for bit, if all are sound; else the mean of the others, and worker 0
        reports it. Behind it what is carried, which the first sound worker has. Collective.

        Raises:
            FloatingPointError: nobody is sound; on all workers.
        """
        over, devices = self._of.replica_group(), self._of.devices_per_worker
        assert over is not None
        every = [*tensors, *carried]
        self._check_same_tensors(every)
        sick: dict[int, Ailment] = self._of.meet(lambda: ailing(every, over, devices, self._constants.values()))
        stride = self._of.world_size // over.size  # between two replicas there may be workers of other stages
        by_worker = {r * stride + self._of.global_rank % stride: ailment for r, ailment in sick.items()}
        self._agree(every, by_worker, over.size // devices)
        source = devices * next(worker for worker in range(over.size // devices) if worker not in sick)
        values: list[Tensor] = self._of.meet(lambda: of_worker(source, carried, over)) if carried else []
        if not sick:
            return [*self._of.mean_of(tensors), *values]
        left_out = over.rank // devices in sick
        means = mean_of_others(tensors, self._of.mean_of, left_out)
        if left_out and self._of.heals:
            mend(tensors, means)
            mend_together(carried, values)
        return [*means, *values]

    def _check_same_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Parameters and buffers may have come or gone on one worker alone since the models were compared."""
        forms = [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
        groups = self._by(self._same_stage(), self._of.gather(digest(forms)))
        if all(len(set(rows.values())) == 1 for rows in groups):
            return
        name = self._names(tensors)
        named = self._of.gather({name(number): form for number, form in enumerate(forms)})
        found = _difference(self._by(self._same_stage(), named))
        raise RuntimeError(
            f"the workers' models have diverged: {found}: register, prune and convert parameters and buffers alike on "
            "every worker"
        )

    def _agree(self, tensors: Sequence[Tensor], sick: Mapping[int, Ailment], workers: int) -> None:
        """Every worker knows what any found: a stage of a pipeline sees its own replicas alone."""
        self.left_out += len(sick)
        names = self._names(tensors)
        # Where nobody is left, all end alike.
        mine = [
            f"worker {worker} is left out of the mean model: its {names(ailment.tensor)} {ailment}"
            for worker, ailment in sick.items()
        ]
        reports = self._of.gather([none_sound(sick, workers, names), mine])
        if problems := [problem for problem, _ in reports if problem]:
            raise FloatingPointError(problems[0])
        for line in dict.fromkeys(line for _, lines in reports for line in lines):
            rank_zero_warn(line)

    def check_met(self, what: str) -> None:
        """See that all workers have made the same collective calls, as often, where this is over. Collective: who made
        fewer would wait for a round of who waits in it.

        Raises:
            RuntimeError: they haven't; on all workers.
        """
        if self._of.wire is not None and not self._of.cut_off:
            self._of.meet(lambda: check_same_call(everyone(), f"the end of the {what}"))

    def check_equal(self) -> None:
        """See that what should be the same on several workers is. Replicas that take the same updates, with their
        buffers, and the parameters of the devices of an island that hold them whole. Collective.

        A bit that differs is a warning, repeated where the difference has doubled: workers of different hardware
        may honestly differ by rounding.

        Raises:
            FloatingPointError: a parameter differs by over `TOLERANCE`, by worker and values; on all workers.
            RuntimeError: one has tensors that others don't have, or another learning rate; on all workers.
        """
        if self._of.wire is None or self._of.cut_off or not self._of.rounds():
            return
        of_group = self._together()
        if of_group is None:
            return
        named = self._alike()
        reports = self._of.gather([bits(named), rates(self._of.optimizers)])
        if found := _difference(self._by(of_group, [own for _, own in reports])):
            raise RuntimeError(
                f"{found}, and all must take the same updates: set it alike on all workers (for ReduceLROnPlateau log "
                "with sync_dist=True)"
            )
        if all(len(set(members.values())) == 1 for members in self._by(of_group, [own for own, _ in reports])):
            return
        self._check_same_tensors(list(named.values()))
        differing = [one for rows in self._grouped(of_group, looks(named)) for one in unequal(rows)]
        self._judge(sorted(differing, key=lambda one: -one.deviation))

    def gathers(self, gradients: bool) -> bool:
        """`gradients`; a warning, once, where rows of other models come with them. Collective, as what follows is."""
        of, module = self._of, self._of.lightning_module
        if gradients and of.drifts and not self._gathered and module is not None and any(of.rounds()):
            self._gathered = True
            every = self._grouped(self._same_stage(), looks(self._alike()))
            if any(one.deviation > ROUNDING for rows in every for one in unequal(rows)):
                rank_zero_warn(OTHER_MODELS)
        return gradients

    def shown_alike(self, named: Mapping[str, Tensor], changed: bool) -> bool:
        """Return whether all workers evaluate the same numbers, bit for bit. Collective.

        Args:
            changed: whether this worker does other ones than the mean that it was shown.
        """
        over = self._of.replica_group()
        # Devices that follow each other hold as many parts of a model: stages, or shards.
        stages = self._of.world_size // (1 if over is None else over.size)
        parts = stages * max(map(shards, named.values()), default=1)
        rows = self._of.gather([parts, bits({name: local(tensor) for name, tensor in named.items()}), changed])
        if any(of != parts for of, _, _ in rows):  # elastic workers of one device and of shards
            return not any(wrote for _, _, wrote in rows)
        return all(len({digest for _, digest, _ in rows[part::parts]}) == 1 for part in range(parts))

    def _together(self) -> Callable[[int], int] | None:
        """A number for every worker, the same for those that hold the same; None: there are no two."""
        if self._of.drifts:
            devices = self._of.devices_per_worker
            return (lambda rank: rank // devices) if devices > 1 else None
        over = self._of.replica_group()
        return self._same_stage() if over is not None and over.size > 1 else None

    def _same_stage(self) -> Callable[[int], int]:
        over = self._of.replica_group()
        assert over is not None
        stride = self._of.world_size // over.size
        return lambda rank: rank % stride

    def _alike(self) -> dict[str, Tensor]:
        module = self._of.lightning_module
        assert module is not None
        found: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if not is_sharded(p)}
        # Statistics of a drifting worker's devices are each device's own, as those of workers are.
        return found if self._of.drifts else {**found, **dict(module.named_buffers())}

    def _grouped(self, of_group: Callable[[int], int], value: Any) -> list[dict[int, Any]]:
        """{worker: its value} of each group of workers that hold the same. Collective."""
        return self._by(of_group, self._of.gather(value))

    @staticmethod
    def _by(of_group: Callable[[int], int], every: Sequence[Any]) -> list[dict[int, Any]]:
        groups: dict[int, dict[int, Any]] = {}
        for rank, value in enumerate(every):
            groups.setdefault(of_group(rank), {})[rank] = value
        return list(groups.values())

    def _judge(self, found: Sequence[Unequal]) -> None:
        """The same on all workers."""
        module = self._of.lightning_module
        assert module is not None
        trained = {name for name, _ in module.named_parameters()}
        parameters = [one for one in found if one.name in trained]
        buffer = next((f" (the buffer {one.name} differs, too)" for one in found if one.name not in trained), "")
        for one in parameters:
            # What is absurd on a device of an island is left out of the mean, with its island.
            if one.deviation > TOLERANCE and not (self._of.drifts and one.absurd):
                raise FloatingPointError(
                    f"{one}{buffer}, and they must be equal: nothing is validated or saved, earlier checkpoints stay. "
                    "Resume from the last one, and look at the worker's memory and at what writes to its parameters"
                )
        kinds = {"parameters": parameters, "buffers": [one for one in found if one.name not in trained]}
        for kind, rows in kinds.items():
            if rows and rows[0].deviation > 2 * self._reported.get(kind, -1.0):
                self._reported[kind] = rows[0].deviation
                rank_zero_warn(f"{rows[0]}, one of {len(rows)} {kind} that differ between workers. {WHY[kind]}")

    def _names(self, tensors: Sequence[Tensor]) -> Callable[[int], str]:
        module = self._of.lightning_module
        assert module is not None

        def name(number: int) -> str:
            tensor = local(tensors[number])
            found: str
            for found, own in (*module.named_parameters(), *module.named_buffers()):
                if local(own).data_ptr() == tensor.data_ptr():
                    return found
            return f"a tensor of shape {tuple(tensor.shape)}"

        return name


def _difference(groups: Iterable[Mapping[int, Mapping[str, str]]]) -> str:
    """The first difference of a worker from the first one of its group; empty: there is none."""
    for rows in groups:
        first = min(rows)
        for rank, row in rows.items():
            if found := first_difference(row, rows[first], sign=" "):
                return f"worker {rank} has {found[0]} where worker {first} has {found[1]}"
    return ""
