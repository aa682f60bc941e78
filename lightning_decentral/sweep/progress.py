"""Progress of a sweep for its user: a live table while the sweep runs, the ranking of its members at the end."""

import csv
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from lightning_decentral.sweep.member import MemberFailed, SweepMember
from lightning_decentral.sweep.plan.arbiter import MemberAccount, Phase
from lightning_decentral.sweep.plan.policy import Score, Scoreboard
from lightning_decentral.sweep.server import Sweep

log = logging.getLogger(__name__)

STATES = {Phase.RUNNING: "[green]running[/]", Phase.WAITING: "waiting", Phase.AWAY: "on the host"}


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def shares(sweep: Sweep) -> dict[str, float]:
    """Share of all device time so far, by member, including running grants."""
    whole = max(sweep.now, 1e-9) * len(sweep.arbiter.devices)
    accounts = {**sweep.arbiter.ended, **sweep.arbiter.members}
    busy = {name: m.busy_seconds + (sweep.now - m.since) * len(m.devices) for name, m in accounts.items()}
    return {name: seconds / whole for name, seconds in busy.items()}


def seconds_left(sweep: Sweep) -> float | None:
    """Predict the seconds until the sweep ends: max(longest remaining, sum of remaining / devices). Members that
    haven't started count as the others' mean length; None while nothing is known."""
    accounts = sweep.arbiter.members.values()
    left = {m.name: m.turn.remaining_seconds for m in accounts if m.turn.remaining_seconds is not None}
    if not left:
        return None
    whole = [m.busy_seconds + left.get(m.name, 0.0) for m in [*accounts, *sweep.arbiter.ended.values()]]
    unknown = len(sweep.members) - len(sweep.outcomes) - len(left)
    every = [*left.values(), *[sum(whole) / len(whole)] * unknown]
    return max(max(every), sum(every) / len(sweep.arbiter.devices))


def picture(sweep: Sweep) -> Table:
    part, left = shares(sweep), seconds_left(sweep)
    end = "not known yet" if left is None else f"in {clock(left)}"
    through = f"{len(sweep.outcomes)} of {len(sweep.members)} members ended"
    title = f"{through}, devices busy {sum(part.values()):.0%}, end {end}"
    table = Table("member", "overrides", "state", "progress", "device time", "left", title=title, title_justify="left")
    for name, member in sweep.members.items():
        table.add_row(name, " ".join(member.own_overrides), *_row(sweep, name, part.get(name, 0.0)))
    return table


def _row(sweep: Sweep, name: str, part: float) -> tuple[str | ProgressBar, ...]:
    outcome = sweep.outcomes.get(name)
    if outcome is not None:
        through = outcome.status is JobStatus.COMPLETED
        done = "ended early" if name in sweep.scores.verdicts else "done"
        return done if through else "[red]failed[/]", "", f"{part:.0%}", ""
    account: MemberAccount | None = sweep.arbiter.members.get(name)
    if account is None:
        return "not started", "", "", ""
    state = STATES[account.phase] + (f" on {', '.join(account.devices)}" if account.devices else "")
    left = account.turn.remaining_seconds
    bar = ProgressBar(total=1.0, completed=account.turn.progress or 0.0, width=20)
    return state, bar, f"{part:.0%}", "" if left is None else clock(left)


class LiveTable:
    """Live table on a terminal, updated twice a second; otherwise a line for each member that ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        # Drawn by `show`, not in a thread, which a fork wouldn't survive.
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveTable":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, sweep: Sweep) -> None:
        """Show the sweep's state, and what its arbiter remarked; call it from time to time."""
        while sweep.arbiter.remarks:
            self.say(sweep.arbiter.remarks.pop(0))
        if self._live.is_started:
            self._live.update(picture(sweep), refresh=True)

    def ended(self, member: SweepMember, outcome: JobReturn) -> None:
        if outcome.status is JobStatus.COMPLETED:
            self.say(f"\t{member.title} : done, {outcome.return_value}")
        else:
            self.say(f"\t{member.title} : failed, {MemberFailed.of(outcome._return_value)}; its log: {member.log}")

    def judged(self, member: SweepMember, verdict: str) -> None:
        self.say(f"\t{member.title} : ends early, {verdict}")

    def say(self, line: str) -> None:
        """Print a line above the table, if there is a table."""
        if self._live.is_started:
            self.console.print(line, markup=False, highlight=False)
        else:
            log.info(line)


RETURNED = "returned"


@dataclass(frozen=True)
class RankedMember:
    """Result of a member at the end of a sweep."""

    member: SweepMember
    status: str  # "completed", "failed", or "ended early"
    score: Score | None  # the score that ranks it; None: no score
    returned: object = None  # by its program, as its result

    @property
    def loss(self) -> float:
        return math.inf if self.score is None else self.score.loss


def standings(
    members: Sequence[SweepMember], outcomes: Mapping[str, JobReturn], board: Scoreboard
) -> list[RankedMember]:
    """Rank the members: the best first, those that failed and those without a number last.

    Members with scores rank by their best score, otherwise by the value that they returned, the lowest first."""
    found = []
    for member in members:
        outcome, value = outcomes[member.name], outcomes[member.name]._return_value
        if outcome.status is not JobStatus.COMPLETED:
            found.append(RankedMember(member, outcome.status.name.lower(), None))
            continue
        score = board.best(member.name)
        if not board.histories and isinstance(value, (int, float)):
            score = Score(RETURNED, "min", 0, float(value))
        status = "ended early" if member.name in board.verdicts else "completed"
        found.append(RankedMember(member, status, score, value))
    return sorted(found, key=lambda one: (one.loss, int(one.member.name) if one.member.name.isdigit() else 0))


def ranking(ranked: Sequence[RankedMember]) -> Table:
    first = ranked[0].score if ranked else None
    by = "" if first is None or first.metric == RETURNED else f" by {first.metric}"
    title = f"Ranking{by}, {'highest' if first is not None and first.mode == 'max' else 'lowest'} first"
    table = Table("rank", "member", "overrides", "objective", title=title, title_justify="left")
    for place, one in enumerate(ranked, start=1):
        value = one.status if one.score is None else f"{one.score.value:.6g}"
        objective = f"{value} ({one.status})" if one.status == "ended early" else value
        table.add_row(str(place), one.member.name, " ".join(one.member.own_overrides), objective)
    return table


def best_line(ranked: Sequence[RankedMember]) -> str | None:
    """Format the best member's overrides for a command line; None: no member has a number."""
    best = ranked[0]
    if best.score is None or best.loss == math.inf:
        return None
    return f"best: {shlex.join(best.member.own_overrides)} ({best.score})"


def write_ranking(ranked: Sequence[RankedMember], path: Path) -> None:
    """Write the ranking as CSV, with each member's folder."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("member", "overrides", "status", "objective", "folder"))
        for one in ranked:
            value = one.returned if one.score is None else one.score.value
            rows.writerow((one.member.name, " ".join(one.member.own_overrides), one.status, value, one.member.folder))
