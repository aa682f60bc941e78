"""On a device the host only queues: a round of any rule and codec makes it wait for nothing.

The neighbour is a mirror, which says what it hears, so that one device is enough. On the host the same rounds run, too,
and on a device that is simulated.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    Codec,
    Complete,
    ConsensusControl,
    DifferenceCompression,
    Every,
    Gossip,
    Int8,
    MetropolisHastings,
    Own,
    Plain,
    RandomMatching,
    TopK,
    Tree,
)
from lightning_decentral.gossip.wire.consensus import Gauge, mixer_of
from lightning_decentral.gossip.wire.hierarchical import GatherExchange
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.device import AsyncRead, own_stream
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import Message, Transport
from tests import simulated
from tests.backends import Backend
from tests.gossip.rules import Rule, instances, works
from tests.gossip.wire.test_exchange import Row

every_device = pytest.mark.parametrize(
    "device", ["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
CODECS: list[Codec] = [
    Plain(),
    Int8(block=16),
    DifferenceCompression(Int8(block=16)),
    DifferenceCompression(TopK(fraction=0.5, block=16)),
]


class Doubled:
    """tensor <- 2 tensor; as NCCL's, the wait is the current stream's."""

    def __init__(self, tensor: Tensor) -> None:
        tensor.mul_(2)
        self._event = cuda.Event() if tensor.is_cuda else None
        if self._event:
            self._event.record()

    def wait(self) -> None:
        if self._event:
            self._event.wait()

    def done(self) -> bool:
        return self._event is None or self._event.query()


class Twin(Transport):
    """Place 0 of an island of two. The other's part is this one's; both come back with 1 added, late on a device."""

    def __init__(self, device: torch.device, cycles: int = 0) -> None:
        self.group, self.rank, self.size = None, 0, 2
        self.queued = device.type == "cuda"  # type: ignore[misc]
        self._cycles = cycles

    def all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        if whole.is_cuda and self._cycles:
            torch.cuda._sleep(self._cycles)
        whole.view(2, -1).copy_(part + 1)
        return Together([])

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        return Together([]), [tensor, tensor.clone()]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        raise AssertionError("within an island nobody exchanges, all gather")


class Mirror(Transport):
    """Worker 0 of two; worker 1 sends what it is sent."""

    def __init__(self) -> None:
        self.group, self.rank, self.size = None, 0, 2

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        for receive, send in zip(receives, sends, strict=True):
            assert (receive.peer, receive.tag) == (send.peer, send.tag)
            receive.tensor.copy_(send.tensor)
        return [], []

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Doubled(tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        return Together([])


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    if engine := simulated.here():
        before = len(engine.waits)
        yield
        assert engine.waits[before:] == []
        return
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rounds(rule: Rule, codec: Codec, device: str) -> Tensor:
    """Parameters after four rounds to get warm in and five more in which the host doesn't wait."""
    topology = next(t for t in (RandomMatching(rounds=1), Tree(), Every(2, Tree())) if works(rule, t, 2, 1))
    x = torch.linspace(-1, 1, 64, device=device)
    transport = Mirror()
    exchange = PeerExchange(topology, rule.weights, transport, x.device, codec)
    mixer = mixer_of(rule, exchange, 1, lambda: transport)
    mixer.extend([Row(x)])
    for _ in range(4):
        mixer.step(0.1)
    with without_waiting(device):
        for _ in range(5):
            x.sub_(x, alpha=0.1)
            mixer.step(0.1)
    return x


@pytest.mark.sampled
@every_device
@pytest.mark.parametrize("rule", instances(), ids=str)
def test_no_rule_makes_the_host_wait(rule: Rule, device: str) -> None:
    assert bool(torch.isfinite(rounds(rule, Plain(), device)).all())


@pytest.mark.sampled
@every_device
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_codec_makes_the_host_wait(codec: Codec, device: str) -> None:
    """Nor its error, which is measured in rounds 0, 1, 2, 4 and 8."""
    assert bool(torch.isfinite(rounds(Gossip(rate=0.3), codec, device)).all())


@every_device
def test_a_mirrored_worker_only_descends(device: str) -> None:
    """x <- 0.9 x five times, as nothing it hears differs from what it is."""
    found = rounds(Gossip(rate=0.5), Plain(), device).cpu()
    torch.testing.assert_close(found, 0.9**5 * torch.linspace(-1, 1, 64), rtol=1e-6, atol=1e-6)


def with_checkpoints(codec: Codec, delay: int, device: str, saves: int | None, resumes: bool) -> Tensor:
    """Parameters after six steps, in which those heard are half of what was sent; saved, or resumed, once."""
    x = torch.linspace(-1, 1, 64, device=device)

    def fresh() -> Mixer:
        return Mixer([Row(x)], Gossip(rate=0.3), PeerExchange(Tree(), Own(), Halved(), x.device, codec), delay)

    mixer = fresh()
    for step in range(6):
        if step == saves:
            state = mixer.state_dict()
            if resumes:
                mixer = fresh()
                mixer.load_state_dict(state)
        x.sub_(x, alpha=0.1)
        mixer.step()
    return x.cpu()


class Halved(Mirror):
    """What comes back is half of what was sent, so that every round corrects."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        done = super().exchange(sends, receives)
        for receive in receives:
            if receive.tensor.dtype == torch.float32:
                receive.tensor.mul_(0.5)
        return done


@every_device
@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("codec", [Plain(), Int8(block=16)], ids=str)
def test_a_checkpoint_changes_no_bit(codec: Codec, delay: int, device: str) -> None:
    """Nor does going on from it: what is in flight brings the same correction."""
    expected = with_checkpoints(codec, delay, device, None, False)
    assert not torch.equal(expected, 0.9**6 * torch.linspace(-1, 1, 64))
    for resumes in (False, True):
        assert torch.equal(with_checkpoints(codec, delay, device, 4, resumes), expected)


def test_a_checkpoint_of_before_there_were_differences() -> None:
    """Its mixtures land as they did."""
    x = torch.linspace(-1, 1, 64)
    mixer = Mixer([Row(x)], Gossip(rate=0.3), PeerExchange(Tree(), Own(), Halved(), x.device, Plain()), 1)
    mixer.step()
    state = mixer.state_dict()
    for flight in state["flights"]:
        del flight["differences"]
    mixer.load_state_dict(state)
    mixer.drain()
    torch.testing.assert_close(x, torch.linspace(-1, 1, 64) * (1 - 0.3 / 4))


def island_rounds(codec: Codec, delay: int, device: torch.device, inside: Transport) -> Tensor:
    """Of one device of an island of two, before and after each of six steps: half the weight is the mirror's."""
    half = torch.linspace(-1, 1, 32, dtype=torch.float64, device=device)
    row = Row(torch.cat([half, half]))
    peers = PeerExchange(Complete(), MetropolisHastings(), Mirror(), device, codec)
    mixer = Mixer([row], Gossip(rate=0.3), GatherExchange(peers, inside, device), delay)
    path = [row.flat.clone()]
    for step in range(6):
        with without_waiting(device.type if step > 2 else "cpu"):
            row.flat.sub_(row.flat, alpha=0.1)
            mixer.step()
            path.append(row.flat.clone())
    return torch.stack(path).cpu()


@every_device
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_what_an_island_gathers_lands_where_its_rule_says(delay: int, device: str) -> None:
    """x <- 0.9 x, and 0.3 (x + 1 - x) from where the first round lands."""
    where = torch.device(device)
    x, expected = torch.linspace(-1, 1, 32, dtype=torch.float64).repeat(2), []
    for step in range(7):
        expected.append(x)
        x = 0.9 * x + 0.3 * (step >= delay)
    path = island_rounds(Plain(), delay, where, Twin(where, cycles=0 if simulated.here() else 10**7))
    torch.testing.assert_close(path, torch.stack(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", [Plain(), DifferenceCompression(Int8(block=16))], ids=str)
def test_an_island_on_a_device_equals_one_on_the_host(codec: Codec) -> None:
    host, device = torch.device("cpu"), torch.device("cuda")
    path = island_rounds(codec, 1, device, Twin(device, cycles=10**7))
    torch.testing.assert_close(path, island_rounds(codec, 1, host, Twin(host)))


@pytest.mark.gpu
def test_the_step_goes_on_while_an_island_gathers() -> None:
    device = torch.device("cuda")
    peers = PeerExchange(Complete(), MetropolisHastings(), Mirror(), device)
    message = torch.ones(64, device=device)
    # A kernel's first launch loads it, for which the host waits until the device is idle.
    GatherExchange(peers, Twin(device), device).launch(message, 0, 0).land()
    launched = GatherExchange(peers, Twin(device, cycles=10**9), device).launch(message, 0, 0)
    step, gathered = torch.cuda.Event(), torch.cuda.Event()
    step.record()
    mixed = launched.land()
    gathered.record()
    step.synchronize()
    assert not gathered.query()
    assert mixed.tolist() == [2.0] * 64


def plain_island(transport: Transport) -> Tensor:
    return island_rounds(Plain(), 1, torch.device("cuda", transport.rank), transport)


@pytest.mark.multigpu
def test_an_island_of_two_devices_gathers_beside_the_step() -> None:
    """0.9^t x: both have the same, so nothing that is mixed differs from what was sent."""
    half = torch.linspace(-1, 1, 32, dtype=torch.float64)
    expected = 0.9 ** torch.arange(7).unsqueeze(1) * torch.cat([half, half])
    for path in Backend("nccl", "cuda").world(2, plain_island):
        torch.testing.assert_close(path, expected)


@every_device
def test_a_distance_is_read_lag_steps_later(device: str) -> None:
    gauge = Gauge(2, Mirror().all_reduce)
    read = []
    for step in range(5):
        gauge.report(torch.tensor([float(step), 4.0], dtype=torch.float64, device=device))
        read.append(gauge.distance)
    assert [math.isnan(distance) for distance in read] == [True, True, False, False, False]
    assert read[2:] == pytest.approx([0.0, 0.5, math.sqrt(0.5)])
    rule = ConsensusControl(target=1.0)
    assert (rule.rounds(read[0], 0), rule.rounds(2.0, 0)) == (0, rule.most)


@every_device
def test_a_number_arrives(device: str) -> None:
    tensor = torch.arange(3.0, device=device)
    with own_stream(tensor.device):
        arriving = AsyncRead(tensor)
    assert arriving.on_host == (device == "cpu")
    assert arriving.read().tolist() == [0.0, 1.0, 2.0]
