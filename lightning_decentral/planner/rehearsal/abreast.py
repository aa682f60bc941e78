"""Computing the workers' gradients: one after the other, or several at the same time, each on its thread.

A small model leaves processors idle. A thread has its share of torch's threads, as Lightning gives each process its
share of a host. What a worker computes is what it computes by itself, on as many: MKL's bits may differ by their
number. The host's random numbers are one generator's for all threads: steps that draw are computed one after the other.
`jobs.threads_ratio` finds out whether threads are faster.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Barrier, Semaphore
from typing import Any, TypeVar

import torch

from lightning_decentral.planner.rehearsal.members.member import CPU
from lightning_decentral.planner.rehearsal.turns import OwnTurn, WorkersBarrier, generators, same

Result = TypeVar("Result")


class Way:
    """One worker after the other.

    Workers call from their threads, in the order in which Lightning's loop comes to it.
    """

    def shared(self) -> AbstractContextManager[None]:
        """Context around the steps, in the thread that waits for all workers."""
        return nullcontext()

    def forward(self, worker: int, step: Callable[..., Any], batch: Sequence[Any]) -> Any:
        """Return what a `training_step` with these arguments returns."""
        return step(*batch)

    def end(self, worker: int) -> None:
        """The gradients are there, or where workers drift the update is made; called again it does nothing."""

    def close(self) -> None:
        """End all waits of workers, those to come included."""


@contextmanager
def threads_each(share: int) -> Iterator[None]:
    """Set torch's number of threads within; MKL has one number for the process, the one that was set last."""
    own = torch.get_num_threads()
    torch.set_num_threads(share)
    try:
        yield
    finally:
        torch.set_num_threads(own)


class ThreadPool:
    """Pool of so many threads, which share out the processors that torch uses."""

    def __init__(self, count: int) -> None:
        self._pool, all_there = ThreadPoolExecutor(count), Barrier(count)
        self._share = max(1, torch.get_num_threads() // count)

        def begin(_: int) -> None:
            torch.set_num_threads(self._share)
            all_there.wait()

        with threads_each(self._share):
            list(self._pool.map(begin, range(count)))

    def __enter__(self) -> "ThreadPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def map(self, call: Callable[..., Result], *rows: Sequence[Any]) -> list[Result]:
        """Map as the built-in does; raises the first error, when all have ended."""
        with threads_each(self._share):
            under_way = [self._pool.submit(call, *row) for row in zip(*rows, strict=True)]
            errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in under_way]


class Drawn(ValueError):
    """A step drew random numbers."""


class Abreast(Way):
    """Several workers at a time: all meet in their step, compute without turns, and meet again.

    Raises:
        Drawn: somebody drew random numbers meanwhile, so that nobody knows which numbers whose were.
    """

    def __init__(self, name: str, workers: int, turn: OwnTurn, threads: int) -> None:
        self._name, self._turn, self._places, self._step = name, turn, Semaphore(threads), -1
        self._share = max(1, torch.get_num_threads() // threads)
        self._begun, self._ended = (
            WorkersBarrier(turn, workers, self._begin),
            WorkersBarrier(turn, workers, self._compare),
        )
        self._within = [ExitStack() for _ in range(workers)]
        self._inside = [False] * workers

    def shared(self) -> AbstractContextManager[None]:
        return threads_each(self._share)

    def _begin(self) -> None:
        self._before, self._step = generators(CPU), self._step + 1

    def _compare(self) -> None:
        if not same(self._before, generators(CPU)):
            raise Drawn(
                f"{self._name} drew random numbers in step {self._step}, where workers have threads: give threads=1 "
                "(--threads 1)"
            )

    def forward(self, worker: int, step: Callable[..., Any], batch: Sequence[Any]) -> Any:
        if not self._inside[worker]:
            torch.set_num_threads(self._share)
            self._inside[worker] = True
            within = self._within[worker]
            within.enter_context(self._turn.passed_on())
            self._begun.wait()
            within.callback(self._ended.wait)
            within.enter_context(self._places)
        return step(*batch)

    def end(self, worker: int) -> None:
        self._inside[worker] = False
        self._within[worker].close()

    def close(self) -> None:
        self._begun.close()
        self._ended.close()
