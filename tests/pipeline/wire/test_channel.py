"""What a stage hears of a neighbour that is gone."""

import threading

import pytest
import torch

from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.pipeline.wire.channel import Links
from lightning_decentral.shared.wire.pending import PeerLost
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.causal import edges
from tests.world import world

pytestmark = pytest.mark.threads


def shape(action, stage):
    return (1, 2, 4), torch.float32


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
        links = Links(edges(over), shape, torch.device("cpu"))
        action = Action(kind, waiting, 0, 0)
        with pytest.raises(PeerLost, match=f"stage {waiting} lost stage {gone}: it ended or its network is cut"):
            hear(links, action)
        return "named"

    assert world(2, worker)[waiting] == "named"


def test_messages_of_both_directions_arrive():
    def worker(group):
        over = GlooTransport(group)
        links = Links(edges(over), shape, torch.device("cpu"))
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
