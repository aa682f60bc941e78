"""LAW: a partial backward gives the means of the hosts, in any order in which streams may run.

No host waits for its device: which gradients others have, where a worker lacks some, the hosts tell each other.
"""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.partial import Decay, DepthAssignment, Full, PerWorker, Staircase, Temporal
from lightning_decentral.partial.compute.frozen_update import settle
from lightning_decentral.partial.compute.search import search
from lightning_decentral.partial.plan.depth import contributors
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.partial.wire.reducer import Rank, Reducer
from tests.partial.towers import Scripted
from tests.partial.wire import test_reducer as reference
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, device_world, losses_read, sent_overwritten, without_waiting

pytestmark = pytest.mark.threads
SIZE = 3


def step(assignment: DepthAssignment, bucket_bytes: int, make: Make, engine: Engine) -> list[Tensor | None]:
    blocks, x = reference.chain().to(CUDA), reference.inputs(make.hosts.rank).to(CUDA)
    with without_waiting(engine):
        hosts = lambda groups: make.hosts  # noqa: E731
        reference.backward(make.hosts.rank, SIZE, blocks, make.group, hosts, assignment, bucket_bytes, x)
    gradients = [p.grad for p in blocks.parameters()]
    return [None if g is None else g.cpu() for g in gradients]


def check(assignment: DepthAssignment, bucket_bytes: int, seed: int) -> None:
    """AssertionError where the means of devices are not the formula's."""
    expected = reference.reference(assignment, SIZE)
    for gradients in device_world(SIZE, partial(step, assignment, bucket_bytes), seed):
        for gradient, value in zip(gradients, expected, strict=True):
            assert (gradient is None) == (value is None)
            if value is not None:
                torch.testing.assert_close(gradient, value, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("assignment", [Full(), Staircase(), PerWorker(fractions=(1.0, 0.25, 1.0))], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 10**7])
def test_means_of_devices_are_those_of_hosts(assignment: DepthAssignment, bucket_bytes: int, seed: int) -> None:
    check(assignment, bucket_bytes, seed)


@pytest.mark.parametrize("assignment", [Full(), Staircase()], ids=str)
@pytest.mark.parametrize(("owner", "call"), [(Stream, "wait_stream"), (Event, "wait")], ids=["given", "averaged"])
def test_a_reducer_that_waits_for_less_is_seen(owner: type, call: str, assignment: DepthAssignment) -> None:
    """The communicator for the gradients, the step for their means."""
    with mock.patch.object(owner, call), pytest.raises(AssertionError, match="not close"):
        check(assignment, 1, seed=0)


def test_gradients_that_are_given_back_before_they_were_sent_are_seen() -> None:
    with sent_overwritten(), pytest.raises(AssertionError, match="not close"):
        check(Full(), 1, seed=0)


# ---- training steps ---------------------------------------------------------------------------------------------

STEPS, SEGMENTS = 4, 4
NET = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(SEGMENTS))).double()
BOUNDARIES = [str(segment) for segment in range(1, SEGMENTS)]
ASSIGNMENTS: list[DepthAssignment] = [
    Staircase(),
    Temporal(order=Scripted(4, 2, 1), warm_up=0),
    PerWorker(fractions=(1.0, 0.25, 0.75)),
]


def rows(rank: int) -> Tensor:
    return torch.randn(STEPS, 5, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def driven(assignment: DepthAssignment, make: Make, engine: Engine) -> list[Tensor]:
    """Parameters after whole steps on this worker's own data: cut, backward with its reducer beside it, update."""
    module, given, rank = copy.deepcopy(NET).to(CUDA), rows(make.hosts.rank).to(CUDA), make.hosts.rank
    with torch.random.fork_rng(devices=[]):
        plan = search(copy.deepcopy(NET), BOUNDARIES, None, lambda trial: lambda: trial(rows(rank)[0]).square().mean())
    place = Rank(rank, (1 / SIZE,) * SIZE)
    driver = DepthController(module, plan, assignment, place)
    reducer = Reducer(driver.segments, place, make.group, lambda groups: make.hosts, 512)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step, x in enumerate(given):
        with without_waiting(engine):
            optimizer.zero_grad()
            with driver.together(step):
                loss = module(x).square().mean()
            reducer.begin(driver.contributors)
            loss.backward()
            driver.bypass.end()
            reducer.finish()
            settle(Decay(), optimizer, driver.absent())
            optimizer.step()
    return [p.detach().cpu() for p in module.parameters()]


def honest(assignment: DepthAssignment) -> list[Tensor]:
    """The same by one process: whole backward passes, the mean over a segment's contributors; decay alone without."""
    module = copy.deepcopy(NET)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(STEPS):
        gradients = [
            torch.autograd.grad(module(rows(rank)[step]).square().mean(), list(module.parameters()))
            for rank in range(SIZE)
        ]
        found = contributors(assignment, SIZE, step, SEGMENTS)
        for i, parameter in enumerate(module.parameters()):
            ranks = found[i // 4]
            parameter.grad = sum(gradients[r][i] for r in ranks) / len(ranks) if ranks else None
            if not ranks:
                parameter.data.mul_(1 - 0.05 * optimizer.defaults["weight_decay"])
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def train(assignment: DepthAssignment, seed: int) -> None:
    """AssertionError where devices don't train as one process does."""
    expected = honest(assignment)
    for found in device_world(SIZE, partial(driven, assignment), seed):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
def test_models_on_devices_train_as_one_process(assignment: DepthAssignment, seed: int) -> None:
    """A step makes no host wait."""
    train(assignment, seed)


@pytest.mark.parametrize(("owner", "call"), [(Stream, "wait_stream"), (Event, "wait")], ids=["given", "averaged"])
def test_a_step_that_waits_for_less_is_seen(owner: type, call: str) -> None:
    with mock.patch.object(owner, call), pytest.raises((AssertionError, RuntimeError)):
        train(ASSIGNMENTS[1], seed=0)


def test_a_step_whose_host_reads_its_loss_is_seen() -> None:
    with losses_read(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        train(ASSIGNMENTS[0], seed=0)
