"""Scores: what the members of a sweep reported at their validations, which a policy may compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MODES = ("min", "max")


@dataclass(frozen=True)
class Score:
    """One validation of one member.

    Args:
        metric: the name under which the value was logged.
        mode: whether "min" or "max" is good.
        step: optimizer steps so far.
    """

    metric: str
    mode: str
    step: int
    value: float

    @property
    def loss(self) -> float:
        """The smaller, the better; a value that is no number is worst."""
        if math.isnan(self.value):
            return math.inf
        return self.value if self.mode == "min" else -self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g}"


Histories = Mapping[str, Sequence[Score]]
"""{member: its scores, in the order of their steps}."""


class Scoreboard:
    """The histories of all members, and who was ended for them.

    Attributes:
        verdicts: by member, why it was ended early.
    """

    def __init__(self) -> None:
        self.histories: dict[str, list[Score]] = {}
        self.verdicts: dict[str, str] = {}

    def add(self, member: str, score: Score) -> None:
        """Add a score. A member that goes on from a checkpoint repeats steps: older scores of them count no more."""
        before = self.histories.get(member, [])
        self.histories[member] = [*(old for old in before if old.step < score.step), score]

    def best(self, member: str) -> Score | None:
        """The best score that the member has reported; None: none yet."""
        return min(self.histories.get(member, []), key=lambda score: score.loss, default=None)
