"""The least makespan by trying all orders: what the policies are compared with."""

from collections.abc import Sequence

from lightning_decentral.sweep.plan.dispatch import Queue

MOST_PIECES = 14


def optimum_seconds(queues: Sequence[Queue], devices: int) -> float:
    """The least makespan over all schedules of pieces that need no loading on equal devices.

    In the order of their starts, every piece of some optimal schedule goes to the device that is free first; so all
    interleavings of the jobs' pieces are tried, cut off where a bound says that they can't be better.

    Raises:
        ValueError: more than 14 pieces, a piece to load, or a later arrival: these have no such order.
    """
    _refuse(queues)
    left = [tuple(piece.compute_seconds for piece in queue.pieces) for queue in queues]
    best = sum(map(sum, left))
    seen: set[tuple[object, ...]] = set()
    stack = [((0,) * len(left), (0.0,) * len(left), (0.0,) * devices)]
    while stack:
        state = stack.pop()
        done, ready, free = state
        rest = [pieces[n:] for pieces, n in zip(left, done, strict=True)]
        bound = max(
            *free, *(r + sum(p) for r, p in zip(ready, rest, strict=True)), (sum(free) + sum(map(sum, rest))) / devices
        )
        if state in seen or (bound >= best and any(rest)):
            continue
        seen.add(state)
        if not any(rest):
            best = min(best, max(free))
        stack.extend(_next(done, ready, free, j, pieces[0]) for j, pieces in enumerate(rest) if pieces)
    return best


def _next(
    done: tuple[int, ...], ready: tuple[float, ...], free: tuple[float, ...], job: int, seconds: float
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """The job's next piece, on the device that is free first."""
    finish = max(ready[job], free[0]) + seconds
    one = tuple(n + (j == job) for j, n in enumerate(done))
    then = tuple(finish if j == job else r for j, r in enumerate(ready))
    return one, then, tuple(sorted((finish, *free[1:])))


def _refuse(queues: Sequence[Queue]) -> None:
    pieces = [piece for queue in queues for piece in queue.pieces]
    if len(pieces) > MOST_PIECES:
        raise ValueError(f"{len(pieces)} pieces have too many orders: at most {MOST_PIECES}")
    if any(piece.load_seconds for piece in pieces) or any(queue.arrival_seconds for queue in queues):
        raise ValueError("the optimum is known without loading and with all jobs there from the beginning only")
