"""Checks of replicas before validation and saving: the mean leaves out workers with NaN; unequal replicas are an error.

Whether replicas differ or take the same updates, a NaN, infinity or 1e30 that one replica alone holds reaches neither a
validation nor a checkpoint."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_decentral.shared.compute.health import TOLERANCE, Unequal, bits, looks, rates, unequal
from lightning_decentral.shared.compute.worker_state import digest
from lightning_decentral.shared.plan.described import first_difference
from lightning_decentral.shared.wire import health
from lightning_decentral.shared.wire.fsdp import is_sharded, local, shards
from lightning_decentral.shared.wire.objects import check_same_call
from lightning_decentral.shared.wire.transport import everyone

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric
    import lightning_decentral.shared.setup_and_step as strategies

WHY = {
    "parameters": "They should be equal bit for bit. Different hardware rounds differently; on equal hardware look for "
    "a learning rate that one worker alone has, for code that writes to its parameters, and for faulty memory",
    "buffers": "After each update all workers get worker 0's buffers, which are saved: something has changed them "
    "since, on each worker by itself (a validation that updates them, say) or on one alone",
}

ROUNDING = 1e-4  # Relative to a tensor's largest magnitude: workers that average exactly in every step differ by less.
OTHER_MODELS = (
    "all_gather(sync_grads=True) is called while the workers' models differ: the others' rows (negatives, say) come "
    "from models that are only near this worker's. For the loss of one model train by compressed or "
    "partial_backprop, or by GossipStrategy(topology=Complete(), delay=0)"
)


class ReplicaHealth:
    """Checks one strategy's replicas for NaN, infinity, far too large numbers, and differences where none should be."""

    def __init__(self, strategy: "strategies.WorkersStrategy | fabric.FabricWorkers") -> None:
        self.left_out = 0  # number of workers left out of a mean, summed over all means
        self._strategy = strategy
        self._gathered = False  # whether an all_gather with gradients was checked
        self._reported: dict[str, float] = {}  # the largest difference that was reported
        self._constants: dict[int, Tensor] = {}

    def look(self, buffers: Iterable[Tensor]) -> None:
        """Record before training which buffer elements aren't finite (on all workers alike): they count as healthy."""
        self._constants |= health.constants(buffers)

    def mean(self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the strategy's `mean_of`, bit for bit, if all workers are healthy; else the mean of the healthy
        workers, and worker 0 reports it. The first healthy worker's `carried` tensors follow the means. Collective.
        FloatingPointError, on all workers: no worker is healthy."""
        over, devices = self._strategy.replica_group(), self._strategy.devices_per_worker
        assert over is not None
        every = [*tensors, *carried]
        self._check_same_tensors(every)
        known = self._constants.values()
        sick: dict[int, health.Ailment] = self._strategy.meet(lambda: health.ailing(every, over, devices, known))
        stride = self._strategy.world_size // over.size  # between two replicas there may be workers of other stages
        by_worker = {r * stride + self._strategy.global_rank % stride: ailment for r, ailment in sick.items()}
        self._agree(every, by_worker, over.size // devices)
        source = devices * next(worker for worker in range(over.size // devices) if worker not in sick)
        values: list[Tensor] = self._strategy.meet(lambda: health.of_worker(source, carried, over)) if carried else []
        if not sick:
            return [*self._strategy.mean_of(tensors), *values]
        left_out = over.rank // devices in sick
        means = health.mean_of_others(tensors, self._strategy.mean_of, left_out)
        if left_out and self._strategy.heals:
            health.mend(tensors, means)
            health.mend_together(carried, values)
        return [*means, *values]

    def _check_same_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Raise RuntimeError where one worker alone has new or removed tensors since the models were compared."""
        forms = [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
        groups = self._by(self._same_stage(), self._strategy.gather(digest(forms)))
        if all(len(set(rows.values())) == 1 for rows in groups):
            return
        name = self._names(tensors)
        named = self._strategy.gather({name(number): form for number, form in enumerate(forms)})
        found = _difference(self._by(self._same_stage(), named))
        raise RuntimeError(
            f"the workers' models have diverged: {found}: register, prune and convert parameters and buffers alike on "
            "every worker"
        )

    def _agree(self, tensors: Sequence[Tensor], sick: Mapping[int, health.Ailment], workers: int) -> None:
        """Share each worker's findings, as a pipeline's stage sees its own replicas alone; all warn or raise alike."""
        self.left_out += len(sick)
        names = self._names(tensors)
        # Where no healthy worker is left, all end alike.
        mine = [
            f"worker {worker} is left out of the mean model: its {names(ailment.tensor)} {ailment}"
            for worker, ailment in sick.items()
        ]
        reports = self._strategy.gather([health.none_sound(sick, workers, names), mine])
        if problems := [problem for problem, _ in reports if problem]:
            raise FloatingPointError(problems[0])
        for line in dict.fromkeys(line for _, lines in reports for line in lines):
            rank_zero_warn(line)

    def check_met(self, what: str) -> None:
        """Check that all workers have made the same collective calls, as often, up to here. Collective: a worker that
        made fewer calls would wait for a round of a worker that waits in this check. RuntimeError, on all workers: the
        calls differ."""
        if self._strategy.wire is not None and not self._strategy.cut_off:
            self._strategy.meet(lambda: check_same_call(everyone(), f"the end of the {what}"))

    def check_equal(self) -> None:
        """Check that replicas that take the same updates are equal, with their buffers, and whole parameters on the
        devices of an island (a worker of several devices). Collective.

        A bit that differs is a warning, repeated where the difference has doubled: workers of different hardware
        may honestly differ by rounding. Errors are raised on all workers. FloatingPointError: a parameter differs by
        over `TOLERANCE`; names worker and values. RuntimeError: a worker has tensors that others don't have, or another
        learning rate."""
        if self._strategy.wire is None or self._strategy.cut_off or not self._strategy.rounds():
            return
        of_group = self._together()
        if of_group is None:
            return
        named = self._alike()
        reports = self._strategy.gather([bits(named), rates(self._strategy.optimizers)])
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
        """Return `gradients`; warn once if rows gathered with gradients come from models that differ. Collective."""
        strategy, module = self._strategy, self._strategy.lightning_module
        if gradients and strategy.drifts and not self._gathered and module is not None and any(strategy.rounds()):
            self._gathered = True
            every = self._grouped(self._same_stage(), looks(self._alike()))
            if any(one.deviation > ROUNDING for rows in every for one in unequal(rows)):
                rank_zero_warn(OTHER_MODELS)
        return gradients

    def shown_alike(self, named: Mapping[str, Tensor], changed: bool) -> bool:
        """Return whether all workers evaluate the same numbers, bit for bit; `changed` tells whether this worker
        evaluates other numbers than the mean that it was given. Collective."""
        over = self._strategy.replica_group()
        # Consecutive devices hold the parts of one model: stages, or shards.
        stages = self._strategy.world_size // (1 if over is None else over.size)
        parts = stages * max(map(shards, named.values()), default=1)
        rows = self._strategy.gather([parts, bits({name: local(tensor) for name, tensor in named.items()}), changed])
        if any(count != parts for count, _, _ in rows):  # elastic workers, of one device or of several
            return not any(wrote for _, _, wrote in rows)
        return all(len({digest for _, digest, _ in rows[part::parts]}) == 1 for part in range(parts))

    def _together(self) -> Callable[[int], int] | None:
        """Return a function from a rank to the number of its group of equal replicas; None where there are none."""
        if self._strategy.drifts:
            devices = self._strategy.devices_per_worker
            return (lambda rank: rank // devices) if devices > 1 else None
        over = self._strategy.replica_group()
        return self._same_stage() if over is not None and over.size > 1 else None

    def _same_stage(self) -> Callable[[int], int]:
        over = self._strategy.replica_group()
        assert over is not None
        stride = self._strategy.world_size // over.size
        return lambda rank: rank % stride

    def _alike(self) -> dict[str, Tensor]:
        module = self._strategy.lightning_module
        assert module is not None
        found: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if not is_sharded(p)}
        # Running statistics may differ between the devices of a worker, as between workers.
        return found if self._strategy.drifts else {**found, **dict(module.named_buffers())}

    def _grouped(self, of_group: Callable[[int], int], value: Any) -> list[dict[int, Any]]:
        """Return {worker: its value} for each group of equal replicas. Collective."""
        return self._by(of_group, self._strategy.gather(value))

    @staticmethod
    def _by(of_group: Callable[[int], int], every: Sequence[Any]) -> list[dict[int, Any]]:
        groups: dict[int, dict[int, Any]] = {}
        for rank, value in enumerate(every):
            groups.setdefault(of_group(rank), {})[rank] = value
        return list(groups.values())

    def _judge(self, found: Sequence[Unequal]) -> None:
        """Warn of tensors that differ, or raise FloatingPointError; alike on all workers."""
        module = self._strategy.lightning_module
        assert module is not None
        trained = {name for name, _ in module.named_parameters()}
        parameters = [one for one in found if one.name in trained]
        buffer = next((f" (the buffer {one.name} differs, too)" for one in found if one.name not in trained), "")
        for one in parameters:
            # An island (worker of several devices) with absurd numbers on one device is left out of the mean instead.
            if one.deviation > TOLERANCE and not (self._strategy.drifts and one.absurd):
                raise FloatingPointError(
                    f"{one}{buffer}, and they must be equal: nothing is validated or saved, earlier checkpoints stay. "
                    "Resume from the last one, and look for faulty memory and for code that writes to parameters"
                )
        kinds = {"parameters": parameters, "buffers": [one for one in found if one.name not in trained]}
        for kind, rows in kinds.items():
            if rows and rows[0].deviation > 2 * self._reported.get(kind, -1.0):
                self._reported[kind] = rows[0].deviation
                rank_zero_warn(f"{rows[0]}, one of {len(rows)} {kind} that differ between workers. {WHY[kind]}")

    def _names(self, tensors: Sequence[Tensor]) -> Callable[[int], str]:
        module = self._strategy.lightning_module
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
    """Return text on the first difference of a worker from the first worker of its group; empty without one."""
    for rows in groups:
        first = min(rows)
        for rank, row in rows.items():
            if found := first_difference(row, rows[first], sign=" "):
                return f"worker {rank} has {found[0]} where worker {first} has {found[1]}"
    return ""
