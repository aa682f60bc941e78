"""The benchmark of the simulation takes in every topology that there is."""

from rehearse import simulation
from tests.gossip.topologies import classes, serves


def test_every_topology_is_simulated_with_so_many_workers() -> None:
    found = simulation.topologies(64)
    assert [type(topology) for topology in found] == classes()
    assert all(serves(topology, 64) for topology in found)
    assert simulation.run(found[0], 64, 5)["error"] < 1e-12
