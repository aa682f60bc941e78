"""Which epoch and batch a round of an elastic run is: the same for all members, whenever they came.

    epoch, batch = (before + round) // r, (before + round) % r * accumulated,   r = ceil(batches / accumulated)

An epoch has as many batches as the first members needed for all examples, and keeps them: so all validate after the
same rounds. Members that come or go change how fast examples are gone through (`dealing`), not how long an epoch is.
"""

from dataclasses import dataclass

UNBOUNDED = 2**40
"""Batches of an epoch that has no end."""


@dataclass(frozen=True)
class Calendar:
    """The run's.

    Args:
        batches: of an epoch.
        accumulated: batches of a round.
        before: rounds' worth of epochs that were over when the run began, as a checkpoint states.
        steps: that were over then.
        weights: of those that began the run, together; 0: nobody knows.
    """

    batches: int
    accumulated: int = 1
    before: int = 0
    steps: int = 0
    weights: int = 0

    @property
    def rounds(self) -> int:
        """Number of rounds of an epoch."""
        return -(-self.batches // self.accumulated)

    def place(self, round: int) -> tuple[int, int]:
        """(epoch, batches of it that are over) where this round begins."""
        epochs, rounds = divmod(self.before + round, self.rounds)
        return epochs, rounds * self.accumulated

    def tick(self, round: int) -> int:
        """Batches that are over where this round begins."""
        epochs, batches = self.place(round)
        return epochs * self.batches + batches

    def step(self, round: int) -> int:
        """Number of optimizer steps that are over where this round begins."""
        return self.steps + round
