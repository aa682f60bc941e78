"""States that travel beside the parameters equal the recursion and the simulation; fragments are dealt out evenly."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_decentral.gossip import Every, Gossip, Hypercube, Int8, Own, Ring, Topology, Travel
from lightning_decentral.gossip.compute.travel import LACKING, UNKNOWN, agreed, kinds, pack_states
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.gossip.wire.simulation import LinkExchange, MatrixExchange
from lightning_decentral.optim import Muon
from lightning_decentral.shared.compute.buckets import Bucket, dealt, pack
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend
from tests.gossip.wire.test_exchange import gradient, start

STEPS, DIM, SIZE, MU = 9, 17, 4, 0.9
CPU = Backend("cpu", "cpu")


def whole_states(optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int]) -> list[Bucket]:
    """In buckets of the default size, in one part."""
    return pack_states(optimizer, name, chosen, None, 1)


@dataclass
class Rows:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds them."""


def mixers_of(transport: Transport, topology: Topology, travel: Travel, delay: int) -> Mixers:
    """A worker's, over one transport each, as a strategy makes them."""

    def mixer(topology: Topology, codec: Any, over: Transport) -> Mixer:
        exchange = PeerExchange(topology, Own(), over, torch.device("cpu"), codec)
        return Mixer([], travel.combine, overlapped(exchange, torch.device("cpu"), delay), delay)

    def everyone(row: list[int]) -> list[list[int]]:
        pending, rows = transport.all_gather(torch.tensor(row))
        pending.wait()
        return [row.tolist() for row in rows]

    plain = Travel().codec
    beside = partial(mixer, travel.along(topology), travel.codec, transport)
    # Parameters don't travel here: one transport carries one exchange.
    alone = partial(Mixer, [], Gossip(), MatrixExchange(Ring(), Own(), 1), delay)
    assert plain.encodes is False
    states = partial(StateMixer, name="momentum_buffer", mixer=beside(), pack=whole_states, everyone=everyone)
    return Mixers(lambda: MixerFactory(lambda: [alone()], pack, lambda optimizer: [states(optimizer)]))


def train(x0: Tensor, topology: Topology, travel: Travel, delay: int, transport: Transport) -> Tensor:
    """[steps, dim] of one worker's momentum."""
    rank = transport.rank
    parameter = nn.Parameter(x0[rank].clone())
    optimizer = SGD([parameter], lr=0.1, momentum=MU)
    mixers = mixers_of(transport, topology, travel, delay)
    mixers.adopt(optimizer)
    path = []
    for step in range(STEPS):
        rows = torch.zeros_like(x0)
        rows[rank] = parameter.detach()
        parameter.grad = gradient(rows, step)[rank]
        optimizer.step()
        mixers.step(optimizer)
        path.append(optimizer.state[parameter]["momentum_buffer"].clone())
        if step == 4:  # other tensors with the same values
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state[parameter] = {k: v.clone() for k, v in optimizer.state[parameter].items()}
    mixers.settle()
    return torch.stack(path)


@pytest.mark.threads
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("travel", [Travel(), Travel(every=2), Travel(codec=Int8(block=8), rate=0.5)], ids=str)
def test_a_state_on_the_wire_is_the_recursion(travel: Travel, delay: int) -> None:
    """m <- W (mu m + g) of what it was `delay` steps ago, by the mixer over all workers' rows and the optimizer's
    formula written out."""
    x0, topology = start(SIZE, DIM), Hypercube()
    kind = LinkExchange if travel.codec.encodes else MatrixExchange
    extra = (travel.codec,) if travel.codec.encodes else ()
    mixer = Mixer([], travel.combine, kind(travel.along(topology), Own(), SIZE, *extra), delay)
    x, m, expected = x0.clone(), Rows(torch.zeros_like(x0)), []
    for step in range(STEPS):
        m.flat.mul_(MU).add_(gradient(x, step))
        x = x - 0.1 * m.flat
        if not step:
            mixer.extend([m])
        mixer.step(0.1)
        expected.append(m.flat.clone())
    measured = torch.stack(CPU.world(SIZE, partial(train, x0, topology, travel, delay)), dim=1)
    torch.testing.assert_close(measured, torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.threads
def test_the_mean_of_a_state_is_kept_where_gradients_are_given() -> None:
    """With the same gradients everywhere in the parameters' place, mixed states have the mean of unmixed ones."""
    x0 = torch.zeros(SIZE, DIM, dtype=torch.float64)
    alone = Travel(every=STEPS + 1)
    mixed, unmixed = (
        torch.stack(CPU.world(SIZE, partial(constant, x0, travel))) for travel in (Travel(codec=Int8(block=8)), alone)
    )
    assert not torch.allclose(mixed, unmixed, atol=1e-3)
    torch.testing.assert_close(mixed.mean(0), unmixed.mean(0), rtol=1e-9, atol=1e-9)


def test_what_is_packed_is_packed_again_whatever_is_frozen() -> None:
    """A message in flight has the layout of its run: here of the second parameter, then of the first."""

    def made(frozen: bool = True) -> tuple[Optimizer, Mixers]:
        first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))
        first.requires_grad_(not frozen)
        optimizer = SGD([first, second], lr=0.1)
        alone = partial(Mixer, [], Gossip(), MatrixExchange(Ring(), Own(), 1), 1)
        return optimizer, Mixers(lambda: MixerFactory(lambda: [alone()], pack))

    def sizes(mixers: Mixers) -> list[int]:
        """Of the parameters, in the order in which they lie."""
        return [p.numel() for mixer in mixers for bucket in mixer.buckets for p in bucket.parameters]

    optimizer, mixers = made()
    mixers.adopt(optimizer)
    assert sizes(mixers) == [5]
    optimizer.param_groups[0]["params"][0].requires_grad_(True)
    mixers.adopt(optimizer)
    assert sizes(mixers) == [5, 3]
    state = mixers.state_dict()
    assert state["packs"] == [[[1], [0]]]
    optimizer, resumed = made()
    resumed.load_state_dict(state, [optimizer])
    assert sizes(resumed) == [5, 3]
    resumed.adopt(optimizer)
    assert sizes(resumed) == [5, 3]
    # As 0.2 saved it: how many.
    optimizer, mixers = made(frozen=False)
    mixers.adopt(optimizer)
    optimizer, resumed = made()
    resumed.load_state_dict({**mixers.state_dict(), "packs": [[2]]}, [optimizer])
    assert sizes(resumed) == [3, 5]


def constant(x0: Tensor, travel: Travel, transport: Transport) -> Tensor:
    """The momentum after some steps with a gradient that is the worker's own and doesn't depend on x."""
    parameter = nn.Parameter(x0[transport.rank].clone())
    optimizer = SGD([parameter], lr=0.1, momentum=MU)
    mixers = mixers_of(transport, Hypercube(), travel, 0)
    for step in range(5):
        parameter.grad = torch.sin(torch.arange(DIM, dtype=torch.float64) * (1 + transport.rank) + step)
        optimizer.step()
        mixers.step(optimizer)
    return optimizer.state[parameter]["momentum_buffer"].clone()


@pytest.mark.parametrize(("make", "said"), [
    (lambda p: SGD(p, lr=0.1), "SGD has no state 'momentum_buffer' that could be mixed: leave it out of states"),
    (lambda p: torch.optim.AdamW(p), "AdamW has no state 'momentum_buffer' that could be mixed: name one of exp_avg, "),
], ids=["SGD", "AdamW"])  # fmt: skip
def test_a_state_that_an_optimizer_lacks_is_one_line(make: Any, said: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer: Optimizer = make([parameter])
    alone = Mixer([], Gossip(), MatrixExchange(Ring(), Own(), 1), 1)
    state = StateMixer(optimizer, "momentum_buffer", alone, whole_states, lambda row: [row])
    parameter.grad = torch.ones(3)
    state.adopt({parameter})  # no update: a loss scaler has skipped it
    optimizer.step()
    with pytest.raises(ValueError, match=said) as raised:
        state.adopt({parameter})
    assert "\n" not in str(raised.value)


def test_a_state_of_another_shape_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match=r"state 'step' has the shape \(\) for a parameter of shape \(3,\)"):
        kinds(optimizer, "step", [parameter], stepped=True)


def test_of_muon_the_hidden_matrices_have_the_momentum() -> None:
    matrix, vector = nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "hidden": False}])
    assert kinds(optimizer, "momentum_buffer", [matrix, vector], stepped=False) == [UNKNOWN, UNKNOWN]
    for parameter in (matrix, vector):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert kinds(optimizer, "momentum_buffer", [matrix, vector], stepped=True) == [2, LACKING]


def test_workers_agree_on_whose_state_travels() -> None:
    """One used the first expert and the other the second, neither the third; a group without such a state; one that
    nobody has updated."""
    rows = [[2, UNKNOWN, UNKNOWN, LACKING, UNKNOWN], [UNKNOWN, 2, UNKNOWN, UNKNOWN, UNKNOWN]]
    assert agreed(rows, [0, 0, 0, 1, 2]) == [2, 2, 2, LACKING, UNKNOWN]


def experts(skipped: bool, transport: Transport) -> list[float]:
    """Momenta of two experts after two steps; worker 0 uses the first in the first step, worker 1 the second or, where
    its loss scaler skips it, none."""
    pair = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = SGD(pair, lr=0.1, momentum=0.5)
    mixers = mixers_of(transport, Hypercube(), Travel(), 0)
    mixers.adopt(optimizer)
    for step in range(2):
        for place, parameter in enumerate(pair):
            used = step == 1 or place == transport.rank
            parameter.grad = torch.full((1,), (1.0, -100.0)[place]) if used else None
        if step or not (skipped and transport.rank):
            optimizer.step()
        mixers.step(optimizer)
    mixers.settle()
    return [float(optimizer.state[parameter]["momentum_buffer"]) for parameter in pair]


@pytest.mark.threads
@pytest.mark.parametrize(("skipped", "expected"), [(False, (1.125, -112.5)), (True, (1.125, -100.0))])
def test_a_state_is_mixed_with_the_same_parameters_state(skipped: bool, expected: tuple[float, float]) -> None:
    """After the first round each has half of what one had, as another's zero; who has none begins with its gradient."""
    for first, second in CPU.world(2, partial(experts, skipped)):
        assert (first, second) == pytest.approx(expected)


@pytest.mark.parametrize(("travel", "topology", "delay", "said"), [
    (Travel(), Ring(), 3, "doesn't contract"), (Travel(every=3), Ring(), 3, None), (Travel(rate=0.3), Ring(), 2, None),
    (Travel(every=2), Every(2, Ring()), 4, None),
], ids=str)  # fmt: skip
def test_a_state_travels_where_mixing_it_is_stable(
    travel: Travel, topology: Topology, delay: int, said: str | None
) -> None:
    if said is None:
        travel.check(topology, 4, Own(), delay)
    else:
        with pytest.raises(ValueError, match=said):
            travel.check(topology, 4, Own(), delay)


@pytest.mark.parametrize("hands", [1, 2, 3, 5])
def test_parameters_are_dealt_out_evenly_and_stay_where_they_are(hands: int) -> None:
    sizes = [64, 8, 8, 8, 32, 8, 8, 8, 32, 8, 8, 8]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    found = dealt(parameters, hands)
    assert sorted(map(id, parameters)) == sorted(id(p) for hand in found for p in hand)
    held = [sum(p.numel() for p in hand) for hand in found]
    assert max(held) - min(held) <= 64
    before = dealt(parameters[:5], hands)  # what is added later moves nothing
    assert [[id(p) for p in hand] for hand in before] == [
        [id(p) for p in hand if any(p is q for q in parameters[:5])] for hand in found
    ]
