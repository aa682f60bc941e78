"""Forecast of a compressed all-reduce: bucket by bucket encode, scatter to owners, reduce, gather, decode.

    network                         scatter 0              scatter 1, gather 0
    compute   backward 0, encode 0, backward 1, encode 1, reduce 0, backward 2, encode 2, reduce 1, decode 0, ...

Codes are made and reduced on threads or streams in parallel to training, but on its processors or device: their work
adds to the step, and only network time overlaps. A bucket is reduced, and then decoded, as many buckets later as makes
the step shortest; in a run threads do so when messages have arrived.

    scatter, gather = an exchange with all others of (n - 1) / n of the codes; of (n - w) / n between nodes of w workers
    encode = round + (n - 1) / n bytes own
    reduce = round + (n - 1) message + bytes ((n - 1) / n receive + own / n)
    decode = (n - 1) message + (n - 1) / n bytes receive                                 by what a round of gossip takes
"""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.data_parallel import Travel, step_by
from lightning_decentral.shared.plan.forecast import Setting, Synchronous, replica_bytes
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.profile import Model, RoundWork
from lightning_decentral.shared.plan.timeline import Task


def unmeasured(model: Model) -> RoundWork:
    """Work of encoding that takes no time, for an unmeasured codec."""
    return RoundWork("Plain()")


@checked
@dataclass(frozen=True)
class CompressedForecast(Synchronous):
    """Forecast of `ddp` with encoded gradients: the slowest worker's step plus communication that doesn't overlap it.

    Args:
        bucket_bytes: bytes of gradients averaged together; None: an eighth of the model, 2 to 256 MiB.
        wire_bytes: bytes of the codes, as a function of the bytes to encode.
        work: seconds of encoding and decoding, from the profile.
    """

    bucket_bytes: int | None = None
    wire_bytes: Callable[[float], float] = float  # of unencoded messages
    work: Callable[[Model], RoundWork] = unmeasured

    def __post_init__(self) -> None:
        at_least(1, "leave it out for the default", bucket_bytes=self.bucket_bytes)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        n, per_node, nodes = setting.cluster.workers, setting.cluster.per_node, setting.cluster.nodes
        # All workers of a node send through its network card at once.
        sides = ("inside", n, 1, n - 1) if nodes == 1 else ("between", nodes, per_node, n - per_node)
        reach, group, flows, peers = sides
        return (setting.network.price("exchange", reach, group, flows, 1, max(1, peers)),)

    def card_bytes(self, setting: Setting) -> float:
        """Bytes that a node sends: 2 (n - w) / n of the codes' bytes for each of its w workers; 0 on one node."""
        n, each = setting.cluster.workers, setting.cluster.per_node
        return each * 2 * (n - each) / n * self.wire_bytes(setting.model.parameter_bytes)

    def memory_bytes(self, setting: Setting) -> float:
        # Buckets, and rounding errors: of all gradients, and of the own part's mean.
        residuals = 1 + 1 / setting.cluster.workers
        return replica_bytes(setting.model) + (1 + residuals) * setting.model.parameter_bytes

    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        asked = self.bucket_bytes or min(max(setting.model.parameter_bytes // 8, 2 * 2**20), 256 * 2**20)
        return step_by(setting.model.step_blocks, self._travel(setting), factor, int(asked))

    def _travel(self, setting: Setting) -> Travel:
        (exchange,) = self.prices(setting)
        n = setting.cluster.workers
        work = self.work(setting.model)
        encode, receive = work.own_seconds_per_byte, work.heard_seconds_per_byte
        each, messages = work.round_seconds, (n - 1) * work.message_seconds
        outside = n - (setting.cluster.per_node if setting.cluster.nodes > 1 else 1)

        def travel(number: int, size: float, last: str) -> list[list[Task[str]]]:
            others, mine = (n - 1) / n * size, size / n
            way = exchange.seconds(outside / n * self.wire_bytes(size))
            reduced = each + messages + others * receive + mine * encode
            coded = Task(f"encode {number}", "compute", each + others * encode, (last,))
            scatter = Task(f"scatter {number}", "network", way, (coded.name,))
            mean = Task(f"reduce {number}", "compute", reduced, (scatter.name,))
            gather = Task(f"gather {number}", "network", way, (mean.name,))
            decoded = Task(f"decode {number}", "compute", messages + others * receive, (gather.name,))
            return [[coded, scatter], [mean, gather], [decoded]]

        return travel
