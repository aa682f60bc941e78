"""Ranking of a sweep's members at its end, and the overrides of the best one."""

import csv
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from rich.table import Table

from lightning_decentral.sweep.member import SweepMember
from lightning_decentral.sweep.plan.scores import Score, Scoreboard

RETURNED = "returned"


@dataclass(frozen=True)
class RankedMember:
    """A member at the end.

    Args:
        status: "completed", "failed", or "ended early".
        score: what it is ranked by; None: it has none.
        returned: by its program.
    """

    entrant: SweepMember
    status: str
    score: Score | None
    returned: object = None

    @property
    def loss(self) -> float:
        return math.inf if self.score is None else self.score.loss


def standings(
    entrants: Sequence[SweepMember], outcomes: Mapping[str, JobReturn], board: Scoreboard
) -> list[RankedMember]:
    """The best first, those that failed and those without a number last.

    Where members were compared it is by the best score of each, otherwise by what they returned, the lowest first.
    """
    found = [_standing(entrant, outcomes[entrant.name], board) for entrant in entrants]
    return sorted(found, key=lambda one: (one.loss, int(one.entrant.name) if one.entrant.name.isdigit() else 0))


def _standing(entrant: SweepMember, outcome: JobReturn, board: Scoreboard) -> RankedMember:
    if outcome.status is not JobStatus.COMPLETED:
        return RankedMember(entrant, outcome.status.name.lower(), None)
    status = "ended early" if entrant.name in board.verdicts else "completed"
    score = board.best(entrant.name) if board.histories else _returned(outcome)
    return RankedMember(entrant, status, score, outcome._return_value)


def _returned(outcome: JobReturn) -> Score | None:
    value = outcome._return_value
    return Score(RETURNED, "min", 0, float(value)) if isinstance(value, (int, float)) else None


def ranking(ranked: Sequence[RankedMember]) -> Table:
    """A table of all, best first."""
    table = Table("rank", "member", "overrides", "objective", title=_title(ranked), title_justify="left")
    for place, one in enumerate(ranked, start=1):
        value = one.status if one.score is None else f"{one.score.value:.6g}"
        said = f"{value} ({one.status})" if one.status == "ended early" else value
        table.add_row(str(place), one.entrant.name, " ".join(one.entrant.words), said)
    return table


def _title(ranked: Sequence[RankedMember]) -> str:
    first = ranked[0].score if ranked else None
    by = "" if first is None or first.metric == RETURNED else f" by {first.metric}"
    return f"Ranking{by}, {'highest' if first is not None and first.mode == 'max' else 'lowest'} first"


def best_line(ranked: Sequence[RankedMember]) -> str | None:
    """The best member's overrides, as a command line takes them; None: nobody has a number."""
    best = ranked[0]
    if best.score is None or best.loss == math.inf:
        return None
    return f"best: {shlex.join(best.entrant.words)} ({best.score})"


def write_ranking(ranked: Sequence[RankedMember], path: Path) -> None:
    """The same as CSV, with the folder of each."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("member", "overrides", "status", "objective", "folder"))
        for one in ranked:
            value = one.returned if one.score is None else one.score.value
            rows.writerow((one.entrant.name, " ".join(one.entrant.words), one.status, value, one.entrant.folder))
