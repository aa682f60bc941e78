"""LAW: islands of shards (FSDP2) train, mix and show their mean as one process per island does, in any order in which
streams may run.

Two islands of two workers, each a thread with a simulated device; what they send keeps NCCL's order. Streams, hooks and
collectives are those of torch's `fully_shard`.
"""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_decentral.gossip import Complete, Gossip, Own, Plain
from lightning_decentral.gossip.plan.planned_traffic import Cliques
from lightning_decentral.gossip.sharded import WholeMatrices, sharded_state
from lightning_decentral.gossip.wire.assembly import assembled
from lightning_decentral.gossip.wire.exchange import Flight
from lightning_decentral.gossip.wire.island_shards import Sharding
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.wire import owners
from lightning_decentral.shared.wire.fsdp import ShardBucket, full_tensor, local, mapped
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.owners import each_once
from lightning_decentral.shared.wire.transport import Transport
from tests.simulated import CUDA, Engine, fsdp
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, device_world, sent_overwritten, without_waiting

pytestmark = pytest.mark.threads
SIZE, DEVICES, STEPS, RATE = 4, 2, 3, 0.4
Tensors = list[Tensor]


class Net(nn.Module):
    """Blocks that are gathered one by one; a head with rows that two devices can't have equally many of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


torch.manual_seed(0)
MODEL = Net()


def rows(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


Optimize = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def muon(model: nn.Module) -> Optimizer:
    return Muon(muon_groups(model), lr=0.05, dtype="float64")


class InIsland:
    """Sums between the hosts of one island's devices, by a group of all hosts."""

    def __init__(self, hosts: Transport) -> None:
        self._hosts, first = hosts, hosts.rank // DEVICES * DEVICES
        self._own = slice(first, first + DEVICES)

    def all_reduce(self, flags: Tensor) -> Any:
        pending, rows = self._hosts.all_gather(flags)
        pending.wait()
        flags.copy_(torch.stack(rows[self._own]).sum(0))
        return SimpleNamespace(wait=lambda: None)


class Worker:
    """One device's part in its island: shards, their updates, rounds."""

    def __init__(self, make: Make, delay: int, dtype: torch.dtype, optimize: Optimize) -> None:
        self.delay, self.worker = delay, make.hosts.rank // DEVICES
        hosts: Any = InIsland(make.hosts)
        self.wire: Any = SimpleNamespace(world=make.group(None), group=make.group, hosts=lambda groups: hosts)
        self.model = copy.deepcopy(MODEL).to(dtype)
        self.member = Sharding(self.wire, DEVICES, CUDA, lambda call: call(), None)
        self.member.arrange(self.model)
        self.optimizer = optimize(self.model)
        self.wholes = WholeMatrices([self.optimizer], self.member)
        pack = partial(self.member.pack, bucket_bytes=512)
        self.mixers = Mixers(lambda: MixerFactory(lambda: [self.mixer()], pack))
        self.mixers.adopt(self.optimizer)

    def mixer(self) -> Mixer:
        workers = SIZE // DEVICES, self.worker
        exchange = assembled(Complete(), Own(), *workers, self.member, CUDA, Plain(), self.delay, Cliques.RING)
        return Mixer([], Gossip(rate=RATE), exchange, self.delay)

    def step(self, x: Tensor, accumulated: int) -> Tensor:
        self.optimizer.zero_grad()
        parts = x.chunk(accumulated)
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == accumulated else self.member.blocked():
                loss = self.member.train(self.model, None, lambda part=part: self.model(part).square().mean())  # type: ignore[arg-type,misc]
                (loss / accumulated).backward()
                self.member.after()
        self.optimizer.step()
        self.mixers.step(self.optimizer)
        return loss.detach()

    def shown(self) -> Tensors:
        """The mean that a validation shows, as shards."""
        return self.member.mean([p.detach() for p in self.model.parameters()], partial(mean, over=self.wire.world))

    def state(self) -> Any:
        """What a checkpoint has of this device, on the host."""
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return tree_map_only(Tensor, lambda t: t.cpu(), {**mapped(local, own), "rounds": self.mixers.state_dict()})

    def load(self, state: Any) -> None:
        self.member.load(self.model, state["model"])
        self.optimizer.load_state_dict(sharded_state(self.optimizer, state["optimizer"], own=True))
        self.mixers.load_state_dict(state["rounds"], [self.optimizer])

    def whole(self) -> Tensors:
        """The parameters in the end, with what is still in flight."""
        self.mixers.settle()
        self.wholes.close()
        self.member.close(cut_off=False)
        return [p.detach() for p in self.model.parameters()]


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        accumulated: backward passes of a step.
        optimize: makes the optimizer.
        resumes: in the middle, from what the worker saved there.
        reads: the loss, in each step.
    """

    delay: int = 1
    dtype: torch.dtype = torch.float64
    accumulated: int = 1
    optimize: Optimize = adamw
    resumes: bool = False
    reads: bool = False

    def __call__(self, make: Make, engine: Engine) -> tuple[Tensors, Tensors]:
        """(this worker's whole parameters after a few steps on its own data, the mean that a validation shows)"""
        worker = Worker(make, self.delay, self.dtype, self.optimize)
        for step, x in enumerate(rows(make.hosts.rank, self.dtype).to(CUDA)):
            if self.resumes and step == STEPS // 2:
                state = worker.state()
                worker.wholes.close()
                worker = Worker(make, self.delay, self.dtype, self.optimize)
                worker.load(state)
            with without_waiting(engine) if step else nullcontext():
                loss = worker.step(x, self.accumulated)
                _ = self.reads and float(loss)
        with without_waiting(engine):
            shown = worker.shown()
        return worker.whole(), [full_tensor(t).cpu() for t in shown]


def honest(run: Run) -> tuple[list[Tensors], Tensors]:
    """By one process: a whole model and an optimizer per island, its devices' batches together, the mixing written
    out."""
    models = [copy.deepcopy(MODEL).to(run.dtype) for _ in range(SIZE // DEVICES)]
    optimizers = [run.optimize(model) for model in models]
    sent = values(models)
    for step in range(STEPS):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            ranks = range(island * DEVICES, (island + 1) * DEVICES)
            torch.stack([model(rows(rank, run.dtype)[step]).square().mean() for rank in ranks]).mean().backward()
            optimizer.step()
        new = values(models)
        mix(models, sent if run.delay else new)  # at first with equal ones, which changes nothing
        sent = values(models)
    shown = [torch.stack(pair).mean(0) for pair in zip(*values(models), strict=True)]
    if run.delay:
        mix(models, sent)
    return values(models), shown


def values(models: list[Net]) -> list[Tensors]:
    return [[p.detach().clone() for p in model.parameters()] for model in models]


def mix(models: list[Net], sent: list[Tensors]) -> None:
    """x_i <- x_i + rate (mean of sent_j - sent_i)"""
    means = [torch.stack(pair).mean(0) for pair in zip(*sent, strict=True)]
    for model, own in zip(models, sent, strict=True):
        for parameter, s, m in zip(model.parameters(), own, means, strict=True):
            parameter.data += RATE * (m - s)


def train(run: Run, seed: int = 0) -> None:
    """AssertionError where islands of shards don't train as one process per island does."""
    with fsdp.door():
        found = device_world(SIZE, run, seed)
    wholes, means = honest(run)
    near = {"rtol": 1e-9, "atol": 1e-11} if run.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    for rank, (parameters, shown) in enumerate(found):
        for a, b in zip((*parameters, *shown), (*wholes[rank // DEVICES], *means), strict=True):
            torch.testing.assert_close(a, b, **near)


RUNS = {
    "beside the next step": Run(),
    "blocking, in float32": Run(delay=0, dtype=torch.float32),
    "accumulated": Run(accumulated=2),
    "Muon": Run(optimize=muon),
    "resumed": Run(resumes=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", RUNS)
def test_shards_on_devices_train_as_one_process_per_island(name: str) -> None:
    """Gathers before a block's forward and backward, means of gradients beside the backward, update and round: no host
    waits in a step, nor for the mean that a validation shows."""
    train(RUNS[name], seed=len(name))


SEEN = pytest.raises((AssertionError, RuntimeError, FloatingPointError))


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize(
    ("owner", "call"),
    [(Stream, "wait_stream"), (Stream, "wait_event"), (Event, "wait")],
    ids=["shards and gradients for their gather and sum", "wholes and sums for who computes with them", "messages"],
)
def test_shards_that_wait_for_less_are_seen(owner: type, call: str) -> None:
    with mock.patch.object(owner, call), SEEN:
        train(Run())


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize("call", ["adopt", "store"])
def test_a_round_that_takes_shards_on_a_stream_of_its_own_is_seen(call: str) -> None:
    """The parameters are FSDP's; who copies them must stand behind the update, and before the next gather."""
    plain = getattr(ShardBucket, call)

    def beside(self: ShardBucket) -> None:
        with cuda.on(cuda.Stream()):
            plain(self)

    with mock.patch.object(ShardBucket, call, beside), SEEN:
        train(Run())


@pytest.mark.filterwarnings("ignore:.*refused a message")
def test_a_message_of_shards_that_goes_back_before_it_landed_is_seen() -> None:
    launch = Mixer._launch

    def early(self: Mixer, flight: Flight, *rest: Any) -> None:
        launch(self, flight, *rest)
        self.exchange.pool.give([flight.messages[-1].sent])

    with mock.patch.object(Mixer, "_launch", early), SEEN:
        train(Run())


@pytest.mark.filterwarnings("ignore:.*refused a message")
def test_gathered_memory_that_goes_back_too_early_is_seen() -> None:
    """Before the blocks' parameters are copied out of it, which is another stream's work."""
    unshard = FSDPParamGroup.wait_for_unshard

    def early(self: FSDPParamGroup) -> None:
        unshard(self)
        self.comm_ctx.all_gather_state = None

    with mock.patch.object(FSDPParamGroup, "wait_for_unshard", early), SEEN:
        train(Run())


within = threading.local()


def marked(*args: Any) -> None:
    """`each_once`, in which alone something is planted."""
    within.now = True
    try:
        each_once(*args)
    finally:
        within.now = False


def skipped(owner: type, call: str) -> Any:
    plain = getattr(owner, call)
    planted = lambda self, *args: None if getattr(within, "now", False) else plain(self, *args)  # noqa: E731
    return mock.patch.object(owner, call, planted)


@pytest.mark.sampled
@pytest.mark.parametrize(("owner", "call"), [(Stream, "wait_stream"), (Event, "wait")], ids=["sent", "used"])
def test_matrices_whose_shards_are_sent_or_used_too_early_are_seen(owner: type, call: str) -> None:
    with mock.patch.object(owners, "each_once", marked), skipped(owner, call), SEEN:
        train(Run(optimize=muon))


def test_matrices_whose_shards_are_overwritten_before_they_were_sent_are_seen() -> None:
    with sent_overwritten(lambda: getattr(within, "now", False)), SEEN, mock.patch.object(owners, "each_once", marked):
        train(Run(optimize=muon))


def test_a_step_of_shards_whose_host_reads_its_loss_is_seen() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        train(Run(reads=True))
