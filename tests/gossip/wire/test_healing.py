"""A poisoned worker takes its neighbours' parameters, as often as it may; the others never hear what it held."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.gossip import (
    Combine,
    Complete,
    Every,
    ExactDiffusion,
    Exponential,
    Gossip,
    GradientTracking,
    OnePeerExponential,
    Outer,
    OuterNesterov,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RelaySum,
    Ring,
    Stream,
    Topology,
    Tree,
    simulate,
)
from lightning_decentral.gossip.compute.healing import Healing, first_poisoned, forget_poison
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.optim import AccumAdamW, Muon
from lightning_decentral.shared.compute.buckets import pack
from lightning_decentral.shared.wire.health import mean_of_sound
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.transport import Transport
from tests.gossip.rules import IRREGULAR
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


@pytest.mark.sampled
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


class Keeping(Gossip):
    """Somebody's own rule with a state."""

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"memory": torch.zeros_like(x)}


def test_a_rule_whose_sums_might_break_ends_by_name() -> None:
    def worker(transport: Transport) -> str:
        mixer = Mixer([Row(torch.ones(DIM))], Keeping(), exchange_of(transport, HOST, Ring()), 0)
        mixer.healing = Healing(3)
        if transport.rank == 1:
            mixer.buckets[0].flat[0] = torch.nan
        try:
            mixer.step()
        except FloatingPointError as error:
            return str(error)
        return ""

    assert "it keeps memory, which no neighbour could give; Gossip" in CPU.world(4, worker)[1]


RULES: list[tuple[Combine, Topology, int]] = [
    (QuasiGlobalMomentum(), Ring(), 1),
    (ExactDiffusion(), Ring(), 0),
    (ExactDiffusion(rate=0.2, memory=0.3), Ring(), 3),
    (GradientTracking(), Ring(), 0),
    (GradientTracking(rate=0.3), Ring(), 3),
    (GradientTracking(), OnePeerExponential(), 0),
    (GradientTracking(rate=0.3), Exponential(), 3),
    (PushSum(), IRREGULAR, 1),
    (PushSum(), IRREGULAR, 3),
    (Outer(), Every(2, Complete()), 1),
    (OuterNesterov(lr=0.5, momentum=0.3), Every(2, Ring()), 0),
    (PseudoGradient(lr=0.5, momentum=0.3), Every(2, Complete()), 0),
    (PseudoGradient(lr=0.5, momentum=0.3), Every(2, Complete()), 1),
    (RelaySum(), Tree(), 0),
    (RelaySum(), Tree(), 1),
]
STEPS, RATE = 70, 0.15


def trained(
    rule: Combine,
    topology: Topology,
    size: int,
    delay: int,
    bad: float,
    sick: set[int],
    build: Any,
    transport: Transport,
    device: torch.device = HOST,
) -> Any:
    """Worker i goes to the minimum at i; some are poisoned in step 5: (parameters, healed, state) at the end."""
    row = Row(torch.ones(DIM, dtype=torch.float64, device=device))
    exchange = build(transport, device, topology, **({"weights": rule.weights} if build is exchange_of else {}))
    mixer = Mixer([row], rule, exchange, delay)
    mixer.healing = Healing(3)
    for step in range(STEPS):
        row.flat.sub_(row.flat - transport.rank, alpha=RATE)
        if step == 5 and transport.rank in sick:
            row.flat[3] = bad
        mixer.step(RATE)
    x = row.flat.clone()
    mixer.drain()  # nobody leaves while another still hears it
    return x, mixer.healing.healed, mixer._states[0]


@pytest.mark.sampled
@pytest.mark.parametrize(("number", "plan"), [*enumerate(RULES)], ids=str)
def test_a_rule_with_a_state_goes_on_to_where_it_would_have_gone(
    number: int, plan: tuple[Combine, Topology, int]
) -> None:
    (rule, topology, delay), size = plan, 5
    bad = (float("nan"), -1e30)[number % 2]
    rows = CPU.world(size, partial(trained, rule, topology, size, delay, bad, {1}, exchange_of))
    ranks = torch.arange(size, dtype=torch.float64)[:, None]
    start = torch.ones(size, DIM, dtype=torch.float64)
    wanted = simulate(topology, rule, lambda x, step: x - ranks, start, STEPS, RATE, delay, every=STEPS)[-1]
    assert [healed for _, healed, _ in rows] == [0, 1, 0, 0, 0]
    # Under push-sum updates are a little larger or smaller from then on, as its docstring says.
    tolerance = 0.08 if isinstance(rule, PushSum) else 0.02
    torch.testing.assert_close(torch.stack([x for x, _, _ in rows]), wanted, rtol=0, atol=tolerance)
    check_what_lasts(rule, [state for _, _, state in rows])


def check_what_lasts(rule: Combine, states: list[dict[str, Tensor]]) -> None:
    of_all = {name: torch.stack([state[name] for state in states]) for name in rule.recovery.lasting}
    for name in {"corrections", "exchanged"}.intersection(of_all):  # what the optimum of all workers rests on
        torch.testing.assert_close(of_all[name].sum(0), torch.zeros(DIM, dtype=torch.float64))
    if "anchor" in of_all:
        torch.testing.assert_close(of_all["anchor"], of_all["anchor"][:1].expand(len(states), -1), rtol=0, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "topology", "delay", "sick", "build"),
    [
        (GradientTracking(), Complete(), 1, {1}, clique_exchange_of),
        (PseudoGradient(lr=0.5, momentum=0.3), Every(2, Complete()), 1, {0, 3}, clique_exchange_of),
        (PseudoGradient(lr=0.5, momentum=0.3), Every(2, Complete()), 1, {0, 3}, exchange_of),
        (GradientTracking(rate=0.3), Exponential(), 2, {1, 2}, exchange_of),
        (ExactDiffusion(), Ring(), 0, {1, 2}, exchange_of),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_sums_over_all_workers_keep_where_several_are_sick_or_all_reduce(
    rule: Combine, topology: Topology, delay: int, sick: set[int], build: Any
) -> None:
    rows = CPU.world(5, partial(trained, rule, topology, 5, delay, float("nan"), sick, build))
    assert [healed for _, healed, _ in rows] == [int(rank in sick) for rank in range(5)]
    check_what_lasts(rule, [state for _, _, state in rows])


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("sick", [0, 1, 4])
def test_sums_that_are_relayed_are_exact_after_a_healing(sick: int, delay: int) -> None:
    """An error in one of them would never fade."""

    def worker(transport: Transport) -> tuple[Tensor, Tensor]:
        rule, topology = RelaySum(), Tree()
        row = Row(torch.full((DIM,), float(transport.rank), dtype=torch.float64))
        mixer = Mixer([row], rule, exchange_of(transport, HOST, topology, rule.weights), delay)
        mixer.healing = Healing(1)
        for step in range(150):
            if step == 7 and transport.rank == sick:
                row.flat[3] = torch.nan
            mixer.step()
        mixer.drain()
        return row.flat, mixer._states[0]["sum"]

    for x, total in CPU.world(5, worker):
        torch.testing.assert_close(total, torch.cat((4 * x, torch.tensor([4.0], dtype=torch.float64))))


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
    # Beside an old count, moments from 0 would make the next steps too long.
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [0, 1]
    assert torch.equal(optimizer.state[weights[1]]["exp_avg"], kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_count_stays_where_all_that_was_poisoned_comes_from_the_neighbours() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"step": 7, "exp_avg": torch.full((2,), torch.nan)}
    forget_poison(optimizer, travelling=lambda: ["exp_avg"])
    assert optimizer.state[weight]["step"] == 7
    assert not optimizer.state[weight]["exp_avg"].any()


# ---- doors: where a round lands, and what else is poisoned -----------------------------------------------------------

POISONED, UPDATES = 5, 24
Door = Callable[[int, Mixers], None]


def no_door(step: int, mixers: Mixers) -> None:
    """It lands in a step."""


def save(every: int, step: int, mixers: Mixers) -> None:
    """What a checkpoint asks of it."""
    if step % every == 0:
        mixers.state_dict()


def drain(step: int, mixers: Mixers) -> None:
    if step == POISONED:
        mixers.settle()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.05),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.002, momentum=0.9),
    "accum": lambda weights: AccumAdamW(weights, lr=0.05, window=3),
    "muon": lambda weights: Muon(weights, lr=0.02),
}


def updated(
    rule: Combine, topology: Topology, delay: int, optimizer: str, bad: float, door: Door, transport: Transport,
    exact_steps: int = 0,
) -> tuple[Tensor, int]:  # fmt: skip
    """Worker 1's gradient is poisoned in one step: (its parameters after the last update, times healed)."""
    first, second = (nn.Parameter(torch.eye(3, dtype=torch.float64)) for _ in range(2))
    of = OPTIMIZERS[optimizer]([first, second])

    def made() -> list[Mixer]:
        each = [Mixer([], rule, exchange_of(transport, HOST, part, rule.weights), delay) for part in topology.fragments]
        for mixer in each:
            mixer.healing = Healing(3)
        return each

    world = partial(mean_of_sound, mean_of=partial(mean, over=transport), over=transport)
    mixers = Mixers(lambda: MixerFactory(made, pack, exact_steps=exact_steps, mean=world))
    mixers.adopt(of)
    for step in range(UPDATES):
        of.zero_grad()
        # Each matrix' gradient is of both: NaN in one of them comes back to the other.
        (first @ second - transport.rank).square().sum().backward()
        if step == POISONED and transport.rank == 1:
            assert first.grad is not None
            first.grad[0, 0] = bad
        of.step()
        mixers.step(of)
        door(step, mixers)
    x = torch.cat([p.detach().flatten() for p in (first, second)])
    mixers.settle()
    return x, mixers.traffic().healed


EVERY: list[tuple[Combine, Topology, int]] = [
    (Gossip(), Ring(), 1),
    (Gossip(rate=0.4), Ring(), 2),
    (Gossip(rate=0.4), Ring(), 3),
    (Gossip(), Every(3, Complete()), 3),
    *[plan for plan in RULES if plan[2] == 1],
]


@pytest.mark.sampled
@pytest.mark.parametrize(("number", "plan"), [*enumerate(EVERY)], ids=str)
def test_a_save_between_launch_and_landing_changes_nothing(number: int, plan: tuple[Combine, Topology, int]) -> None:
    """The worker is healed where it would have been, once, and its moments with it."""
    (rule, topology, delay), optimizer = plan, [*OPTIMIZERS][number % len(OPTIMIZERS)]
    run = partial(updated, rule, topology, delay, optimizer, (float("nan"), float("inf"))[number % 2])
    expected = CPU.world(5, partial(run, no_door))
    assert [healed for _, healed in expected] == [0, 1, 0, 0, 0]
    saved = CPU.world(5, partial(run, partial(save, 1 + number % 3)))
    assert [healed for _, healed in saved] == [0, 1, 0, 0, 0]
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(expected, saved, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize(("number", "plan"), [*enumerate(EVERY)], ids=str)
def test_what_lands_otherwise_heals_alike(number: int, plan: tuple[Combine, Topology, int]) -> None:
    (rule, topology, delay), optimizer = plan, [*OPTIMIZERS][number % len(OPTIMIZERS)]
    if isinstance(rule, RelaySum):
        topology = Tree()
    rows = CPU.world(5, partial(updated, rule, topology, delay, optimizer, float("nan"), drain))
    assert [healed for _, healed in rows] == [0, 1, 0, 0, 0]
    assert all(bool(x.isfinite().all()) for x, _ in rows)


@pytest.mark.parametrize("door", [no_door, partial(save, 1)])
@pytest.mark.parametrize(
    "plan", [(OuterNesterov(lr=0.5, momentum=0.3), Stream(4, 2, Complete()), 1), (Gossip(), Stream(6, 2, Ring()), 0)]
)
def test_a_fragment_that_was_healed_stays_so_until_the_others_are(
    plan: tuple[Combine, Topology, int], door: Door
) -> None:
    """One fault, though every gradient is of a model with NaN until the last fragment has talked."""
    rows = CPU.world(3, partial(updated, *plan, "adamw", float("nan"), door))
    assert [healed for _, healed in rows] == [0, 1, 0]
    assert all(bool(x.isfinite().all()) for x, _ in rows)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_exact_steps_leave_out_who_is_poisoned(bad: float) -> None:
    rows = CPU.world(3, partial(updated, Gossip(), Ring(), 1, "momentum", bad, no_door, exact_steps=10))
    assert [healed for _, healed in rows] == [0, 1, 0]
    assert all(bool(x.isfinite().all()) for x, _ in rows)


def test_exact_steps_of_nobody_sound_end_on_all() -> None:
    def worker(transport: Transport) -> None:
        flats = [torch.full((4,), torch.nan)]
        mean_of_sound(flats, partial(mean, over=transport), transport)

    with pytest.raises(FloatingPointError, match="none of the 3 workers has sound parameters"):
        CPU.world(3, worker)


def test_a_worker_that_was_saved_sick_is_healed_after_the_resume_as_without() -> None:
    def worker(resumed: bool, transport: Transport) -> tuple[Tensor, int]:
        row, plan = Row(torch.full((DIM,), float(transport.rank))), (Gossip(rate=0.4), Ring(), 3)

        def mixer() -> Mixer:
            made = Mixer([row], plan[0], exchange_of(transport, HOST, plan[1]), plan[2])
            made.healing = Healing(1)
            return made

        mixing = mixer()
        for step in range(16):
            if step == 4 and transport.rank == 1:
                row.flat[0] = torch.nan
            mixing.step()
            if resumed and step in (5, 8):  # refused already; healed, with refused messages still under way
                state, mixing = mixing.state_dict(), mixer()
                mixing.load_state_dict(state)
        mixing.drain()
        return row.flat.clone(), mixing.healing.healed

    expected, found = (CPU.world(4, partial(worker, resumed)) for resumed in (False, True))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(expected, found, strict=True))


def test_a_worker_that_cannot_be_healed_is_not_saved() -> None:
    def worker(transport: Transport) -> str:
        mixer = Mixer([Row(torch.ones(DIM))], Gossip(), exchange_of(transport, HOST, Ring()), 1)
        if transport.rank == 1:
            mixer.buckets[0].flat[0] = torch.nan
        mixer.step()
        try:
            mixer.state_dict()
        except FloatingPointError as error:
            return str(error)
        return ""

    assert [text[:40] for text in CPU.world(3, worker)] == ["", "worker 1: its parameters hold NaN or inf", ""]
