"""Ports to meet at that nobody else takes between the choice and the meeting.

A port that the system chooses for a moment (bind to 0, as Lightning does) is one that it chooses for the next
connection too, of which the tests beside this one open hundreds. Below the range of those, each process of tests has
ports of its own.
"""

import os
import secrets
import socket
from importlib import import_module

FIRST, PER_PROCESS, PROCESSES = 10_000, 500, 40  # up to 30,000; systems give connections ports from 32,768 on


def free() -> int:
    """A free port of this process of tests and of those that it forked, any one of them."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    first, start = FIRST + process * PER_PROCESS, secrets.randbelow(PER_PROCESS)
    for step in range(PER_PROCESS):
        port = first + (start + step) % PER_PROCESS
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"all {PER_PROCESS} ports from {first} on are taken")


def use(fabric: str = "lightning.fabric") -> None:
    """What Lightning asks for a port is `free`, here and in all that is forked from here.

    Args:
        fabric: or `lightning_fabric`, which the package pytorch_lightning asks.
    """
    # Not imported above: its log would stay with an earlier standard error.
    environment = import_module(f"{fabric}.plugins.environments.lightning")
    assert hasattr(environment, "find_free_network_port"), "it asks another function now"
    environment.find_free_network_port = free
