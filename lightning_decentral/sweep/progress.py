"""Progress of a sweep as its user sees it, while it runs: a live table."""

import logging
from types import TracebackType

from hydra.core.utils import JobReturn, JobStatus
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from lightning_decentral.sweep.member import SweepMember
from lightning_decentral.sweep.plan.arbiter import MemberAccount, Phase
from lightning_decentral.sweep.record import MemberFailed
from lightning_decentral.sweep.server import Sweep

log = logging.getLogger(__name__)

STATES = {Phase.RUNNING: "[green]running[/]", Phase.WAITING: "waiting", Phase.AWAY: "on the host"}


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def shares(sweep: Sweep) -> dict[str, float]:
    """Share of all device time so far, by member, running grants included."""
    whole = max(sweep.now, 1e-9) * len(sweep.arbiter.devices)
    members = {**sweep.arbiter.ended, **sweep.arbiter.members}
    running = {name: (sweep.now - m.since) * len(m.devices) for name, m in members.items()}
    return {name: (m.busy_seconds + running[name]) / whole for name, m in members.items()}


def seconds_left(sweep: Sweep) -> float | None:
    """max(longest remaining, sum of the remaining / devices), those that haven't started as long as the mean of the
    whole others; None while nothing is known."""
    members = sweep.arbiter.members.values()
    left = {m.name: m.turn.remaining_seconds for m in members if m.turn.remaining_seconds is not None}
    if not left:
        return None
    whole = [m.busy_seconds + left.get(m.name, 0.0) for m in [*members, *sweep.arbiter.ended.values()]]
    unknown = len(sweep.entrants) - len(sweep.outcomes) - len(left)
    every = [*left.values(), *[sum(whole) / len(whole)] * unknown]
    return max(max(every), sum(every) / len(sweep.arbiter.devices))


def picture(sweep: Sweep) -> Table:
    part, left = shares(sweep), seconds_left(sweep)
    end = "not known yet" if left is None else f"in {clock(left)}"
    through = f"{len(sweep.outcomes)} of {len(sweep.entrants)} members ended"
    title = f"{through}, devices busy {sum(part.values()):.0%}, end {end}"
    table = Table("member", "overrides", "state", "progress", "device time", "left", title=title, title_justify="left")
    for name, entrant in sweep.entrants.items():
        table.add_row(name, " ".join(entrant.words), *_row(sweep, name, part.get(name, 0.0)))
    return table


def _row(sweep: Sweep, name: str, part: float) -> tuple[str | ProgressBar, ...]:
    outcome = sweep.outcomes.get(name)
    if outcome is not None:
        through = outcome.status is JobStatus.COMPLETED
        done = "ended early" if name in sweep.scores.verdicts else "done"
        return done if through else "[red]failed[/]", "", f"{part:.0%}", ""
    member: MemberAccount | None = sweep.arbiter.members.get(name)
    if member is None:
        return "not started", "", "", ""
    state = STATES[member.phase] + (f" on {', '.join(member.devices)}" if member.devices else "")
    left = member.turn.remaining_seconds
    bar = ProgressBar(total=1.0, completed=member.turn.progress or 0.0, width=20)
    return state, bar, f"{part:.0%}", "" if left is None else clock(left)


class LiveTable:
    """Live table on a terminal, twice a second; elsewhere a line for each member that ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        # Drawn by `show`: not in a thread, which a fork wouldn't survive.
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveTable":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, sweep: Sweep) -> None:
        if self._live.is_started:
            self._live.update(picture(sweep), refresh=True)

    def ended(self, entrant: SweepMember, outcome: JobReturn) -> None:
        words = f"#{entrant.name} : {' '.join(entrant.words)}"
        if outcome.status is JobStatus.COMPLETED:
            self._say(f"\t{words} : done, {outcome.return_value}")
        else:
            self._say(f"\t{words} : failed, {MemberFailed.of(outcome._return_value)}; its log: {entrant.log}")

    def judged(self, entrant: SweepMember, verdict: str) -> None:
        self._say(f"\t#{entrant.name} : {' '.join(entrant.words)} : ends early, {verdict}")

    def _say(self, line: str) -> None:
        """Above the table, if there is one."""
        if self._live.is_started:
            self.console.print(line, markup=False, highlight=False)
        else:
            log.info(line)
