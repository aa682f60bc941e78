"""Gradients of several workers at the same time, each worker's on a thread: a small model leaves processors idle.

A thread has its share of torch's threads, as Lightning gives each process its share of a host. What a worker computes
is what it computes by itself, on as many: MKL's bits may differ by their number. The CPU's random numbers are one
generator's for all threads: steps that draw are computed one after the other. `tried` finds out.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from threading import Barrier
from time import monotonic
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_decentral.planner.rehearsal.batches import shared_out
from lightning_decentral.planner.rehearsal.worker import CPU, Loop, Within, Worker, random_states

REPEATS, LONG_SECONDS = 7, 1.0
"""Steps that `tried` times at most, each way; it begins no other after so long."""
Result = TypeVar("Result")


class ThreadPool:
    """So many threads, which share out the processors that torch uses."""

    def __init__(self, count: int) -> None:
        self._pool, all_there = ThreadPoolExecutor(count), Barrier(count)
        self._share = max(1, torch.get_num_threads() // count)

        def begin(_: int) -> None:
            torch.set_num_threads(self._share)
            all_there.wait()

        with self._shared_out():
            list(self._pool.map(begin, range(count)))

    @contextmanager
    def _shared_out(self) -> Iterator[None]:
        """Within, everybody has a share: MKL's number of threads is the process's, and of all who set it the last's."""
        own = torch.get_num_threads()
        torch.set_num_threads(self._share)
        try:
            yield
        finally:
            torch.set_num_threads(own)

    def __enter__(self) -> "ThreadPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, call: Callable[..., Result], *rows: Sequence[Any]) -> list[Result]:
        """As the built-in; the first error, when all have ended."""
        with self._shared_out():
            under_way = [self._pool.submit(call, *row) for row in zip(*rows, strict=True)]
            errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in under_way]

    def close(self) -> None:
        self._pool.shutdown()


class Drawn(ValueError):
    """A step drew random numbers."""


@contextmanager
def nobody_draws(workers: Sequence[Worker]) -> Iterator[None]:
    """Within, each worker's random numbers are its own, of which it may take none.

    Raises:
        Drawn: somebody did, so that nobody knows which numbers whose were.
    """
    with ExitStack() as own:
        for worker in workers:
            own.enter_context(worker.random)
        (before,) = random_states(CPU)
        yield
        (after,) = random_states(CPU)
        if not torch.equal(before, after):
            raise Drawn(
                f"{type(workers[0].module).__name__} drew random numbers in step {workers[0].index}, where workers "
                "have threads: give threads=1 (--threads 1)"
            )


def tried(module: LightningModule, loader: DataLoader[Any], workers: int, loop: Loop, threads: int) -> float | None:
    """Seconds of gradients and updates on so many threads over those one after the other, medians; None: steps draw
    random numbers, or fail, and whoever trains these workers hears why."""

    def one(worker: Worker, batch: Any) -> Tensor:
        loss = worker.gradients(batch, Within())
        worker.update()
        return loss

    def seconds(each: Callable[..., object]) -> float:
        rows = [worker.batch() for worker in crew]
        begun = monotonic()
        with nobody_draws(crew):
            each(one, crew, rows)
        return monotonic() - begun

    def after_another(*rows: Any) -> object:
        return list(map(*rows))

    try:
        batches, _ = shared_out(loader, workers)
        crew = [Worker(copy.deepcopy(module), batches(rank), loop) for rank in range(workers)]
        seconds(after_another)
        pairs: list[tuple[float, float]] = []
        end = monotonic() + LONG_SECONDS
        with ThreadPool(threads) as pool:
            seconds(pool.map)
            while not pairs or (len(pairs) < REPEATS and monotonic() < end):
                pairs.append((seconds(pool.map), seconds(after_another)))
    except Exception:  # the module's own
        return None
    return median(abreast for abreast, _ in pairs) / median(apart for _, apart in pairs)
