"""Forecast of a compressed all-reduce: bucket by bucket encode, scatter to owners, reduce, gather, decode.

    backward   bucket 0 -> encode -> scatter -> reduce -> gather -> decode
                      bucket 1 -> encode -> ...

Codes are made and reduced beside the training, on lanes of their own; they are decoded when the backward has ended.
Messages queue in the order of buckets, though a scatter may in fact pass a gather that waits: the seconds are an upper
bound by less than a bucket's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.data_parallel import Travel, step_by
from lightning_decentral.shared.plan.forecast import Setting, Synchronous, replica_bytes
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.profile import Model, RoundWork
from lightning_decentral.shared.plan.timeline import Task


def as_they_are(size: float) -> float:
    """Bytes of a message that isn't encoded."""
    return size


def unmeasured(model: Model) -> RoundWork:
    """Coding for nothing."""
    return RoundWork("Plain()")


@checked
@dataclass(frozen=True)
class CompressedForecast(Synchronous):
    """`ddp` with codes: every step as long as the slowest worker's, with what of the travel the backward doesn't hide.

    Args:
        bucket_bytes: of gradients that travel together; None: an eighth of the model, 2 to 256 MiB.
        wire_bytes: of the codes, by the bytes of what is encoded.
        work: seconds that coding takes, by the profile.
    """

    bucket_bytes: int | None = None
    wire_bytes: Callable[[float], float] = as_they_are
    work: Callable[[Model], RoundWork] = unmeasured

    def __post_init__(self) -> None:
        at_least(1, "leave it out for the default", bucket_bytes=self.bucket_bytes)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        workers, per_node = setting.cluster.workers, setting.cluster.per_node
        reach, price = setting.cluster.reach(workers), setting.network.price
        return tuple(price(name, reach, workers, 1, per_node) for name in ("reduce_scatter", "all_gather"))

    def card_bytes(self, setting: Setting) -> float:
        """2 (n - 1) / n of the codes' bytes; nothing on one node."""
        n = setting.cluster.workers
        codes = self.wire_bytes(setting.model.parameter_bytes)
        return 2 * (n - 1) / n * codes if setting.cluster.nodes > 1 else 0.0

    def memory_bytes(self, setting: Setting) -> float:
        # Buckets, and was rounded away: of the whole here, of the own part on the way back.
        residuals = 1 + 1 / setting.cluster.workers
        return replica_bytes(setting.model) + (1 + residuals) * setting.model.parameter_bytes

    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        asked = self.bucket_bytes or min(max(setting.model.parameter_bytes // 8, 2 * 2**20), 256 * 2**20)
        return step_by(setting.model.step_blocks, self._travel(setting), factor, int(asked))

    def _travel(self, setting: Setting) -> Travel:
        scatter, gather = self.prices(setting)
        n = setting.cluster.workers
        work = self.work(setting.model)
        encode, hear = work.own_seconds_per_byte, work.heard_seconds_per_byte

        def travel(number: int, size: float, last: str) -> list[Task[str]]:
            codes, others, mine = self.wire_bytes(size), (n - 1) / n * size, size / n
            return [
                Task(f"encode {number}", "codes leave", others * encode, (last,)),
                Task(f"scatter {number}", "network", scatter.seconds(codes), (f"encode {number}",)),
                Task(f"reduce {number}", "codes are reduced", others * hear + mine * encode, (f"scatter {number}",)),
                Task(f"gather {number}", "network", gather.seconds(codes), (f"reduce {number}",)),
                Task(f"decode {number}", "compute", others * hear, (f"gather {number}",)),
            ]

        return travel
