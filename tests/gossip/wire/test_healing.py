"""A poisoned worker takes its neighbours' parameters, as often as it may; the others never hear what it held."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import Complete, Gossip, PushSum, Ring
from lightning_decentral.gossip.compute.healing import Healing, first_poisoned, forget_poison
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.wire.transport import Transport
from tests.gossip.wire.test_exchange import CPU, DIM, Row, clique_exchange_of, exchange_of

HOST = torch.device("cpu")
SIZE = 3
pytestmark = [
    pytest.mark.threads,
    pytest.mark.filterwarnings("ignore:worker ."),
]


def poisoned(
    bad: float, delay: int, build: Any, often: int, most: int, transport: Transport
) -> tuple[Tensor, int, str]:
    """Worker 1 is poisoned `often` times, some steps apart: (parameters, times healed, error)."""
    exchange = build(transport, HOST, topology=Complete(), delay=delay)
    row = Row(torch.full((DIM,), float(transport.rank)))
    mixer = Mixer([row], Gossip(rate=0.4 if delay > 1 else 1.0), exchange, delay)
    mixer.healing = Healing(most)
    try:
        for step in range(8 * often + 8):
            if transport.rank == 1 and step % 8 == 3 and step < 8 * often:
                row.flat[3] = bad
            mixer.step()
        mixer.drain()
    except FloatingPointError as error:
        return row.flat, mixer.healing.healed, str(error)
    return row.flat, mixer.healing.healed, ""


@pytest.mark.parametrize("build", [exchange_of, clique_exchange_of])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, -1e30])
def test_the_sick_worker_goes_on_with_its_neighbours_parameters(bad: float, delay: int, build: Any) -> None:
    rows = CPU.world(SIZE, partial(poisoned, bad, delay, build, 1, 3))
    for x, healed, error in rows:
        assert error == ""
        assert 0 <= float(x.min()) <= float(x.max()) <= SIZE - 1
        assert healed == 0 or x is rows[1][0]
    assert 1 <= rows[1][1] <= 3


def test_it_is_healed_as_often_as_is_allowed_and_then_ends() -> None:
    first, second, _ = CPU.world(SIZE, partial(survive, 3, 2))
    assert second[1] == 2
    assert second[2].startswith("worker 1: its parameters hold NaN or infinity")
    assert "healed 2 times, as often as `heals` allows" in second[2]
    assert bool(first[0].isfinite().all())


def survive(often: int, most: int, transport: Transport) -> tuple[Tensor, int, str]:
    try:
        return poisoned(float("nan"), 0, exchange_of, often, most, transport)
    except (RuntimeError, ConnectionError):  # the others lose it where it ends
        return torch.zeros(1), 0, "lost"


def test_a_rule_that_keeps_something_ends_by_name() -> None:
    def worker(transport: Transport) -> str:
        mixer = Mixer([Row(torch.ones(DIM))], PushSum(), exchange_of(transport, HOST, Ring()), 0)
        mixer.healing = Healing(3)
        if transport.rank == 1:
            mixer.buckets[0].flat[0] = torch.nan
        try:
            mixer.step()
        except FloatingPointError as error:
            return str(error)
        return ""

    assert "can't heal: Gossip() can" in CPU.world(SIZE, worker)[1]


def test_what_was_poisoned_is_said() -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, torch.nan]), "c": torch.tensor([torch.inf])}
    assert first_poisoned(tensors.items()) == "b holds NaN"
    assert first_poisoned([("a", torch.ones(3)), ("c", tensors["c"])]) == "c holds infinity"
    assert first_poisoned([("a", torch.ones(3)), ("d", torch.tensor([-1e30]))]) == "d holds 1e+30"


def test_moments_begin_anew_where_they_are_poisoned() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam(weights)
    weights[0].grad, weights[1].grad = torch.tensor([1.0, torch.nan]), torch.ones(2)
    optimizer.step()
    kept = optimizer.state[weights[1]]["exp_avg"].clone()
    forget_poison(optimizer)
    assert optimizer.state[weights[0]]["exp_avg"].tolist() == [0, 0]
    assert torch.equal(optimizer.state[weights[1]]["exp_avg"], kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
