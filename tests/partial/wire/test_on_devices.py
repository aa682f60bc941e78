"""LAW: a partial backward gives the means of the hosts, in any order in which streams may run.

A worker that has all gradients waits for nothing. One that lacks some asks its device which of them others have, once
a step for all buckets: that is a wait, and the only one.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_decentral.partial import DepthAssignment, Full, PerWorker, Staircase
from lightning_decentral.partial.plan.depth import contributors
from tests.partial.wire import test_reducer as reference
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, device_world

pytestmark = pytest.mark.threads
SIZE = 3


def step(assignment: DepthAssignment, bucket_bytes: int, make: Make, engine: Engine) -> list[Tensor | None]:
    blocks, x = reference.chain().to(CUDA), reference.inputs(make.hosts.rank).to(CUDA)
    before, rank = len(engine.waits), make.hosts.rank
    reference.backward(rank, SIZE, blocks, make.group, assignment, bucket_bytes, x)
    lacks = any(rank not in ranks for ranks in contributors(assignment, SIZE, 0, reference.SEGMENTS))
    assert len(engine.waits[before:]) == lacks
    assert all("partial/wire/contributor_buckets.py" in wait for wait in engine.waits[before:])
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
