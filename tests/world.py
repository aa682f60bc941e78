"""Worlds for tests: ranks as threads, one gloo group each on a store in memory (about 0.1 s a world)."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

allowed = True
"""Whether the test that runs is marked `threads`: set by `tests/conftest.py`."""
made = False
"""Whether this process has had a world: it must not fork any more."""


def world(size: int, worker: Callable[[Any], T], seconds: float = 20.0) -> list[T]:
    """[worker(group of rank 0), worker(group of rank 1), ...], each in a thread of its own.

    The first worker's exception is raised here; a world that doesn't end in time fails (its threads are daemons).
    """
    global made
    assert allowed, "mark this test with @pytest.mark.threads: it must run after those that fork"
    made = True
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("world", store), rank, size, timedelta(seconds=seconds))
            results[rank] = worker(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with on_one_processor():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a worker still ran after {seconds} s"
    return results


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Threads that are started here, and theirs, stay on the processor that this one is on.

    One at a time has Python's lock. Where they are spread over two processors, handing it over wakes the other one each
    time, which took up to three times the processor time.
    """
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
