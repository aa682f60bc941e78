"""Makes process groups by all workers together, and makes them again where a foreign program connected to a port.

A program that connects to a new group's port in the first milliseconds, and by chance sends the number of a pair of
workers, takes the place of one of them. So the members greet each other, and all report through the store, not the
group, whether the greetings arrived."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_decentral.shared.wire.pending import Opened, PeerLost
from lightning_decentral.shared.wire.transport import (
    STORES,
    Disjoint,
    GlooTransport,
    Transport,
    Wire,
    everyone,
    new_group,
    of_all,
    transport,
)

GREETING = timedelta(seconds=10)  # the longest wait for a greeting
TRIES = 4
Agree = Callable[[bool], bool]
"""Function that waits until all workers have called it, without the groups, and returns whether all passed True."""


def connected_to_all(make: Callable[[], Transport | None], timeout: timedelta | None, agree: Agree) -> Transport | None:
    """Make a group, or several at once, in which every member receives from every other; None for outsiders. Collective
    over all workers. PeerLost on all workers, where foreign programs connected each time."""
    # All tries together take at most `timeout`.
    patience = GREETING if timeout is None else min(GREETING, timeout / TRIES)
    for _ in range(TRIES):
        agree(True)  # where a worker doesn't come, only the timeout ends this call
        made = make()
        if agree(made is None or made.greet(patience)):
            return made
        if made is not None:
            made.close()
    raise PeerLost(
        f"workers don't receive from each other in {TRIES} groups, though all reach the store: a firewall is between "
        "them, or programs connect to their ports; see GLOO_SOCKET_IFNAME and docs/trust.md"
    )


def make_world(met: Any, init: Callable[..., None], agree: Agree, timeout: timedelta) -> None:
    """Create the default process group of all workers that have met at a store, by `init(store=...)`."""
    tries = itertools.count()

    def make() -> Transport:
        init(store=STORES.PrefixStore(f"world/{next(tries)}", met))  # keys that no earlier try has used
        return everyone()

    connected_to_all(make, timeout, agree)


def connect(
    device: torch.device, timeout: timedelta | None, backend: str | None = None, agree: Agree = lambda fine: fine
) -> Wire:
    """Make this package's groups over the default process group; those for tensors on `device` have this backend, None:
    the default group's. Every worker must call it at the same point."""
    made_here = Opened()

    def new(groups: Disjoint | None, by: str | None, over: Callable[[Any], Transport]) -> Transport | None:
        def make() -> Transport | None:
            made = new_group(groups, by, timeout)
            return None if made is None else over(made)

        own = connected_to_all(make, timeout, agree)
        if own is not None:
            made_here.add(own)
        return own

    def group(groups: Disjoint | None) -> Transport | None:
        made = new(groups, backend, lambda group: transport(group, device))
        if made is not None and made.queued:
            made.all_reduce(torch.zeros(1, device=device)).wait()  # NCCL connects in its first call: everyone's
        return made

    # Calls over a group must have the same order on all workers: calls in no fixed order get different groups.
    hosts = partial(new, by="gloo", over=GlooTransport)
    world, flags, roll = of_all(group), of_all(hosts), of_all(hosts)
    return Wire(world, flags, roll, flags.store, group, hosts, made_here.close, made_here.abandon)


def loopback(size: int, timeout: timedelta) -> list[Transport]:
    """Make all ends of a gloo group in this process, by loopback sockets; each end is for one thread."""
    store, gloo = STORES.HashStore(), STORES.ProcessGroupGloo

    def end(rank: int) -> Transport:
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timeout
        return GlooTransport(gloo(store, rank, size, options))

    with ThreadPoolExecutor(size) as threads:  # each end waits for the others
        return list(threads.map(end, range(size)))
