"""Ports of different processes of tests never meet, and none is taken that somebody has."""

import socket

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from tests import ports


def test_ports_are_below_those_of_connections_and_of_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for worker in ("gw0", "gw1", "gw39"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        seen[worker] = {ports.free() for _ in range(50)}
    assert all(len(found) > 10 for found in seen.values())
    assert not seen["gw0"] & seen["gw1"]
    assert not seen["gw1"] & seen["gw39"]
    assert max(map(max, seen.values())) < 32_768


def test_a_port_that_somebody_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PER_PROCESS", 2)
    monkeypatch.setattr(ports, "FIRST", 30_000)  # of no process of tests
    with socket.create_server(("", ports.free())) as server:
        assert {ports.free() for _ in range(4)}.isdisjoint({server.getsockname()[1]})
        with socket.create_server(("", ports.free())), pytest.raises(OSError, match="all 2 ports from"):
            ports.free()


def test_lightning_meets_at_these_ports() -> None:
    assert ports.FIRST <= LightningEnvironment().main_port < 32_768
