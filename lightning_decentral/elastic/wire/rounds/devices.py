"""The rounds of a member whose devices hold shards: the first one mixes whole parameters, the others give and take.

every device    shards -> the first one's host      `WholeBucket.adopt`
the first       a round, as ever                    `Mixer`
every device    shards <- the first one's host      `WholeBucket.store`
"""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.mixer import Flat, Mixer
from lightning_decentral.shared.wire.transport import Transport


class FirstMixer(Mixer):
    """Mixer of the first device, which notifies the others where it was healed: what they keep may be poisoned, too.

    Args:
        over: the devices of the member, for a number on the host.
    """

    def __init__(self, combine: Combine, exchange: Exchange[Any], delay: int, over: Transport) -> None:
        self._over = over
        super().__init__([], combine, exchange, delay)

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        super().step(learning_rate, rounds)
        self._over.broadcast(torch.tensor([self.healing.healed])).wait()


class OtherMixer(Mixer):
    """Mixer of another device: it gives its shards to the first one and mixes nothing. As `FirstMixer`."""

    def __init__(self, combine: Combine, exchange: Exchange[Any], delay: int, over: Transport) -> None:
        self._over = over
        super().__init__([], combine, exchange, delay)

    def extend(self, buckets: Sequence[Flat]) -> None:
        self.buckets += buckets

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        for bucket in self.buckets:
            bucket.adopt()
        healed = torch.zeros(1, dtype=torch.int64)
        self._over.broadcast(healed).wait()
        before, self.healing.healed = self.healing.healed, int(healed)
        if self.healing.healed > before:
            self.healing.forget()

    def mixing(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is the first device's."""
