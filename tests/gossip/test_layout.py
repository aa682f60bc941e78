"""What happens to a parameter's memory after set-up changes no number: a run is the same, to the bit, without it."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_decentral.gossip import (
    Codec,
    Combine,
    Every,
    Gossip,
    GradientTracking,
    Int8,
    Outer,
    OuterNesterov,
    Own,
    Plain,
    PushSum,
    QuasiGlobalMomentum,
    Ring,
    Travel,
)
from lightning_decentral.gossip.compute.travel import pack_states
from lightning_decentral.gossip.wire.island_shards import Sharding
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.gossip.wire.simulation import MatrixExchange
from lightning_decentral.shared.compute.buckets import pack
from lightning_decentral.shared.compute.layout import ModelLayout
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend

pytestmark = [pytest.mark.threads, pytest.mark.filterwarnings("ignore:a parameter of")]
CPU, STEPS = Backend("cpu", "cpu"), 6
LAST = torch.channels_last
Event = Callable[[nn.Module, int], None]


def nothing(net: nn.Module, rank: int) -> None:
    """No event."""


def of_all(net: nn.Module, rank: int) -> None:
    net.to(memory_format=LAST)


def of_one(net: nn.Module, rank: int) -> None:
    if rank:
        net.to(memory_format=LAST)


def replaced(net: nn.Module, rank: int) -> None:
    """Other memory, between rows of another tensor."""
    for p in net.parameters():
        p.data = torch.stack([p.detach(), p.detach()], dim=-1)[..., rank]


def transposed(net: nn.Module, rank: int) -> None:
    """In its own memory, where it begins as before, and back: the numbers are the same, and lie elsewhere."""
    square = net.get_parameter("square")
    square.data = square.detach().t().clone().t() if rank else square.detach().t().contiguous().t()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.square = nn.Conv2d(3, 4, 2), nn.Parameter(torch.zeros(4, 4))
        self.late = nn.Conv2d(2, 3, 2)


def value(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(event: Event, combine: Combine, delay: int, codec: Codec, over: Transport) -> list[Tensor]:
    """A worker's parameters at the end: `late` is freed after the event."""
    net = Model()
    for place, p in enumerate(net.parameters()):
        p.data.copy_(value(p.shape, place))
    net.late.requires_grad_(False)
    optimizer = SGD(net.parameters(), lr=0.1)
    topology = Every(2, Ring()) if isinstance(combine, Outer) else Ring()
    exchange = PeerExchange(topology, combine.weights, over, torch.device("cpu"), codec)
    layout = ModelLayout(net.parameters())
    mixers = Mixers(lambda: MixerFactory(lambda: [Mixer([], combine, exchange, delay)], pack, known=layout))
    mixers.adopt(optimizer)
    for step in range(STEPS):
        if step == 2:
            event(net, over.rank)
        if step == 4:
            net.late.requires_grad_(True)
        for place, p in enumerate(net.parameters()):
            p.grad = value(p.shape, 100 * over.rank + 10 * step + place) if p.requires_grad else None
        optimizer.step()
        mixers.step(optimizer)
    mixers.settle()
    mixers.release()
    return [p.detach().contiguous() for p in net.parameters()]


RULES = [
    (Gossip(), 0, Plain()),
    (Gossip(rate=0.5), 1, Int8(block=8)),
    (PushSum(), 1, Plain()),
    (GradientTracking(), 0, Plain()),
    (QuasiGlobalMomentum(), 1, Plain()),
    (OuterNesterov(), 1, Plain()),
]


@pytest.mark.parametrize(("combine", "delay", "codec"), RULES, ids=str)
def test_an_event_changes_no_number(combine: Combine, delay: int, codec: Codec) -> None:
    def run(event: Event) -> list[list[Tensor]]:
        return CPU.world(2, partial(train, event, combine, delay, codec))

    expected = run(nothing)
    for event in (of_all, of_one, replaced, transposed):
        found = run(event)
        assert all(all(map(torch.equal, a, b)) for a, b in zip(found, expected, strict=True)), event


def momentum(last: bool, over: Transport) -> Tensor:
    """A worker's, whose gradients lie in channels_last: SGD makes its momentum of the first of them."""
    conv, cpu = nn.Conv2d(3, 4, 2, bias=False), torch.device("cpu")
    conv.weight.data.copy_(value(conv.weight.shape, 0))
    optimizer = SGD(conv.parameters(), lr=0.1, momentum=0.9)
    alone = partial(Mixer, [], Gossip(), MatrixExchange(Ring(), Own(), 1), 0)
    mixer = Mixer([], Travel().combine, PeerExchange(Ring(), Own(), over, cpu), 0)

    def everyone(row: list[int]) -> list[list[int]]:
        pending, rows = over.all_gather(torch.tensor(row))
        pending.wait()
        return [row.tolist() for row in rows]

    states = StateMixer(optimizer, "momentum_buffer", mixer, partial(pack_states, bucket_bytes=None, parts=1), everyone)
    mixers = Mixers(lambda: MixerFactory(lambda: [alone()], pack, lambda _: [states]))
    mixers.adopt(optimizer)
    for step in range(3):
        gradient = value(conv.weight.shape, 10 * over.rank + step)
        conv.weight.grad = gradient.to(memory_format=LAST) if last and over.rank else gradient
        optimizer.step()
        mixers.step(optimizer)
    return optimizer.state[conv.weight]["momentum_buffer"].contiguous()


def test_a_state_lies_as_its_parameter_whatever_its_gradient_does() -> None:
    expected, found = (CPU.world(2, partial(momentum, last)) for last in (False, True))
    assert all(map(torch.equal, found, expected))


def check(last: int | None, over: Transport) -> str:
    net = Model().to(memory_format=LAST if over.rank == last else torch.contiguous_format)
    try:
        check_same_model(net, over)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("last", [None, 0, 1], ids=str)
def test_other_strides_are_named_on_every_worker(last: int | None) -> None:
    weight, strides = "conv.weight (4, 3, 2, 2) torch.float32", " strides (12, 1, 6, 3)"
    zero, one = (weight + (strides if rank == last else "") for rank in (0, 1))
    line = f"worker 1 has {one} where worker 0 has {zero}: every worker must build the same model"
    assert CPU.world(2, partial(check, last)) == (["", ""] if last is None else [line, line])


def start(over: Transport) -> Tensor:
    mask = (torch.arange(3.0).view(3, 1) + over.rank).expand(3, 4)
    start_from_worker_0([mask], over, torch.device("cpu"))
    return mask


def test_a_buffer_that_repeats_its_memory_is_worker_0s() -> None:
    assert all(torch.equal(found, torch.arange(3.0).view(3, 1).expand(3, 4)) for found in CPU.world(2, start))


def test_what_can_not_be_sharded_is_refused_by_name() -> None:
    member = Sharding.__new__(Sharding)  # it has no devices yet
    with pytest.raises(ValueError, match=r"conv.weight has strides \(12, 1, 6, 3\): convert .* or use AllReduce"):
        member.arrange(Model().to(memory_format=LAST))


def test_a_run_is_not_resumed_in_another_memory_order() -> None:
    def made(last: bool, combine: Combine) -> tuple[SGD, Mixers]:
        conv = nn.Conv2d(3, 4, 2).to(memory_format=LAST if last else torch.contiguous_format)
        optimizer = SGD(conv.parameters(), lr=0.1)
        alone = partial(Mixer, [], combine, MatrixExchange(Ring(), Own(), 1), 0)
        layout = ModelLayout(conv.parameters())
        mixers = Mixers(lambda: MixerFactory(lambda: [alone()], pack, known=layout))
        mixers.adopt(optimizer)
        return optimizer, mixers

    for combine in (Gossip(), QuasiGlobalMomentum()):
        saved = made(False, combine)[1].state_dict()
        for last in (False, True):
            optimizer, mixers = made(last, combine)
            if last and combine == QuasiGlobalMomentum():
                with pytest.raises(ValueError, match=r"lie in another memory order.*delete its .workers folder"):
                    mixers.load_state_dict(saved, [optimizer])
            else:
                mixers.load_state_dict(saved, [optimizer])


def test_what_was_put_back_is_said_once_by_name() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        CPU.world(2, partial(train, of_one, Gossip(), 0, Plain()))
    texts = [str(one.message) for one in said]
    assert len([text for text in texts if "got strides (12, 1, 6, 3) after set-up" in text]) == 1, texts
