"""LAW with codecs: the wire equals the simulation, the mean is kept, what is compressed converges to what is not."""

import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    BFloat16,
    Codec,
    Complete,
    DifferenceCompression,
    Every,
    Float16,
    Gossip,
    Hypercube,
    Int8,
    OnePeerExponential,
    Own,
    Plain,
    RandomMatching,
    Ring,
    Star,
    State,
    TopK,
    Topology,
    Torus,
    Turn,
    simulate,
)
from lightning_decentral.gossip.compute.combine.combine import MessageForm
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.plan.topology.topology import audiences
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.exchange import Exchange, Traffic
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import OverlapExchange, overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.gossip.wire.simulation import LinkExchange
from lightning_decentral.shared.compute.buckets import is_short
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend, everywhere
from tests.gossip.codecs import usable
from tests.gossip.topologies import every_topology
from tests.gossip.wire.test_device import Mirror
from tests.gossip.wire.test_exchange import Row, gradient

pytestmark = pytest.mark.threads

CPU = Backend("cpu", "cpu")
STEPS = 7
DIM = 50


def start(size: int, dim: int = DIM) -> Tensor:
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def mixer_of(
    transport: Transport, device: torch.device, topology: Topology, codec: Codec, flat: Tensor, delay: int, rule: Any
) -> Mixer:
    exchange = overlapped(PeerExchange(topology, Own(), transport, device, codec), device, delay)
    mixer = Mixer([], rule, exchange, delay)
    mixer.extend([Row(flat)])
    return mixer


def descend(
    backend: Backend, x0: Tensor, delay: int, rate: float, topology: Topology, codecs: list[Codec], transport: Transport
) -> Tensor:
    """One worker's trajectories [codecs, steps + 1, dim], one codec after the other."""
    rank, device = transport.rank, backend.device(transport.rank)
    trajectories = []
    for codec in codecs:
        x = x0[rank].to(device).clone()
        mixer = mixer_of(transport, device, topology, codec, x, delay, Gossip(rate=rate))
        trajectory = [x0[rank].clone()]
        for step in range(STEPS):
            rows = torch.zeros_like(x0)
            rows[rank] = trajectory[-1]
            x.sub_(0.1 * gradient(rows, step)[rank].to(device))
            mixer.step()
            trajectory.append(x.cpu().clone())
        mixer.drain()
        trajectories.append(torch.stack(trajectory))
    return torch.stack(trajectories)


# Sizes and delays are dealt out in turn: every topology and codec, an even and an odd size, every delay.
SERVED = [list(of) for _, of in groupby(every_topology(range(4, 6), most_fragments=1), lambda case: case[0])]
CASES = [(*of[turn % len(of)], (1, 0, 3)[turn % 3]) for turn, of in enumerate(SERVED)]


@pytest.mark.sampled
@everywhere("topology,size,delay", CASES, lambda topology, *_: type(topology) in (Ring, OnePeerExponential))
def test_wire_equals_simulation(backend: Backend, topology: Topology, size: int, delay: int) -> None:
    x0, rate = start(size), 0.4
    measured = torch.stack(
        backend.world(size, partial(descend, backend, x0, delay, rate, topology, usable()), seconds=60), dim=2
    )
    for codec, trajectory in zip(usable(), measured, strict=True):
        expected = simulate(topology, Gossip(rate=rate), gradient, x0, STEPS, 0.1, delay, codec=codec)
        torch.testing.assert_close(trajectory, expected, rtol=1e-11, atol=1e-11, msg=lambda m, c=codec: f"{c}: {m}")


def in_three(delay: int, codecs: list[Codec], aside: bool, transport: Transport) -> Tensor:
    """One worker's trajectories in three buckets of which the last is short; beside the training or within it."""
    x0, device = start(transport.size), torch.device("cpu")
    assert is_short(3, 50), "rounds wouldn't overlap"
    trajectories = []
    for codec in codecs:
        exchange: Exchange = PeerExchange(Hypercube(), Own(), transport, device, codec)
        exchange = overlapped(exchange, device, delay) if aside else exchange
        assert isinstance(exchange, OverlapExchange) == aside
        mixer = Mixer([], Gossip(rate=0.4), exchange, delay)
        buckets = [Row(part.clone()) for part in x0[transport.rank].split([24, 23, 3])]
        mixer.extend(buckets)
        trajectory = []
        for step in range(STEPS):
            for bucket in buckets:
                bucket.flat.mul_(0.9).add_(0.1 * (transport.rank + step))
            mixer.step()
            trajectory.append(torch.cat([bucket.flat for bucket in buckets]))
        mixer.drain()
        trajectories.append(torch.stack(trajectory))
    return torch.stack(trajectories)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [1, 2])
def test_rounds_that_overlap_give_the_bits_of_those_that_do_not(delay: int) -> None:
    """Estimates and noise are the same, whichever thread makes them and whenever a bucket leaves."""
    codecs = [Plain(), *usable()]
    within, aside = (CPU.world(4, partial(in_three, delay, codecs, side), seconds=60) for side in (False, True))
    for one, other in zip(within, aside, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(within[0], within[1])


# Of each topology the smallest size and the two largest, mostly an odd and an even one.
EDGES = [list(of) for _, of in groupby(every_topology(range(2, 7), most_fragments=1), lambda case: case[0])]
FEW = [case for of in EDGES for case in dict.fromkeys([of[0], *of[-2:]])]


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "size"), FEW, ids=str)
def test_the_mean_is_kept_by_every_codec(topology: Topology, size: int) -> None:
    x0 = start(size)
    for codec in usable():
        path = simulate(topology, Gossip(rate=0.3), still, x0, STEPS, 0.1, codec=codec)
        torch.testing.assert_close(path.mean(1), x0.mean(0).expand(STEPS + 1, DIM), rtol=1e-12, atol=1e-12)
        if size > 2:
            assert not torch.equal(path[-1], x0), "nothing was mixed: the test could not fail"


def choco(x0: Tensor, topology: Topology, rate: float, steps: int) -> Tensor:
    """CHOCO-Gossip in matrix form (1902.00340, algorithm 1), top 5: xh += Q(x - xh);  x += rate (W - I) xh."""
    matrix = torch.from_numpy(mixing_matrix(topology, len(x0), 0))
    x, estimate = x0.clone(), x0[0].expand_as(x0).clone()
    path = [x0]
    for _ in range(steps):
        difference = x - estimate
        for row in difference:
            keep = row.abs().topk(5).indices
            mask = torch.zeros_like(row).index_fill_(0, keep, 1.0)
            row.mul_(mask)
        estimate = estimate + difference
        x = x + rate * (matrix @ estimate - estimate)
        path.append(x)
    return torch.stack(path)


@pytest.mark.sampled
@pytest.mark.parametrize("topology", [Ring(), Torus(), Complete(), Star()], ids=str)
def test_on_a_constant_graph_differences_are_choco(topology: Topology) -> None:
    codec, x0 = DifferenceCompression(TopK(fraction=0.1, block=DIM)), start(6)
    expected = choco(x0, topology, 0.2, 40)
    measured = simulate(topology, Gossip(rate=0.2), still, x0, 40, 0.1, 0, codec=codec)
    torch.testing.assert_close(measured, expected, rtol=1e-10, atol=1e-10)


def test_audiences_are_targets_that_always_hear_together() -> None:
    assert set(audiences(Ring(), 0, 6).values()) == {0}
    assert audiences(Hypercube(), 0, 8) == {1: 0, 2: 1, 4: 2}
    assert len(set(audiences(RandomMatching(), 0, 5).values())) == 4
    assert audiences(Every(5, OnePeerExponential()), 3, 8) == {4: 0, 5: 1, 7: 2}


class Counting(Mirror):
    """Counts the bytes that set-up sends."""

    broadcast_bytes = 0

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        self.broadcast_bytes += tensor.numel() * tensor.element_size()
        return super().broadcast(tensor, source)


@pytest.mark.parametrize(("codec", "copies"), [
    (Plain(), 0), (Int8(), 0), (DifferenceCompression(Int8()), 1),
], ids=str)  # fmt: skip
def test_only_estimates_have_to_start_equal(codec: Codec, copies: int) -> None:
    transport = Counting()
    mixer_of(transport, torch.device("cpu"), Complete(), codec, torch.zeros(DIM), 1, Gossip())
    assert transport.broadcast_bytes == copies * 4 * DIM


CONTRACTING: list[tuple[Codec, float]] = [
    (DifferenceCompression(Int8(block=16)), 1.0),
    (DifferenceCompression(TopK(fraction=0.2, block=DIM)), 0.3),
    (DifferenceCompression(BFloat16()), 1.0),
]
CHANGING = [Ring(), Hypercube(), OnePeerExponential(), RandomMatching(rounds=8), Every(2, Hypercube())]


def still(x: Tensor, step: int) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.thorough
@pytest.mark.parametrize(("turn", "topology"), enumerate(CHANGING), ids=str)
@pytest.mark.parametrize(("place", "codec", "rate"), [(i, *pair) for i, pair in enumerate(CONTRACTING)], ids=str)
def test_compressed_mixing_ends_at_the_exact_mean(
    codec: Codec, rate: float, topology: Topology, turn: int, place: int
) -> None:
    """Far below where rounding alone stays for ever; a codec that needs a low rate needs more steps."""
    x0, steps, delay = start(4), 100 if rate == 1 else 400, (turn + place) % 2
    path = simulate(topology, Gossip(rate=rate), still, x0, steps, 0.1, delay, codec=codec)
    floor = rounded(topology, delay)
    assert 1e-3 < floor < 0.1
    assert float((path[-1] - x0.mean(0)).abs().max()) < 0.01 * floor


@cache
def rounded(topology: Topology, delay: int) -> float:
    """How far from the mean workers stay whose messages are rounded as they are."""
    x0 = start(4)
    path = simulate(topology, Gossip(), still, x0, 30, 0.1, delay, codec=Int8(block=16))
    return float((path[-1] - x0.mean(0)).abs().max())


@cache
def trained(topology: Topology, codec: Codec, rate: float) -> tuple[Tensor, Tensor]:
    """(mean of the workers at the end, minimum): other minima and curvatures on each, step sizes that fall."""
    size, steps = 4, 500
    centre = 3 * start(size)
    curvature = 1 + torch.rand(size, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def falling(x: Tensor, step: int) -> Tensor:
        return curvature * (x - centre) / (1 + step / 5)

    x0 = torch.zeros_like(centre)
    path = simulate(topology, Gossip(rate=rate), falling, x0, steps, 0.3, codec=codec)
    return path[-1].mean(0), (curvature * centre).sum(0) / curvature.sum()


TRAINED = [*CONTRACTING, (Int8(block=16), 1.0), (BFloat16(), 1.0)]
# Every codec on every second graph, every graph with every second codec.
DEALT = [(*pair, t) for i, pair in enumerate(TRAINED) for turn, t in enumerate(CHANGING) if (i + turn) % 2]


@pytest.mark.thorough
@pytest.mark.parametrize(("codec", "rate", "topology"), DEALT, ids=str)
def test_compressed_training_converges_to_the_uncompressed_solution(
    codec: Codec, rate: float, topology: Topology
) -> None:
    compressed, minimum = trained(topology, codec, rate)
    plain, _ = trained(topology, Plain(), rate)
    assert float((compressed - minimum).norm()) < 0.02 * float(minimum.norm())
    assert float((compressed - plain).norm()) < 0.01 * float(minimum.norm())


def count(codec: Codec, topology: Topology, transport: Transport) -> tuple[Traffic, int]:
    mixer = mixer_of(transport, torch.device("cpu"), topology, codec, torch.zeros(DIM), 1, Gossip(rate=0.4))
    for _ in range(STEPS):
        mixer.step()
    mixer.drain()
    return mixer.traffic(), mixer.exchange.coder.bytes


@pytest.mark.sampled
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_bytes_are_counted_by_the_formula(codec: Codec) -> None:
    """Ring: two neighbours hear the payload and a header of three numbers in every round; hypercube: one."""
    expected = codec.bytes(DIM, torch.float32)
    for topology, targets in ((Ring(), 2), (Hypercube(), 1)):
        for traffic, message_bytes in CPU.world(4, partial(count, codec, topology)):
            assert message_bytes == expected
            assert (traffic.bytes_sent, traffic.rounds) == (STEPS * targets * (expected + 24), STEPS)


def poisoned(bad: float, codec: Codec, transport: Transport) -> tuple[Tensor, int, str, list[Tensor]]:
    """Worker 1 sends one bad element in the second round: (parameters, refused, error, estimates of worker 1)."""
    x = torch.linspace(-1, 1, DIM) * (transport.rank + 1)
    mixer = mixer_of(transport, torch.device("cpu"), Complete(), codec, x, 0, Gossip(rate=0.4))
    mixer.step()
    before = estimates(mixer, 1)
    if transport.rank == 1:
        x[33] = bad
    try:
        mixer.step()
    except FloatingPointError as error:
        return x, mixer.exchange.traffic().refused, str(error), []
    changed = [b for a, b in zip(before, estimates(mixer, 1), strict=True) if not torch.equal(a, b)]
    return x, mixer.exchange.traffic().refused, "", changed


def estimates(mixer: Mixer, source: int) -> list[Tensor]:
    channels = mixer.exchange.coder.state_dict()["estimates"]
    return [e.clone() for channel in channels for link, e in channel.items() if link == f"from {source}"]


@pytest.mark.filterwarnings("ignore:worker . refused")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_a_message_that_is_not_finite_never_enters_a_healthy_worker(codec: Codec, bad: float) -> None:
    """Nor its estimate of the sender; small integers hide nothing, and the sender's own error names it."""
    first, second, third = CPU.world(3, partial(poisoned, bad, codec))
    for x, refused, error, changed in (first, third):
        assert bool(torch.isfinite(x).all())
        assert (refused, error, changed) == (1, "", [])
    assert second[2].startswith("worker 1: its parameters hold NaN or infinity, or more than")


@pytest.mark.filterwarnings("ignore:worker . refused")
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_an_absurd_message_never_enters_a_healthy_worker(codec: Codec) -> None:
    """Nor its estimate of the sender."""
    first, second, third = CPU.world(3, partial(poisoned, 1e30, codec))
    for x, refused, error, changed in (first, third):
        assert float(x.abs().max()) <= 3
        assert (refused, error, changed) == (1, "", [])
    assert second[2].startswith("worker 1: its parameters hold")


def healed(bad: float, topology: Topology, codec: Codec, delay: int, transport: Transport) -> tuple[Tensor, int, Any]:
    """Worker 1 is poisoned and healed, then all go on: (parameters, times healed, estimates) at the end."""
    x = torch.linspace(-1, 1, DIM) * (transport.rank + 1)
    mixer = mixer_of(transport, torch.device("cpu"), topology, codec, x, delay, Gossip(rate=0.3))
    mixer.healing = Healing(3)
    for step in range(40):
        if step == 5 and transport.rank == 1:
            x[33] = bad
        mixer.step()
    mixer.drain()
    return x, mixer.healing.healed, mixer.exchange.coder.state_dict()["estimates"]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:worker .")
@pytest.mark.parametrize(("bad", "delay"), [(float("nan"), 2), (1e30, 0)])
@pytest.mark.parametrize("codec", [c for c in usable() if c.remembers], ids=str)
def test_both_ends_of_a_link_agree_after_a_refused_message(codec: Codec, delay: int, bad: float) -> None:
    rows = CPU.world(3, partial(healed, bad, Complete(), codec, delay))
    assert [times for _, times, _ in rows] == [0, 1, 0]
    for x, _, buckets in rows:
        assert float((x - rows[0][0]).abs().max()) < 0.3  # they were 1 to 2 apart
        for place, links in enumerate(buckets):
            for link, estimate in links.items():
                assert bool(estimate.isfinite().all())
                direction, _, other = link.partition(" ")
                if direction == "from":  # of its one audience
                    torch.testing.assert_close(estimate, rows[int(other)][2][place]["to 0"], rtol=0, atol=0)


def overflow(transport: Transport) -> str:
    x = torch.full((DIM,), 70_000.0)
    mixer = mixer_of(transport, torch.device("cpu"), Ring(), Float16(), x, 0, Gossip())
    try:
        mixer.step()
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:worker . refused")
def test_what_a_codec_cannot_express_is_said() -> None:
    assert all("or more than Float16() can express, in round 0" in error for error in CPU.world(2, overflow))


@dataclass(frozen=True)
class Counted(Gossip):
    """Gossip whose message ends with a number that must arrive as it is, as push-sum's weight."""

    @property
    def form(self) -> MessageForm:
        return MessageForm(exact=1)

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat([x, x.new_full((*x.shape[:-1], 1), 1 / 3)], dim=-1)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        third = mixed.new_full((), 1 / 3)
        torch.testing.assert_close(sent[..., -1], third.expand(sent.shape[:-1]), rtol=0, atol=0)
        torch.testing.assert_close(mixed[..., -1], third.expand(sent.shape[:-1]), rtol=1e-15, atol=0)
        super().apply(x, sent[..., :-1].contiguous(), mixed[..., :-1].contiguous(), state, turn)


def counted(codec: Codec, transport: Transport) -> int:
    x = start(3)[transport.rank].clone()
    mixer = mixer_of(transport, torch.device("cpu"), Ring(), codec, x, 1, Counted(rate=0.4))
    for _ in range(4):
        mixer.step()
    mixer.drain()
    return mixer.exchange.coder.bytes


@pytest.mark.parametrize("codec", usable(), ids=str)
def test_an_exact_tail_is_not_encoded(codec: Codec) -> None:
    expected = codec.bytes(DIM, torch.float64) + 8
    assert CPU.world(3, partial(counted, codec)) == [expected] * 3
    zeros = torch.zeros(3, DIM, dtype=torch.float64)
    simulate(Ring(), Counted(rate=0.4), gradient, zeros, 4, 0.1, codec=codec)


def measured_error(codec: Codec, rate: float, transport: Transport) -> tuple[float | None, float]:
    """(as the exchange says, recomputed): of the last of five rounds, on a ring of workers that stand still."""
    x = start(3)[transport.rank].clone()
    mixer = mixer_of(transport, x.device, Ring(), codec, x, 0, Gossip(rate=rate))
    for _ in range(4):
        mixer.step()
    before = x.clone()
    known = [e.clone() for c in estimates_of(mixer) for link, e in c.items() if link == "to 0"]
    mixer.step()
    after = [e for c in estimates_of(mixer) for link, e in c.items() if link == "to 0"]
    decoded = after[0]
    return mixer.exchange.coder.lost.value(), float((before - decoded).norm() / (before - known[0]).norm())


def estimates_of(mixer: Mixer) -> list[dict[str, Tensor]]:
    return mixer.exchange.coder.state_dict()["estimates"]


@pytest.mark.parametrize(("codec", "rate"), CONTRACTING, ids=str)
def test_the_error_is_measured(codec: Codec, rate: float) -> None:
    for measured, recomputed in CPU.world(3, partial(measured_error, codec, rate)):
        assert measured == pytest.approx(recomputed, rel=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(("codec", "rate", "warned"), [
    (DifferenceCompression(TopK(fraction=0.1)), 1.0, True),
    (DifferenceCompression(TopK(fraction=0.1)), 0.2, False),
    (DifferenceCompression(Int8()), 1.0, False),
    (Int8(), 1.0, False),
])  # fmt: skip
def test_a_rate_that_is_too_large_for_a_codec_is_said_once(codec: Codec, rate: float, warned: bool) -> None:
    """Where it is said, the workers do drift apart; where not, they don't."""
    x0 = start(8, 256)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = simulate(Ring(), Gossip(rate=rate), still, x0, 150, 0.1, codec=codec)
    texts = [str(w.message) for w in caught if "may diverge" in str(w.message)]
    spread = [float((x - x.mean(0)).norm()) for x in (path[0], path[-1])]
    assert len(texts) == warned
    assert (spread[1] > 1.5 * spread[0]) == warned


def complex_worker(codec: Codec, transport: Transport) -> Tensor:
    x = torch.complex(start(4)[transport.rank][:20], start(4)[transport.rank][20:40])
    mixer = Mixer([Row(x)], Gossip(rate=0.3), PeerExchange(Ring(), Own(), transport, x.device, codec), 0)
    for _ in range(60):
        mixer.step()
    return x


@pytest.mark.sampled
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_complex_parameters_are_encoded_as_pairs(codec: Codec) -> None:
    rows = torch.stack(CPU.world(4, partial(complex_worker, codec)))
    mean = torch.complex(start(4)[:, :20], start(4)[:, 20:40]).mean(0)
    torch.testing.assert_close(rows.mean(0), mean, rtol=1e-12, atol=1e-12)
    assert float((rows - mean).abs().max()) < 0.1


def stopped(codec: Codec, delay: int, transport: Transport) -> tuple[Tensor, Tensor]:
    """(uninterrupted, stopped and resumed after three steps): the last parameters."""
    ends, saved = [], None
    for resume in (False, True):
        x = start(4)[transport.rank].float()
        mixer = mixer_of(transport, x.device, Hypercube(), codec, x, delay, Gossip(rate=0.4))
        for step in range(3, 8) if resume else range(8):
            if resume and step == 3:
                assert saved is not None
                x.copy_(saved[0])
                mixer.load_state_dict(saved[1])
            x.sub_(0.1 * (x - transport.rank))
            mixer.step()
            if not resume and step == 2:
                saved = x.clone(), copied(mixer.state_dict())
        mixer.drain()
        ends.append(x)
    return ends[0], ends[1]


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("codec", usable(), ids=str)
def test_resume_is_bit_equal(codec: Codec, delay: int) -> None:
    for whole, resumed in CPU.world(4, partial(stopped, codec, delay)):
        assert torch.equal(whole, resumed)


def test_a_checkpoint_of_another_codec_is_refused() -> None:
    def worker(transport: Transport) -> str:
        x = torch.zeros(DIM)
        state = mixer_of(transport, x.device, Ring(), Int8(), x, 1, Gossip()).state_dict()
        with pytest.raises(
            ValueError, match=r"were encoded by Int8.block=256., this run has Plain..: resume with"
        ) as e:
            mixer_of(transport, x.device, Ring(), Plain(), x, 1, Gossip()).load_state_dict(state)
        return str(e.value)

    assert all("\n" not in text for text in CPU.world(2, worker))


@pytest.mark.parametrize("codec", usable(), ids=str)
def test_a_simulation_is_resumed_with_its_estimates(codec: Codec) -> None:
    x0 = start(4)
    first, second, third = (Mixer([], Gossip(rate=0.4), LinkExchange(Ring(), Own(), 4, codec), 1) for _ in range(3))
    rows = [Row(x0.clone()) for _ in range(3)]
    for mixer, row in zip((first, second, third), rows, strict=True):
        mixer.extend([row])
    for _ in range(6):
        first.step()
    for _ in range(3):
        second.step()
    rows[2].flat.copy_(rows[1].flat)
    third.load_state_dict(copied(second.state_dict()))
    for _ in range(3):
        third.step()
    assert torch.equal(rows[0].flat, rows[2].flat)
