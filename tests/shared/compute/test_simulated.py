"""The simulated device finds what it's there for: missing waits, memory given back too early, hosts that wait.

Each defect is planted into a few lines of work on two streams, which are right without it; some schedule must show it.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.codec.blocks import dither
from lightning_decentral.shared.compute.device import AsyncRead
from tests import simulated
from tests.simulated import CUDA, streams

SEEDS = range(12)
Work = Callable[[bool], Tensor]
"""(whether the defect is there) -> a tensor of ones, of the device or of the host"""


def beside(wait_for_input: bool = True, wait_for_output: bool = True, keep: bool = True) -> Tensor:
    """1 + 2 - 2, of which 2 is added on a second stream."""
    side, main = cuda.Stream(CUDA), cuda.current_stream()
    x = torch.zeros(4, device=CUDA) + 1
    if wait_for_input:
        side.wait_stream(main)
    with cuda.on(side):
        y = x + 2
        done = side.record_event()
    if keep:
        x.record_stream(side)
    del x  # its memory is the main stream's again
    if wait_for_output:
        main.wait_event(done)
    z = y - 2
    y.record_stream(main)
    return z


def late_copy(wait: bool) -> Tensor:
    read = AsyncRead(torch.zeros(4, device=CUDA) + 1)
    return read.read().clone() if wait else read._tensor.clone()


def pinned_source(wait: bool) -> Tensor:
    host = cuda.pinned(torch.ones(4))
    there = torch.empty(4, device=CUDA).copy_(host, non_blocking=True)
    if wait:
        cuda.synchronize(CUDA)
    host.zero_()
    return there


def out_of_the_backward(wait: bool) -> Tensor:
    """d/dx of x^2 / 2 at 1, copied by a hook on a second stream."""
    side, copies = cuda.Stream(CUDA), []
    x = nn.Parameter(torch.ones(4, device=CUDA))

    def copy(parameter: Tensor) -> None:
        if wait:
            side.wait_stream(cuda.current_stream())
        with cuda.on(side), torch.no_grad():
            copies.append(parameter.grad.clone())
        parameter.grad.record_stream(side)

    x.register_post_accumulate_grad_hook(copy)
    (x.square().sum() / 2).backward()
    cuda.current_stream().wait_stream(side)
    copies[0].record_stream(cuda.current_stream())
    return copies[0] * 1


WORKS: dict[str, Work] = {
    "the second stream doesn't wait for its input": lambda planted: beside(wait_for_input=not planted),
    "nobody waits for the second stream": lambda planted: beside(wait_for_output=not planted),
    "the input's memory goes back too early": lambda planted: beside(keep=not planted),
    "the host reads a copy that is under way": lambda planted: late_copy(not planted),
    "the host writes to what is still copied": lambda planted: pinned_source(not planted),
    "a hook of the backward doesn't wait": lambda planted: out_of_the_backward(not planted),
}


def wrong(work: Work, planted: bool) -> int:
    """Schedules that show something else than ones."""
    count = 0
    for seed in SEEDS:
        with simulated.device(seed):
            count += not torch.equal(work(planted).detach().to("cpu"), torch.ones(4))
    return count


@pytest.mark.parametrize("name", WORKS)
def test_a_planted_defect_is_found_and_nothing_else(name: str) -> None:
    assert wrong(WORKS[name], planted=False) == 0
    assert wrong(WORKS[name], planted=True) >= 3


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "copy": lambda x: torch.empty(4).copy_(x, non_blocking=True),  # into memory that isn't pinned
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "move": lambda x: x + torch.ones(4).to(x.device),
    "synchronize": lambda x: cuda.synchronize(x.device),
    "stream": lambda x: cuda.current_stream(x.device).synchronize(),
    "event": lambda x: cuda.current_stream(x.device).record_event().synchronize(),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_that_waits_is_seen_with_its_line(name: str) -> None:
    with simulated.device(0) as engine:
        x = torch.zeros(4, device=CUDA) + 1
        assert engine.waits == []
        READS[name](x)
        assert len(engine.waits) == 1
        assert "test_simulated.py:" in engine.waits[0]


def test_a_host_that_only_queues_is_not() -> None:
    with simulated.device(0) as engine:
        x = torch.full((4,), 2.0, device=CUDA)
        y = torch.where(x > 1, x, 0).mul_(torch.tensor(2.0)).cumsum(0)
        copy = cuda.host_like(y).copy_(y, non_blocking=True)
        moved = torch.ones(4).to(CUDA, non_blocking=True)
        early = cuda.current_stream(CUDA).record_event()
        y.add_(moved)[1:3].zero_()
        early.synchronize()  # meanwhile the device has something to do
        assert engine.waits == []
        assert y.tolist() == [5.0, 0.0, 0.0, 17.0]
    assert copy.tolist() == [4.0, 8.0, 12.0, 16.0]


def test_tensors_of_two_devices_dont_mix() -> None:
    with simulated.device(0):
        x = torch.ones(4, device=CUDA)
        for mixed in (
            lambda: x + torch.ones(4),
            lambda: torch.ones(4).add_(x),
            lambda: torch.stack([x[0], torch.ones(())]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()


def trained(device: torch.device, steps: int = 3) -> tuple[list[Tensor], list[str]]:
    """A small model's parameters after a few steps, and what made the host wait in them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)
    )
    rows, labels = torch.randint(7, (steps, 5, 3)), torch.randint(3, (steps, 5))
    model.to(device)
    rows, labels = rows.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = simulated.here()
    before = len(engine.waits) if engine else 0
    for x, y in zip(rows, labels, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], engine.waits[before : before + 1] if engine else []


def test_training_on_it_is_training_on_the_host() -> None:
    """Forward, backward and a plain optimizer; nothing in them waits."""
    with simulated.device(3):
        there, waits = trained(CUDA)
    here, _ = trained(torch.device("cpu"))
    assert [wait.partition(" /")[0] for wait in waits] == ["copy to the host"]  # to compare them
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b)


def test_an_operation_ends_before_the_next_begins_whoever_collects_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector in the middle of an operation gives memory back, which is an operation, too."""
    monkeypatch.setattr(streams, "EARLY", 1.0)
    with simulated.device(0) as engine:
        kept, order = [torch.ones(4, device=CUDA)], list[str]()
        engine.finish()

        def first() -> None:
            order.append("first begins")
            kept.clear()
            order.append("first ends")

        engine.current.queue += [(lambda: True, first), (lambda: True, lambda: order.append("second"))]
        engine.finish()
    assert order == ["first begins", "first ends", "second"]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_numbers_of_one_stream_are_not_those_that_another_still_makes(seed: int) -> None:
    """Nothing that they are made of is kept by one stream for the others, who'd read it too early."""
    with simulated.device(seed):
        side = cuda.Stream(CUDA)
        with cuda.on(side):
            dither(9, 3, 4, CUDA)(0, 9, torch.empty(9, device=CUDA))
        found = dither(9, 5, 4, CUDA)(0, 9, torch.empty(9, device=CUDA)).cpu()
    assert torch.equal(found, dither(9, 5, 4, torch.device("cpu"))(0, 9, torch.empty(9)))
