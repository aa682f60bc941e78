"""A strategy of one worker that offers what watchers ask for, with numbers that a test knows."""

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_decentral.gossip.wire.consensus import Consensus
from lightning_decentral.gossip.wire.exchange import Traffic


class Scripted(SingleDeviceStrategy):
    """After its r-th update: r rounds, distance r / 10, 100 r bytes, r^2 seconds waited, 3 r seconds in flight; it
    mixes at rate 1 / (1 + r)."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.updates = 0
        self.asked: list[int] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return super().optimizer_step(*args, **kwargs)

    def rounds(self) -> list[int]:
        return [self.updates]

    def traffic(self) -> Traffic:
        r = self.updates
        return Traffic(rounds=r, bytes_sent=100 * r, wait_seconds=r**2, in_flight_seconds=3 * r, refused=r // 4)

    def consensus(self) -> Consensus:
        self.asked.append(self.updates)
        return Consensus(self.updates / 10, self.updates / 1000)

    def mixing(self) -> dict[str, float]:
        return {"mixing_rate": 1 / (1 + self.updates), "delay": 2.0}

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def hyperparameters(self) -> dict[str, float | str]:
        return {"workers": 1, "topology": "scripted"}

    def summary(self) -> dict[str, str]:
        return {"workers": "1", "topology": "scripted", "evaluated": "the mean of the workers"}
