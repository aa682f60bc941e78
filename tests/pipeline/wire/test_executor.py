"""What a stage hears of a neighbour that is gone."""

import inspect
import threading
from collections import defaultdict

import pytest
import torch

from lightning_decentral.pipeline import Bfloat16Activations, Boundary, ExactActivations, Int8Activations
from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.pipeline.wire import executor as module
from lightning_decentral.pipeline.wire.executor import Channel
from lightning_decentral.shared.wire.pending import PeerLost
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.causal import edges
from tests.world import world

pytestmark = pytest.mark.threads


SHAPES = defaultdict(lambda: ((1, 2, 4), torch.float32))


def hear(links, action):
    links.expect(action)
    return links.receive(action)


@pytest.mark.parametrize(("kind", "waiting", "gone"), [(Kind.BACKWARD, 0, 1), (Kind.FORWARD, 1, 0)])
def test_a_stage_that_ends_is_named(kind, waiting, gone):
    connected = threading.Barrier(2, timeout=30.0)  # who ends before the other has connected isn't lost, but absent

    def worker(group):
        connected.wait()
        if group.rank() == gone:
            return None  # and its connections with it
        over = GlooTransport(group)
        links = Channel(edges(over), SHAPES, torch.device("cpu"))
        action = Action(kind, waiting, 0, 0)
        with pytest.raises(PeerLost, match=f"stage {waiting} lost stage {gone}: it ended or its network is cut"):
            hear(links, action)
        return "named"

    assert world(2, worker)[waiting] == "named"


def test_messages_of_both_directions_arrive():
    def worker(group):
        over = GlooTransport(group)
        links = Channel(edges(over), SHAPES, torch.device("cpu"))
        down = [Action(Kind.FORWARD, stage, 0, s) for stage in (0, 1) for s in range(3)]
        up = [Action(Kind.BACKWARD, stage, 0, s) for stage in (0, 1) for s in range(3)]
        mine, coming = (down[:3], up[:3]) if group.rank() == 0 else (up[3:], down[3:])
        for action in coming:
            links.expect(action)
        for action in mine:
            links.send(action, torch.full((1, 2, 4), 10.0 * group.rank() + action.slice))
        heard = [float(links.receive(action).mean()) for action in reversed(coming)]
        links.close()
        return heard

    assert world(2, worker) == [[12.0, 11.0, 10.0], [2.0, 1.0, 0.0]]


# ---- boundaries: what each leaves of a tensor, against its stated error ---------------------------------------------

BOUNDARIES = [
    c() for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, Boundary) and c is not Boundary
]
BOUND = {
    ExactActivations: lambda x: torch.zeros_like(x),
    Bfloat16Activations: lambda x: x.abs() * 2**-8,
    Int8Activations: lambda x: x.abs().amax(-1, keepdim=True).expand_as(x) / 253,
}


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda c: type(c).__name__)
def test_a_round_trip_stays_within_the_error(boundary):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1e-6, 1.0, 1e6, 0.0, 3.0]
    ).view(5, 1)
    buffer = boundary.buffer(x.shape, x.dtype, x.device)
    message = boundary.encode(x)
    assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype)
    found = boundary.decode(buffer.copy_(message), x.shape, x.dtype)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert ((found - x).abs() <= BOUND[type(boundary)](x)).all()


def test_bytes_of_a_message():
    x = torch.randn(2, 5, 8)
    sizes = [
        boundary.encode(x).numel() * boundary.encode(x).element_size()
        for boundary in (ExactActivations(), Bfloat16Activations(), Int8Activations())
    ]
    assert sizes == [320, 160, 120]
