"""LAW: islands of devices train, and show their mean, as islands of hosts, in any order in which streams may run.

Two islands of two workers, each a thread with a simulated device; what they send keeps NCCL's order.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_decentral.gossip import Codec, Combine, Complete, Gossip, Int8, Own, Plain, PseudoGradient
from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.wire.assembly import assembled
from lightning_decentral.gossip.wire.hierarchical import Averaging
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.transport import GlooTransport, Transport
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, device_world, losses_read, sent_overwritten, without_waiting
from tests.world import world

pytestmark = pytest.mark.threads
SIZE, DEVICES, STEPS = 4, 2, 4
RULE = Gossip(rate=0.4)
MODEL = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
Group = Callable[[Sequence[Sequence[int]] | None], Transport | None]


def by_gloo(rank: int, store: Any, size: int = SIZE) -> Group:
    """Groups of one worker, between hosts."""
    numbers = itertools.count()

    def group(groups: Sequence[Sequence[int]] | None) -> Transport | None:
        number = next(numbers)
        members = next(list(ranks) for ranks in groups or [range(size)] if rank in ranks)
        own = dist.PrefixStore(f"{number} {members}", store)
        place = members.index(rank), len(members)
        return GlooTransport(dist.ProcessGroupGloo(own, *place, timedelta(seconds=45)))

    return group


def trained(
    codec: Codec,
    delay: int,
    rank: int,
    device: torch.device,
    group: Group,
    hosts: Group,
    engine: Engine | None,
    rule: Combine = RULE,
    size: int = SIZE,
) -> list[Tensor]:
    """(this worker's parameters after a few steps on its own data, their mean over all as a validation shows it)"""
    wire: Any = SimpleNamespace(world=group(None), group=group, hosts=hosts)
    member = Averaging(wire, DEVICES, device, lambda call: call(), 512, Plain())
    model = copy.deepcopy(MODEL).to(device)
    islands = size // DEVICES
    cliques = cliques_of(codec, rule, Complete(), Own(), islands)
    exchange = assembled(Complete(), Own(), islands, rank // DEVICES, member, device, codec, delay, cliques)
    mixer = Mixer(member.pack(list(model.parameters()), 512), rule, exchange, delay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rows = torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(device)

    def closure(x: Tensor) -> None:
        optimizer.zero_grad()
        member.train(model, lambda: model(x).square().mean(), lambda: None).backward()

    for step, x in enumerate(rows):
        with without_waiting(engine) if engine and step else nullcontext():  # tables of noise are copied once
            member.averaging(partial(closure, x))
            optimizer.step()
            mixer.step()
    with without_waiting(engine) if engine else nullcontext():
        shown = member.mean([p.detach() for p in model.parameters()], partial(mean, over=wire.world))
    mixer.drain()
    return [t.detach().cpu() for t in (*model.parameters(), *shown)]


def train_both(codec: Codec, delay: int, seed: int = 0, rule: Combine = RULE, size: int = SIZE) -> None:
    """AssertionError where islands of devices don't do what islands of hosts do."""
    here, there = dist.HashStore(), dist.HashStore()

    def on_host(group: Any) -> list[Tensor]:
        groups = by_gloo(group.rank(), here, size)
        return trained(codec, delay, group.rank(), torch.device("cpu"), groups, groups, None, rule, size)

    def on_device(make: Make, engine: Engine) -> list[Tensor]:
        rank = make.hosts.rank
        return trained(codec, delay, rank, CUDA, make.group, by_gloo(rank, there, size), engine, rule, size)

    for a, b in zip(device_world(size, on_device, seed), world(size, on_host, seconds=45.0), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", [Plain(), Int8(block=16)], ids=str)
def test_islands_of_devices_train_as_islands_of_hosts(codec: Codec, delay: int) -> None:
    """Forward, backward with averages beside it, update, each device's part and the gather: no host waits in a step,
    nor for the mean that a validation shows."""
    train_both(codec, delay, seed=delay)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
def test_islands_of_devices_add_up_codes_as_islands_of_hosts(delay: int) -> None:
    """Three islands, so that owners of parts of each device's part do it."""
    train_both(Int8(block=16), delay, rule=PseudoGradient(lr=0.7, momentum=0.5), size=6)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize(
    ("owner", "call"),
    [(Stream, "wait_stream"), (Stream, "wait_event"), (Event, "wait")],
    ids=["what is sent", "what lands", "what is heard"],
)
def test_an_island_that_waits_for_less_is_seen(owner: type, call: str) -> None:
    with mock.patch.object(owner, call), pytest.raises((AssertionError, RuntimeError, FloatingPointError)):
        train_both(Plain(), 1)


@pytest.mark.filterwarnings("ignore:.*refused a message")
def test_an_island_whose_messages_are_overwritten_before_they_were_sent_is_seen() -> None:
    with sent_overwritten(), pytest.raises((AssertionError, RuntimeError, FloatingPointError)):
        train_both(Plain(), 1)


def test_an_island_whose_host_reads_its_loss_is_seen() -> None:
    with losses_read(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        train_both(Plain(), 1)
