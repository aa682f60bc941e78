"""Packing against torch.cat and split; buckets that leave in their order, by hooks, with what the backward has made."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import chunked
from lightning_decentral.shared.wire.gradients import SPARSE, GradientBucket, Launcher, flag, pack, parts, used
from lightning_decentral.shared.wire.pending import Together


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, size + 1)) for size in sizes]


def test_what_is_packed_is_unpacked_in_the_precision_of_the_message() -> None:
    like = [torch.randn(3, 2).T, torch.randn(4), torch.randn(2).bfloat16()]
    sparse = torch.sparse_coo_tensor([[1]], [5.0], (4,))
    flat = torch.empty(12)
    pack([like[0], sparse, None], like, flat)
    first, second, third = parts(flat, like)
    assert torch.equal(first, like[0])
    assert second.tolist() == [0, 5, 0, 0]
    assert third.tolist() == [0, 0]
    pack(like[2:], like[2:], flat[:2])
    assert torch.equal(flat[:2], like[2].float())


def test_flags_say_who_has_a_gradient_and_are_read_where_one_is_missing() -> None:
    gradients = [torch.ones(1), None, None]
    assert flag(gradients, torch.empty(3)).tolist() == [1, 0, 0]
    assert used(gradients, torch.tensor([1, 2, 0]), Together([]).wait) == [True, True, False]
    sparse = torch.ones(1).to_sparse()
    flags = flag([sparse, None, torch.ones(1)], torch.empty(3)) + flag([sparse, sparse, None], torch.empty(3))
    assert used([None] * 3, flags, Together([]).wait) == [SPARSE, SPARSE, 1]
    assert used([sparse, torch.ones(1)], torch.empty(2), Together([]).wait) == [SPARSE, 1]
    assert used([torch.ones(1)] * 2, torch.tensor([0, 0]), Together([]).wait) == [True, True], "not read"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans())), st.integers(1, 60))
def test_chunks_hold_what_they_have_room_for(rows: list[tuple[int, bool]], most_bytes: int) -> None:
    """In order by type, none too large, and none that the next parameter of its type would still have fitted into."""
    found = [nn.Parameter(torch.zeros(n, dtype=torch.float64 if wide else torch.float32)) for n, wide in rows]
    chunks = chunked(found, most_bytes)
    for kind in (torch.float32, torch.float64):
        mine = [chunk for chunk in chunks if chunk[0].dtype == kind]
        assert [id(p) for chunk in mine for p in chunk] == [id(p) for p in found if p.dtype == kind]
        assert all(len(chunk) == 1 or sum(p.nbytes for p in chunk) <= most_bytes for chunk in mine)
        assert all(sum(p.nbytes for p in [*a, b[0]]) > most_bytes for a, b in pairwise(mine))
    assert all(p.dtype == chunk[0].dtype for chunk in chunks for p in chunk)


def test_buckets_leave_in_their_order_as_soon_as_they_are_complete() -> None:
    a, b, c = parameters(1, 2, 3)
    left: list[GradientBucket] = []
    begun: list[int] = []
    launcher = Launcher(left.append, lambda: begun.append(len(left)))
    upper, lower = GradientBucket([c, b]), GradientBucket([a])
    assert launcher.watch([a, b, c])
    assert not launcher.watch([c, b, a]), "the same ones"
    launcher.begin([upper, lower])
    a.sum().backward()
    (2 * c).sum().backward()
    assert left == [], "the upper one isn't complete, the lower one waits for it"
    b.sum().backward()
    assert left == [upper, lower]
    assert begun == [0]
    with pytest.raises(RuntimeError, match="grew again after it was sent"):
        a.sum().backward()


def test_what_backward_did_not_complete_leaves_at_the_end_and_pauses_and_closed_hooks_see_nothing() -> None:
    a, b = parameters(1, 2)
    left: list[GradientBucket] = []
    launcher = Launcher(left.append)
    launcher.watch([a, b])
    launcher.begin([GradientBucket([a]), GradientBucket([b])])
    launcher.paused = True
    a.sum().backward()
    assert left == []
    launcher.paused = False
    launcher.rest()
    assert left == list(launcher.buckets)
    launcher.begin(launcher.buckets)
    launcher.watch(())
    a.sum().backward()
    assert len(left) == 2


def test_a_mean_is_stored_where_some_worker_has_a_gradient() -> None:
    own, others, nobodys = parameters(2, 2, 2)
    own.grad = torch.zeros(2)
    kept = own.grad
    GradientBucket([own, others, nobodys]).store(torch.arange(6.0), [True, True, False])
    assert kept is own.grad
    assert own.grad.tolist() == [0, 1]
    assert others.grad is not None
    assert others.grad.tolist() == [2, 3]
    assert nobodys.grad is None


def test_a_mean_is_as_sparse_as_the_gradient_was() -> None:
    own, others, dense = (nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    own.grad, dense.grad = torch.tensor([[0.0, 0], [1, 1]]).to_sparse(1), torch.ones(2, 2)
    GradientBucket([own, others, dense]).store(torch.tensor([0.0, 0, 3, 4] * 3), [SPARSE] * 3)
    assert own.grad.is_sparse
    assert others.grad is not None
    assert others.grad.is_sparse
    assert own.grad.indices().tolist() == others.grad.indices().tolist() == [[1]]
    assert dense.grad.tolist() == [[0, 0], [3, 4]]


@pytest.mark.parametrize("now", [torch.ones(7), torch.ones(3, dtype=torch.float64)], ids=lambda now: str(now.dtype))
def test_a_parameter_of_another_shape_or_type_is_refused(now: Tensor) -> None:
    """Before the backward, which would end in autograd's own error."""
    parameter = nn.Parameter(torch.ones(3))
    launcher = Launcher[GradientBucket](lambda bucket: None)
    launcher.watch([parameter])
    parameter.data = now
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\), torch.float32 became .*on every worker"):
        launcher.watch([parameter])
    launcher.watch(())
