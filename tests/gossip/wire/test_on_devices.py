"""LAW: gossip between devices equals the simulation step for step, in any order in which streams may run.

Workers are threads, each with a simulated device; what they send goes over a communicator with NCCL's order.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.gossip import (
    Codec,
    Complete,
    ConsensusControl,
    DifferenceCompression,
    Gossip,
    Int8,
    MetropolisHastings,
    OnePeerExponential,
    Own,
    Plain,
    PushSum,
    Ring,
    TopK,
    Topology,
    simulate,
)
from lightning_decentral.gossip.plan.planned_traffic import partitions
from lightning_decentral.gossip.wire import mixer
from lightning_decentral.gossip.wire.assembly import CliqueExchange
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.hierarchical import GatherExchange
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import Pool, pack
from lightning_decentral.shared.wire.transport import GlooTransport, Message, Transport
from tests import simulated
from tests.gossip.rules import PLANS, Rule
from tests.gossip.wire.test_device import Mirror, Twin
from tests.gossip.wire.test_exchange import DIM, Row, exchange_of, gradient, start
from tests.gossip.wire.test_healing import RATE
from tests.gossip.wire.test_healing import STEPS as LONG
from tests.gossip.wire.test_healing import trained as trained_sick
from tests.simulated import CUDA
from tests.simulated.streams import Event, Stream
from tests.simulated.tensors import Simulated
from tests.simulated.wire import Make, device_world, losses_read, sent_overwritten, without_waiting
from tests.world import world

pytestmark = pytest.mark.threads
STEPS = 6
PLACES = (0, 5, 16, DIM)
PLAIN = Plain()
Build = Callable[[Make], Exchange]


def descend(
    x0: Tensor, rule: Rule, delay: int, build: Build, places: Sequence[int], make: Make, engine: simulated.Engine
) -> Tensor:
    """One worker's trajectory [steps + 1, dim]. In a step its host waits for nothing, once tables have been copied."""
    rank = make().rank
    buckets = [Row(x0[rank, a:b].to(CUDA)) for a, b in pairwise(places)]
    gossip = mixer_of(rule, build(make), delay, make)
    gossip.extend(buckets)
    trajectory = [x0[rank].clone()]
    for step in range(STEPS):
        rows = torch.zeros_like(x0)
        rows[rank] = trajectory[-1]
        update = 0.1 * gradient(rows, step)[rank]
        for bucket, part in zip(buckets, update.split([len(b.flat) for b in buckets]), strict=True):
            bucket.flat.sub_(part.to(CUDA))
        with without_waiting(engine) if step else nullcontext():
            gossip.step(0.1)
        trajectory.append(torch.cat([b.flat for b in buckets]).cpu())
    gossip.drain()
    return torch.stack(trajectory)


def peers(topology: Topology, rule: Rule, delay: int, codec: Codec, make: Make) -> Exchange:
    return overlapped(PeerExchange(topology, rule.weights, make(), CUDA, codec), CUDA, delay)


def cliques(topology: Topology, size: int, make: Make) -> Exchange:
    transport = make()
    found = partitions(topology, Own(), size)
    assert found is not None
    return CliqueExchange(found, {tuple(range(size)): transport}, transport.rank, CUDA)


def run(x0: Tensor, rule: Rule, delay: int, build: Build, seed: int, places: Sequence[int] = PLACES) -> Tensor:
    """[steps + 1, size, dim]"""
    return torch.stack(device_world(len(x0), partial(descend, x0, rule, delay, build, places), seed), dim=1)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("rule", "topology", "delay"),
    [
        (Gossip(), Ring(), 0),
        (Gossip(), OnePeerExponential(), 1),
        (Gossip(rate=0.4), Ring(), 2),
        (PushSum(), OnePeerExponential(), 1),
        (ConsensusControl(target=0.3, probe=3), Ring(), 1),
    ],
    ids=str,
)
def test_devices_equal_the_simulation(rule: Rule, topology: Topology, delay: int, seed: int) -> None:
    x0 = start(3, DIM)
    expected = simulate(topology, rule, gradient, x0, STEPS, 0.1, delay)
    measured = run(x0, rule, delay, partial(peers, topology, rule, delay, Plain()), seed)
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "size"), PLANS, ids=str)
def test_devices_of_every_topology_equal_the_simulation(topology: Topology, size: int) -> None:
    x0, rule = start(size, DIM), Gossip(rate=0.4)
    expected = simulate(topology, rule, gradient, x0, STEPS, 0.1, 1)
    measured = run(x0, rule, 1, partial(peers, topology, rule, 1, Plain()), seed=0)
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
def test_cliques_of_devices_equal_the_simulation(delay: int) -> None:
    x0 = start(3, DIM)
    expected = simulate(Complete(), Gossip(), gradient, x0, STEPS, 0.1, delay)
    measured = run(x0, Gossip(), delay, partial(cliques, Complete(), 3), seed=delay)
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


CODECS: list[Codec] = [Int8(block=16), DifferenceCompression(TopK(fraction=0.5, block=16))]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_devices_that_encode_equal_the_simulation(codec: Codec, delay: int, seed: int) -> None:
    """Codes have a stream of their own from delay 1 on."""
    x0 = torch.zeros(3, DIM, dtype=torch.float64) if codec.remembers else start(3, DIM)
    rule = Gossip(rate=0.2)
    expected = simulate(Ring(), rule, gradient, x0, STEPS, 0.1, delay, codec=codec)
    # In one bucket, as the simulation has it: noise is drawn by bucket.
    measured = run(x0, rule, delay, partial(peers, Ring(), rule, delay, codec), seed, places=(0, DIM))
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize("call", ["wait_stream", "wait_event"])
def test_codes_on_a_stream_that_waits_for_less_are_seen(call: str) -> None:
    """That stream for what is to be sent, the training's for what was heard."""
    seen = pytest.raises((AssertionError, RuntimeError, FloatingPointError))
    with mock.patch.object(Stream, call), seen:
        for seed in range(3):
            test_devices_that_encode_equal_the_simulation(CODECS[0], 1, seed)


# ---- an island's second stream: every wait of it is needed ------------------------------------------------------


def island(delay: int, seed: int, codec: Codec = PLAIN, beside: bool = False) -> tuple[Tensor, list[str]]:
    """Parameters before and after each of six steps of one device of an island of two, and what its host waited for."""
    with simulated.device(seed) as engine:
        half = torch.linspace(-1, 1, 32, dtype=torch.float64)
        row, path, waits = Row(torch.cat([half, half]).to(CUDA)), [], list[str]()
        peers: Exchange = PeerExchange(Complete(), MetropolisHastings(), Mirror(), CUDA, codec)
        peers = overlapped(peers, CUDA, delay) if beside else peers
        gossip = mixer.Mixer([row], Gossip(rate=0.3), GatherExchange(peers, Twin(CUDA), CUDA), delay)
        for _ in range(STEPS):
            before = len(engine.waits)
            row.flat.sub_(row.flat, alpha=0.1)
            gossip.step()
            path.append(row.flat.clone())
            waits += engine.waits[before:]
        return torch.stack(path).cpu(), waits


def wrong(seeds: range = range(6)) -> int:
    """Schedules of which delays 0 to 2 don't give x <- 0.9 x, and 0.3 from where the first round lands."""
    count = 0
    for delay in (0, 1, 2):
        x, expected = torch.linspace(-1, 1, 32, dtype=torch.float64).repeat(2), []
        for step in range(STEPS):
            x = 0.9 * x + 0.3 * (step >= delay)
            expected.append(x)
        for seed in seeds:
            try:
                path, waits = island(delay, seed)
            except (FloatingPointError, RuntimeError):  # it finds its own message sick, or its neighbour elsewhere
                count += 1
                continue
            count += bool(waits) or not torch.allclose(path, torch.stack(expected))
    return count


def test_an_island_lands_where_its_rule_says_in_any_schedule() -> None:
    assert wrong() == 0


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [1, 2])
def test_an_islands_codes_have_a_stream_beside_its_own(delay: int) -> None:
    for seed in range(4):
        (path, waits), (expected, _) = (island(delay, seed, Int8(block=16), beside) for beside in (True, False))
        assert torch.equal(path, expected)
        assert not [wait for wait in waits if "quantize" not in wait]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize("call", ["wait_stream", "wait_event"])
def test_an_island_that_waits_for_less_is_seen(call: str) -> None:
    with mock.patch.object(Stream, call):
        assert wrong() >= 3


def sends_first(calls: int, make: Make, engine: simulated.Engine) -> Tensor:
    """Both send and hear, in one call or in one after the other, which waits for a second."""
    engine.seconds, over = 1.0 if calls > 1 else engine.seconds, make()
    mine, theirs = torch.full((3,), over.rank + 1.0, device=CUDA), torch.zeros(3, device=CUDA)
    send, receive = Message(1 - over.rank, mine, 0), Message(1 - over.rank, theirs, 0)
    for sends, receives in [([send], [receive])] if calls == 1 else [([send], []), ([], [receive])]:
        for pending in chain(*over.exchange(sends, receives)):
            pending.wait()
    return theirs.cpu()


def test_a_send_rests_until_somebody_hears_it() -> None:
    """As NCCL's: who sends in one call and hears in the next, as its peer does, waits for ever."""
    first, second = device_world(2, partial(sends_first, 1))
    assert (first.tolist(), second.tolist()) == ([2.0] * 3, [1.0] * 3)
    with pytest.raises(RuntimeError, match="waits for what nobody does"):
        device_world(2, partial(sends_first, 2))


def test_memory_that_goes_back_too_early_is_seen() -> None:
    """Without a pool, which keeps it, the allocator has all memory of a round again as soon as nobody holds it."""

    def drop(self: Pool, buffers: object) -> None:  # no mock, which would keep what it is called with
        pass

    with mock.patch.object(Pool, "give", drop):
        assert wrong() == 0
        with mock.patch.object(Simulated, "record_stream"):
            assert wrong() >= 3


@pytest.mark.filterwarnings("ignore:.*refused a message")
def test_a_message_that_goes_back_before_it_landed_is_seen() -> None:
    launch = mixer.Mixer._launch

    def early(self: mixer.Mixer, flight: mixer.Flight, *rest: object) -> None:
        launch(self, flight, *rest)  # type: ignore[arg-type]
        self.exchange.pool.give([flight.messages[-1].sent])

    with mock.patch.object(mixer.Mixer, "_launch", early):
        assert wrong() >= 3


# ---- training steps ---------------------------------------------------------------------------------------------


MODEL = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


Connect = Callable[[Transport, torch.device, int], Exchange]


def to_peers(codec: Codec, transport: Transport, device: torch.device, delay: int) -> Exchange:
    return overlapped(PeerExchange(Ring(), Own(), transport, device, codec), device, delay)


def to_a_clique(transport: Transport, device: torch.device, delay: int) -> Exchange:
    found = partitions(Complete(), Own(), transport.size)
    assert found is not None
    return CliqueExchange(found, {tuple(range(transport.size)): transport}, transport.rank, device)


def trained(
    connect: Connect, delay: int, device: torch.device, transport: Transport, engine: simulated.Engine | None
) -> list[Tensor]:
    """A small model's parameters after a few steps on this worker's own data, with gossip."""
    model = copy.deepcopy(MODEL).to(device)
    generator = torch.Generator().manual_seed(transport.rank)
    rows = torch.randn(STEPS, 4, 6, generator=generator, dtype=torch.float64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    gossip = mixer.Mixer(pack(model.parameters(), 512), Gossip(rate=0.4), connect(transport, device, delay), delay)
    for step, x in enumerate(rows):
        with without_waiting(engine) if engine and step else nullcontext():  # tables of noise are copied once
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            gossip.step()
    gossip.drain()
    return [p.detach().cpu() for p in model.parameters()]


def train_both(connect: Connect, delay: int, seed: int) -> None:
    """AssertionError where models of devices are not those of hosts."""
    here = world(3, lambda group: trained(connect, delay, torch.device("cpu"), GlooTransport(group), None))
    there = device_world(3, lambda make, engine: trained(connect, delay, CUDA, make(), engine), seed)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "connect",
    [partial(to_peers, Plain()), partial(to_peers, Int8(block=16)), to_a_clique],
    ids=["peers", "Int8", "clique"],
)
def test_models_on_devices_train_as_on_hosts(connect: Connect, delay: int) -> None:
    """Forward, backward, update and gossip: no host waits in a step."""
    train_both(connect, delay, seed=delay)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize(
    ("owner", "call", "connect"),
    [
        (Stream, "wait_stream", partial(to_peers, Plain())),
        (Stream, "wait_stream", to_a_clique),
        (Event, "wait", partial(to_peers, Plain())),
    ],
    ids=["sent to peers", "sent to a clique", "heard from peers"],
)
def test_a_step_that_doesnt_wait_for_its_messages_is_seen(owner: type, call: str, connect: Connect) -> None:
    """The communicator for the update, the step for what is heard: poison lands, or a message is refused."""
    # 99 is the poison of whole numbers.
    seen = pytest.raises((AssertionError, RuntimeError), match=r"not close|round 99")
    with mock.patch.object(owner, call), seen:
        train_both(connect, 1, seed=0)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*refused a message")
@pytest.mark.parametrize("connect", [partial(to_peers, Plain()), to_a_clique], ids=["peers", "clique"])
def test_a_steps_message_that_is_overwritten_before_it_was_sent_is_seen(connect: Connect) -> None:
    with sent_overwritten(), pytest.raises((AssertionError, RuntimeError)):
        train_both(connect, 1, seed=0)


def test_a_step_whose_host_reads_its_loss_is_seen() -> None:
    with losses_read(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        train_both(partial(to_peers, Plain()), 1, seed=0)


# ---- healing -----------------------------------------------------------------------------------------------------


def healed(delay: int, make: Make, engine: simulated.Engine) -> tuple[Tensor, int, list[str]]:
    """(where a worker, the second of which was poisoned, has come to, how often it was healed, what its host waited
    for)"""
    x, times, _ = trained_sick(Gossip(rate=0.4), Ring(), 3, delay, float("nan"), {1}, exchange_of, make(), CUDA)
    waits = [*engine.waits]
    return x.cpu(), times, waits


def heal(delay: int, seed: int) -> None:
    """AssertionError where devices don't go on to where they would have gone, as hosts do."""
    ranks = torch.arange(3, dtype=torch.float64)[:, None]
    start = torch.ones(3, DIM, dtype=torch.float64)
    gradients = lambda x, step: x - ranks  # noqa: E731
    wanted = simulate(Ring(), Gossip(rate=0.4), gradients, start, LONG, RATE, delay, every=LONG)[-1]
    rows = device_world(3, partial(healed, delay), seed)
    assert [times for _, times, _ in rows] == [0, 1, 0]
    assert rows[0][2] == rows[2][2] == [], "who is sound waits for nothing"
    torch.testing.assert_close(torch.stack([x for x, _, _ in rows]), wanted, rtol=0, atol=0.02)


@pytest.mark.filterwarnings("ignore:worker .")
@pytest.mark.parametrize("delay", [0, 1])
def test_a_poisoned_device_goes_on_from_its_neighbours(delay: int) -> None:
    heal(delay, seed=delay)


@pytest.mark.filterwarnings("ignore:worker .")
def test_a_verdict_that_is_read_before_it_came_is_seen() -> None:
    with mock.patch.object(Event, "synchronize"), pytest.raises((AssertionError, RuntimeError, FloatingPointError)):
        heal(0, seed=0)
