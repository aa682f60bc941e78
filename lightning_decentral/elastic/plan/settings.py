"""Settings of one elastic worker: where to meet, when another is dead, how much it counts.

Short: the value that `elastic.Elastic` is, for floors that know no strategies.
"""

from dataclasses import dataclass

from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.shared.plan.arguments import at_least


@dataclass(frozen=True)
class ElasticSettings:
    """Fields and errors: `Elastic`'s."""

    lobby: str = ""
    workers: tuple[int, int] = (2, 16)
    dead_after: float = 10.0
    host: str = ""
    weight: int = 1
    asynchronous: Asynchronous | None = None

    def __post_init__(self) -> None:
        Bounds(*self.workers), Times(self.dead_after)
        at_least(1, "1 takes batches as the DataLoader makes them", weight=self.weight)
