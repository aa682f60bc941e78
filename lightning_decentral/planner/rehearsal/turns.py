"""Turns among the workers of a process: one thread at a time, each with random numbers of its own, or several at once.

State that a process has only once is swapped with the turn: generators of torch, numpy and `random`, and the rank of
Lightning's `rank_zero_only`. A worker that waits for others, or for further steps, passes the turn on.

Gradients are computed one worker after the other (`Way`), or several at the same time, each on its thread (`Abreast`):
a small model leaves processors idle. A thread has its share of torch's threads, as Lightning gives each process its
share of a host. Results equal those of one worker with as many threads: MKL's bits may depend on their number. All
threads share the host's random generator, so steps that draw from it are computed one after the other.
`jobs.threads_ratio` finds out whether threads are faster."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from threading import Barrier, Condition, Semaphore, get_ident, local
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.worker_state import random_state, set_random_state
from lightning_decentral.shared.wire.in_process import ThreadTurn

CPU = torch.device("cpu")
Result = TypeVar("Result")


class Ended(BaseException):
    """Raised in a worker's thread when no further steps are requested, to end its Trainer."""


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether no random number was drawn on the host between two states of the generators."""
    (keys_a, *rest_a), (keys_b, *rest_b) = a["numpy"], b["numpy"]
    equal = torch.equal(a["torch"], b["torch"]) and torch.equal(keys_a, keys_b)
    return equal and (rest_a, a["python"]) == (rest_b, b["python"])


class OwnTurn(ThreadTurn):
    """Turn of a worker's thread, with its own random number generators and rank, which begin as they are now."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        if device.type == "cuda":
            cuda.synchronize(device)  # starts CUDA: from here on its generators have states
        self._first, self._own = random_state(), local()

    def is_of(self, rank: int) -> None:
        """Register the current thread as the thread of worker `rank`."""
        self._own.rank, self._own.states = rank, self._first

    def __enter__(self) -> None:
        super().__enter__()
        set_random_state(self._own.states)
        rank_zero_only.rank = self._own.rank  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self._own.states = random_state()
        super().__exit__()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        if self._whose != get_ident() and getattr(self._own, "states", None) is not None:
            raise ValueError(
                "a step asks the other workers, which are computed at the same time: give threads=1 (--threads 1)"
            )
        with super().passed_on():
            yield

    @contextmanager
    def of_workers(self) -> Iterator[None]:
        """Give workers turns meanwhile; afterwards restore the caller's random number generators and rank."""
        states, rank = random_state(), getattr(rank_zero_only, "rank", 0)
        try:
            yield
        finally:
            set_random_state(states)
            rank_zero_only.rank = rank  # type: ignore[attr-defined]


class WorkersBarrier(Barrier):
    """Barrier of all workers: the last one to arrive makes the call, then all go on; an error of the call ends all.

    `wait` is for a worker that has already passed its turn on."""

    def __init__(self, turn: ThreadTurn, workers: int, call: Callable[[], None] | None = None) -> None:
        super().__init__(workers, call)
        self._turn = turn

    def __call__(self) -> None:
        with self._turn.passed_on():
            self.wait()

    close = Barrier.abort  # ends all waits, future ones included


class Quota:
    """Number of steps that each worker may take, `allowed` in total; a worker that has taken them waits for more."""

    def __init__(self, turn: ThreadTurn, workers: int) -> None:
        self._turn, self._changed = turn, Condition()
        self.allowed, self._closed = 0, False
        self._taken: list[float] = [-1] * workers

    def wait(self, rank: int, taken: int) -> None:
        """Wait in a worker that has taken `taken` steps until it may begin the next. Ended: no step is left to take."""
        if taken >= self.allowed or self._closed:
            with self._turn.passed_on(), self._changed:
                self._taken[rank] = taken
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or taken < self.allowed)
        if self._closed:
            raise Ended

    def done(self, rank: int) -> None:
        """Note that the worker takes no further step."""
        with self._changed:
            self._taken[rank] = inf
            self._changed.notify_all()

    def allow(self, steps: int) -> None:
        """Allow `steps` steps in total; returns when all workers have taken them, or can't."""
        with self._changed:
            self.allowed = steps
            self._changed.notify_all()
            self._changed.wait_for(lambda: min(self._taken) >= steps)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Way:
    """Computes gradients one worker after the other.

    Workers call from their threads, in the order of Lightning's loop."""

    def shared(self) -> AbstractContextManager[None]:
        """Context around the steps, in the thread that waits for all workers."""
        return nullcontext()

    def forward(self, worker: int, step: Callable[..., Any], batch: Sequence[Any]) -> Any:
        """Return what a `training_step` with these arguments returns."""
        return step(*batch)

    def end(self, worker: int) -> None:
        """Note that a worker's gradients are computed, or its update is made if workers drift; may be called again."""

    def close(self) -> None:
        """End all waits of workers, future waits included."""


@contextmanager
def threads_each(share: int) -> Iterator[None]:
    """Set torch's number of threads within; MKL has one number for the process, the one that was set last."""
    own = torch.get_num_threads()
    torch.set_num_threads(share)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def map_on_threads(call: Callable[..., Result], first: Sequence[Any], *others: Sequence[Any]) -> list[Result]:
    """Map like the built-in, with a thread for each call; the threads divide torch's number of threads. Raises the
    first error, when all have ended."""
    share = max(1, torch.get_num_threads() // len(first))
    begin = partial(torch.set_num_threads, share)
    with threads_each(share), ThreadPoolExecutor(len(first), initializer=begin) as pool:
        return list(pool.map(call, first, *others))


class Abreast(Way):
    """Computes gradients of several workers at a time: all meet in their step, compute without turns, and meet again.
    ValueError: a step drew random numbers meanwhile, which can't be assigned to workers."""

    def __init__(self, name: str, workers: int, turn: OwnTurn, threads: int) -> None:
        self._name, self._turn, self._places, self._step = name, turn, Semaphore(threads), -1
        self._share = max(1, torch.get_num_threads() // threads)
        self._begun = WorkersBarrier(turn, workers, self._begin)
        self._ended = WorkersBarrier(turn, workers, self._compare)
        self._within = [ExitStack() for _ in range(workers)]
        self._inside = [False] * workers

    def shared(self) -> AbstractContextManager[None]:
        return threads_each(self._share)

    def _begin(self) -> None:
        self._before, self._step = random_state(), self._step + 1

    def _compare(self) -> None:
        if not same(self._before, random_state()):
            raise ValueError(
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
