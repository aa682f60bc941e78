"""Who stays out of the mean model: the mean of the others is exact, and bit-equal to before where all are sound."""

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.wire.health import ailing, constants, mean_of_others, none_sound
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend

pytestmark = pytest.mark.threads

CPU = Backend("cpu", "cpu")
NAN, INF = float("nan"), float("inf")


def replica(rank: int) -> list[Tensor]:
    weight, variance = torch.full((3, 2), 1.0 + rank), torch.full((2,), 100.0**rank)
    return [weight, variance, torch.tensor(7), torch.tensor([0.0, -INF]), torch.empty(0)]


def averaged(bad: float, place: int, sick: tuple[int, ...], share: tuple[float, ...] | None, over: Transport) -> object:
    tensors = replica(over.rank)
    if over.rank in sick:
        tensors[place].view(-1)[1] = bad
    found = ailing(tensors, over)
    of_all = partial(mean, over=over, share=share[over.rank] if share else None)
    return {k: (a.tensor, str(a)) for k, a in found.items()}, mean_of_others(tensors, of_all, over.rank in found)


@pytest.mark.parametrize("share", [None, (0.1, 0.2, 0.3, 0.4)], ids=["equal", "shares"])
@pytest.mark.parametrize("sick", [(1,), (0, 3)], ids=str)
@pytest.mark.parametrize(("bad", "place"), [(NAN, 0), (INF, 1), (-INF, 0), (1e30, 0), (-1e30, 1), (NAN, 3)], ids=str)
def test_the_mean_is_that_of_the_sound(
    bad: float, place: int, sick: tuple[int, ...], share: tuple[float, ...] | None
) -> None:
    sound = [rank for rank in range(4) if rank not in sick]
    weights = torch.tensor(share or (0.25,) * 4)[sound]
    expected = [sum(w * replica(r)[k] for w, r in zip(weights, sound, strict=True)) / weights.sum() for k in (0, 1)]
    for found, (weight, variance, counter, mask, empty) in CPU.world(4, partial(averaged, bad, place, sick, share)):
        assert {k: tensor for k, (tensor, _) in found.items()} == dict.fromkeys(sick, place)
        torch.testing.assert_close(weight, expected[0])
        torch.testing.assert_close(variance, expected[1])
        assert (counter.item(), mask.tolist(), empty.numel()) == (7, [0.0, -INF], 0)


def nobody_ails(over: Transport) -> dict[int, object]:
    return dict(ailing([*replica(over.rank), torch.full((2,), -INF), torch.tensor(INF)], over))


def test_honest_workers_are_left_in() -> None:
    """Large variances, counters, empty tensors, masks of -inf and a best score of inf are no ailment."""
    assert CPU.world(4, nobody_ails) == [{}] * 4


def changed(over: Transport) -> list[dict[int, int]]:
    """Who is sick, by which tensor: at first; where each has filled another part; where worker 1 has NaN elsewhere; and
    where it has NaN in the place of an infinity."""
    edges, queue = torch.tensor([-INF, 0.0, INF]), torch.full((4, 2), INF)
    placeholder = torch.tensor([NAN, 1.0])
    known = constants([torch.ones(2), torch.tensor(3), edges, placeholder, queue]).values()

    def sick() -> dict[int, int]:
        return {k: a.tensor for k, a in ailing([edges, placeholder, queue], over, known=known).items()}

    found = [sick()]
    queue[: over.rank + 1], placeholder[1] = 2.0, over.rank
    found.append(sick())
    for place, value in ((1, NAN), (2, NAN)):
        if over.rank == 1:
            edges[place] = value
        found.append(sick())
        edges[1] = 0.0
    return found


def test_what_was_not_finite_before_makes_nobody_sick_and_may_fill_up() -> None:
    """Edges of bins, bounds, a placeholder for what is not known yet, a queue."""
    assert CPU.world(3, changed) == [[{}, {}, {1: 0}, {1: 0}]] * 3


def islands(over: Transport) -> set[int]:
    tensors = replica(over.rank)
    if over.rank == 2:
        tensors[0][0, 0] = NAN
    return set(ailing(tensors, over, devices=2))


def test_a_worker_ails_as_a_whole() -> None:
    """Of two islands of two devices the second has NaN on one of its devices."""
    assert CPU.world(4, islands) == [{1}] * 4


def test_a_mean_of_nobody_is_refused_in_one_line() -> None:
    def all_ail(over: Transport) -> tuple[str, str]:
        found = ailing([torch.full((2,), NAN)], over)
        names = ["weight"].__getitem__
        return none_sound(found, over.size, names), none_sound(dict(list(found.items())[1:]), over.size, names)

    for said, of_one_less in CPU.world(2, all_ail):
        assert said.startswith("none of the 2 workers has a sound model (weight of worker 0 holds NaN)")
        assert "\n" not in said
        assert of_one_less == ""
