"""The mean over workers against torch's own mean, and swaps that leave no trace."""

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.wire.mean import Swap, mean, mean_of_states
from lightning_decentral.shared.wire.transport import transport
from tests.world import world

pytestmark = pytest.mark.threads

CPU = torch.device("cpu")
SIZE = 3


def tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(4, 3, generator=generator),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.randn(2, 2, generator=generator).bfloat16(),
        torch.full((2,), torch.finfo(torch.float32).min),
        torch.tensor([rank]),
    ]


def test_mean_equals_torch() -> None:
    results = world(SIZE, lambda group: mean(tensors(group.rank()), transport(group, CPU)))
    for rank, (a, b, c, mask, counter) in enumerate(results):
        for k, measured in ((0, a), (1, b), (2, c)):
            expected = torch.stack([tensors(r)[k] for r in range(SIZE)]).float().mean(0).to(measured.dtype)
            torch.testing.assert_close(
                measured, expected if k != 1 else torch.stack([tensors(r)[1] for r in range(SIZE)]).mean(0)
            )
        assert bool(torch.isfinite(mask).all()), "a mask of the largest number overflowed"
        assert counter.item() == rank, "counters are the worker's own"
    assert all(torch.equal(x, y) for r in results[1:] for x, y in zip(results[0][:4], r[:4], strict=True))


def test_tied_entries_of_a_state_stay_tied() -> None:
    def worker(group: object) -> tuple[bool, Tensor]:
        weight = torch.full((2,), float(group.rank()))  # type: ignore[attr-defined]
        over = transport(group, CPU)
        state = mean_of_states({"a": weight, "b": weight, "text": "x"}, lambda tensors: mean(tensors, over))
        return state["a"] is state["b"] and state["text"] == "x", state["a"]

    for tied, value in world(2, worker):
        assert tied
        torch.testing.assert_close(value, torch.full((2,), 0.5))


def test_a_swap_leaves_no_trace() -> None:
    own = torch.randn(7)
    tensor = own.clone()
    swap = Swap([tensor], [torch.zeros(7)])
    assert not bool(tensor.any())
    assert torch.equal(swap.paused({"x": tensor})["x"], own)
    assert not bool(tensor.any()), "looking at the own state left the mean in place"
    swap.undo()
    assert torch.equal(tensor, own)
