"""Nothing that was rounded away is lost for good: what is taken of constant gradients adds up to what was given."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_decentral.shared.compute.codec import Int4
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import CompressedMean
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.shared.wire.test_compressed_mean import groups
from tests.world import world

pytestmark = pytest.mark.threads
STEPS, ELEMENTS, SIZE = 60, 300, 2


class Run:
    """Two parameters under SGD with a rate of 1: x = -(what was taken), and how often each was used."""

    def __init__(self, group: Any, bucket_bytes: int = 2**20) -> None:
        self.rank, generator = group.rank(), torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(2)]
        self.slopes = [torch.randn(SIZE, ELEMENTS, generator=generator) for _ in range(2)]
        self.mean = CompressedMean(Int4(), *itertools.islice(iter(groups(group), None), 2), torch.device("cpu"))
        self.hosts = GlooTransport(group)
        self.relay(bucket_bytes)
        self.optimizers = [SGD([p], lr=1.0) for p in self.parameters]
        self.given = [torch.zeros(ELEMENTS) for _ in range(2)]
        self.scale = 1.0
        self.users = [[0, 1], [0, 1]]

    def relay(self, bucket_bytes: int) -> None:
        self.average = GradientAverage(self.mean, self.hosts, lambda call: call(), bucket_bytes)

    def step(self, own: list[int], of_all: list[int], skipped: bool = False, shift: float = 0.0) -> None:
        """One backward of these parameters on this worker; of those on any."""
        self.average.watch(self.parameters)
        self.average.begin()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if own:
            (self.scale * self.loss(own, shift)).backward()
        self.average.finish()
        for i in of_all:
            taken = self.parameters[i].grad
            assert taken is not None
            taken.div_(self.scale)
            if not skipped:
                self.optimizers[i].step()
                self.given[i] += self.weight(i)
            self.average.updated(self.optimizers[i], skipped)
        assert [p.grad is not None for p in self.parameters] == [i in of_all for i in range(2)]

    def loss(self, own: list[int], shift: float) -> Tensor:
        return torch.stack([(self.parameters[i] * (self.slopes[i][self.rank] + shift)).sum() for i in own]).sum()

    def weight(self, i: int) -> Tensor:
        """The mean gradient of parameter i over all workers, of which these use it."""
        return self.slopes[i][self.users[i]].sum(0) / SIZE

    def off(self) -> float:
        """The largest difference between what was given and taken, in roundings of the largest gradient."""
        rounding = float(self.slopes[0].abs().max()) / 7
        pairs = zip(self.parameters, self.given, strict=True)
        return max(float((p.detach() + given).abs().max()) for p, given in pairs) / rounding


def by_turns(run: Run) -> None:
    for step in range(2 * STEPS):
        run.step([step % 2], [step % 2])


def in_every_second_step(run: Run) -> None:
    for step in range(STEPS):
        used = [0, 1] if step % 2 else [0]
        run.step(used, used)


def on_one_worker_only(run: Run) -> None:
    run.users = [[0, 1], [0]]
    for step in range(STEPS):
        of_all = [0, 1] if step % 3 else [0]
        run.step(of_all if run.rank == 0 else [0], of_all)


def thawed_again_and_again(run: Run) -> None:
    """The second one is trained for four steps, and for four steps it isn't there."""
    both = run.parameters
    for step in range(STEPS):
        used = [0, 1] if step // 4 % 2 else [0]
        both[1].requires_grad_(1 in used)
        run.average.watch(both[: len(used)])
        run.step(used, used)


def in_other_buckets(run: Run) -> None:
    for step in range(STEPS):
        if step % 5 == 0:
            run.average.close()
            run.relay(2**20 if step % 10 else 1)
        run.step([0, 1], [0, 1])


def with_skipped_updates(run: Run) -> None:
    """Every third update is skipped, of gradients far from the others; some of them infinite."""
    run.mean.guard(None)
    for step in range(STEPS):
        shift = [0.0, 0.0, 3.0, 0.0, 0.0, float("inf")][step % 6]
        run.step([0, 1], [0, 1], skipped=bool(shift), shift=shift)


def at_another_scale(run: Run) -> None:
    """A scaler's factor grows in every update, and falls where one is skipped."""
    run.mean.guard(lambda: torch.tensor(run.scale))
    both = SGD(run.parameters, lr=1.0)
    for step in range(STEPS):
        skips = step % 6 == 5
        run.average.watch(run.parameters)
        both.zero_grad()
        (run.scale * run.loss([0, 1], 5.0 if skips else 0.0)).backward()
        for parameter in run.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(run.scale)
        if not skips:
            both.step()
            run.given = [given + run.weight(i) for i, given in enumerate(run.given)]
        run.scale *= 0.2 if skips else 1.5
        run.average.updated(both, skipped=False)


def from_checkpoints(run: Run) -> None:
    """A new mean goes on where the last one was, in other buckets, every seventh step."""
    for step in range(STEPS):
        if step % 7 == 6:
            state = run.mean.state_dict()
            run.mean.forget()
            run.average.close()
            run.mean.load_state_dict(state)
            run.relay([1, 2**20][step % 2])
        run.step([0, 1], [0, 1])


def from_checkpoints_between_turns(run: Run) -> None:
    """Each backward reaches both, one is updated; a new mean goes on while the other waits, in every third step."""
    for step in range(2 * STEPS):
        turn = run.optimizers[step % 2]
        run.average.watch(run.parameters)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        loss = run.loss([0, 1], 0.0)
        run.average.before(loss)
        loss.backward()
        turn.step()
        run.given[step % 2] += run.weight(step % 2)
        run.average.updated(turn, skipped=False)
        if step % 3 == 2:
            state = run.average.state_dict()
            run.mean.forget()
            run.mean.residuals.guarded = False
            run.average.close()
            run.mean.load_state_dict(state)
            run.relay(2**20)


SCENES = [
    by_turns, in_every_second_step, on_one_worker_only, thawed_again_and_again, in_other_buckets,
    with_skipped_updates, at_another_scale, from_checkpoints, from_checkpoints_between_turns,
]  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_what_is_taken_is_what_was_given(scene: Callable[[Run], None]) -> None:
    def worker(group: Any) -> tuple[float, list[Tensor]]:
        run = Run(group)
        scene(run)
        return run.off(), [p.detach() for p in run.parameters]

    first, *others = world(SIZE, worker)
    assert first[0] < 3, "lost for good it would be the root of the steps, or all of them"
    assert all(torch.equal(a, b) for other in others for a, b in zip(first[1], other[1], strict=True))
