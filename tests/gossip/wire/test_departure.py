"""When the buckets of a round are mixed, made ready and sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.gossip import Gossip, Own, Ring
from lightning_decentral.gossip.wire.exchange import Copied, Landed, MessageInFlight
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.simulation import MatrixExchange
from lightning_decentral.shared.compute.buckets import bucket_bytes_of, pack


@dataclass
class Row:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds it."""


@dataclass
class Told(MatrixExchange):
    """Keeps what it was asked for."""

    calls: list[str] = field(default_factory=list)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> MessageInFlight:
        self.calls.append(f"launch {place} of {step}")
        launched = super().launch(message, step, place, copied)
        return ToldLanding(launched.sent, launched.land(), self.calls, f"land {place} of {step}")

    def depart(self, launched: Sequence[MessageInFlight], step: int) -> None:
        self.calls.append("depart")


@dataclass
class ToldLanding(Landed):
    calls: list[str]
    name: str

    def land(self) -> Tensor:
        self.calls.append(self.name)
        return super().land()


def calls(delay: int, steps: int) -> list[str]:
    exchange = Told(Ring(), Own(), 4)
    mixer = Mixer([Row(torch.zeros(4, 2)), Row(torch.zeros(4, 3))], Gossip(rate=0.4), exchange, delay)
    for _ in range(steps):
        exchange.calls.clear()
        mixer.step()
    return exchange.calls


def test_a_bucket_is_ready_before_the_next_is_waited_for_and_all_depart_together() -> None:
    assert calls(1, 3) == ["land 0 of 1", "launch 0 of 2", "land 1 of 1", "launch 1 of 2", "depart"]
    assert calls(2, 4) == ["land 0 of 1", "launch 0 of 3", "land 1 of 1", "launch 1 of 3", "depart"]


def test_what_blocks_departs_before_it_is_waited_for() -> None:
    assert calls(0, 2) == ["launch 0 of 1", "launch 1 of 1", "depart", "land 0 of 1", "land 1 of 1"]


@pytest.mark.parametrize(("model", "bucket"), [(1, 2), (16, 2), (40, 5), (4096, 256)])
def test_buckets_are_an_eighth_from_2_to_256_mebibytes(model: int, bucket: int) -> None:
    layers = [nn.Parameter(torch.empty(model * 2**20 // 4 // 32, device="meta")) for _ in range(32)]
    assert bucket_bytes_of(layers) == bucket * 2**20


def test_equal_layers_make_eight_buckets() -> None:
    layers = [nn.Parameter(torch.zeros(2**17)) for _ in range(32)]
    assert len(pack(layers)) == 8
    assert len(pack(layers[:1])) == 1
