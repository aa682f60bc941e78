"""Elastic gossip: workers die while others train on, and new ones join: what `GossipStrategy(elastic=...)` takes.

Short, as it is a value; `strategy` is what it makes of GossipStrategy.
"""

from dataclasses import dataclass

from lightning_decentral.gossip.plan.asynchronous import Asynchronous
from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.elastic.view import Bounds, Times


@checked
@dataclass(frozen=True)
class Elastic:
    """A run whose workers are processes of their own, each with a Trainer of its own, that meet at a lobby.

    Args:
        lobby: "host:port" of `lightning-decentral lobby`. Without, that of the environment's LIGHTNING_DECENTRAL_LOBBY;
            without that, too, the Trainer starts `devices` workers on this machine, and a lobby for them.
        workers: (least, most) of them, as the lobby was told.
        dead_after: seconds of silence, until a worker counts as dead; the lobby's, as soon as that is heard.
        host: the address at which others reach this machine; by default the one from which it reaches the lobby.
        weight: this worker's batches have so many times its DataLoader's examples, and count so much in the mean.
        asynchronous: rounds in which nobody waits for a slow worker or link; None: neighbours wait for each other.

    Raises:
        ValueError: not 1 <= least <= most, or no time to wait.
    """

    lobby: str = ""
    workers: tuple[int, int] = (2, 16)
    dead_after: float = 10.0
    host: str = ""
    weight: int = 1
    asynchronous: Asynchronous | None = None

    def __post_init__(self) -> None:
        Bounds(*self.workers), Times(self.dead_after)
        at_least(1, "1 takes batches as the DataLoader makes them", weight=self.weight)
