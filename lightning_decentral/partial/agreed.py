"""Cuts and depths that all workers agree on: worker 0's, or those of the checkpoint that is resumed.

Every binding (a Trainer's, Fabric's) states in its own way when a step begins; what it cuts is decided here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_decentral.partial.compute.frozen_update import Absent, Skip
from lightning_decentral.partial.compute.search import CutPlan, Cuts, check_wish
from lightning_decentral.partial.compute.trial import Decide, Found
from lightning_decentral.partial.plan.cost import Balance, SavedBytes
from lightning_decentral.partial.plan.depth import DepthAssignment
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.buckets import check_bucket_bytes
from lightning_decentral.shared.wire.meeting.notices import is_loss


def options(
    depth: DepthAssignment, cuts: Cuts, balance: Balance | None, absent: Absent | None, bucket_bytes: int | None = None
) -> tuple[DepthAssignment, Cuts, Balance, Absent, int | None]:
    """Options of a binding, with defaults in the place of None. ValueError for what no network could be served."""
    check_wish(cuts)
    check_bucket_bytes(bucket_bytes)
    return depth, cuts, balance or SavedBytes(), absent or Skip(), bucket_bytes


class Together:
    """Decisions of workers that search together: worker 0's runs say what all of them go on with.

    Each worker runs its own step as often as the others, so that what a step waits for comes.

    Args:
        gather: every worker's value, in order of rank; collective.

    Raises:
        ValueError: on every worker, why there is no such cut on one of them.
        RuntimeError: on the others, where the step failed on one with any other error.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather

    def __call__(self, compute: Callable[[], Found], /) -> Found:
        found, refused, failed = None, "", ""
        try:
            found = compute()
        except ValueError as error:
            refused = str(error)
        except Exception as error:
            if is_loss(error):
                raise  # there is nobody to tell
            failed = f"{type(error).__name__}: {error}"
            self._gather((None, "", failed))
            raise
        outcomes = self._gather((found, refused, failed))
        self._refuse(outcomes)
        first: Found = outcomes[0][0]
        return first

    @staticmethod
    def _refuse(outcomes: list[Any]) -> None:
        for rank, (_, _, failed) in enumerate(outcomes):
            if failed:
                raise RuntimeError(f"worker {rank} found no cuts, it failed with {failed}")
        for _, refused, _ in outcomes:
            if refused:
                raise ValueError(refused)


def found_together(gather: Callable[[Any], list[Any]], find: Callable[[Decide], CutPlan]) -> CutPlan:
    """Cuts that all workers find together, without a trace in their random numbers. Collective."""
    before = worker_state.random_state()  # the search draws random numbers of the run's generators
    try:
        found = find(Together(gather))
    except ValueError as error:
        raise ValueError(str(error)) from error
    worker_state.set_random_state(before)
    return found


def agreed(rank: int, broadcast: Callable[[Any], Any], find: Callable[[], CutPlan]) -> CutPlan:
    """Cuts that worker 0 found by itself, without a trace in its random numbers, where the others' turns come later.

    Raises:
        ValueError: on every worker, why there is no such cut.
        RuntimeError: on the others, where the search failed on worker 0 with any other error.
    """
    found: CutPlan | str | tuple[str, str] = ""
    if rank == 0:
        before = worker_state.random_state()  # the search draws random numbers of the run's generators
        try:
            found = find()
        except ValueError as error:
            found = str(error)  # the others wait for an answer: the error travels as one
        except Exception as error:
            broadcast((type(error).__name__, str(error)))
            raise
        worker_state.set_random_state(before)
    found = broadcast(found)
    if isinstance(found, str):
        raise ValueError(found)
    if isinstance(found, tuple):
        raise RuntimeError(f"worker 0 found no cuts, it failed with {found[0]}: {found[1]}")
    return found


def wished(cuts: Cuts, saved: Mapping[str, Any] | None) -> Cuts:
    """The cuts of the checkpoint that is resumed, if the same were asked for there."""
    # And not searched for again: a measured balance may come out otherwise today.
    return list(saved["boundaries"]) if saved and saved["wish"] == words(cuts) else cuts


def remembered(driver: DepthController, cuts: Cuts) -> dict[str, Any]:
    """State for a checkpoint: the cuts, and the text of what was asked for."""
    return {"wish": words(cuts), "boundaries": list(driver.plan.boundaries)}


def words(cuts: Cuts) -> str:
    return str(cuts) if isinstance(cuts, (int, str)) else ", ".join(cuts)
