"""Joining: where in set-up a worker becomes a member, and the examples that its loaders get from then on."""

from collections.abc import Callable
from functools import partial

from lightning.pytorch import Trainer

from lightning_decentral.elastic import loops
from lightning_decentral.elastic.plan.calendar import Calendar
from lightning_decentral.elastic.wire.participant import Participant


class Joining:
    """Processes the training loaders of one fit, in the order in which they are combined.

    Args:
        weight: of this worker's batches.
        begin: takes part in the next round. It gets what makes the run's calendar, where this worker is the oldest of
            the first view.

    Attributes:
        planned: batches of an epoch that the module has been given, before anybody knows how many workers begin; or 0.
        weights: of the workers that such a plan expects.
    """

    def __init__(self, weight: int, begin: Callable[[Callable[[], Calendar]], None]) -> None:
        self.planned, self.weights = 0, 1
        self._weight, self._begin, self._processed = weight, begin, 0

    def loader(self, member: Participant | None, trainer: Trainer, dataloader: object) -> object:
        """The loader with the examples that this worker is dealt; with the first one it joins."""
        if member is None:  # the module asks how many steps there will be
            self.planned = loops.batches_of(trainer, dataloader, self.weights)
            return loops.dealt(trainer, dataloader, self.planned, loops.nobody)
        place = self._place_of(trainer)
        if member.round < 0:
            self._join(member, trainer, dataloader)
        assert member.calendar is not None
        if place and trainer.fit_loop._combined_loader is None:
            own = loops.batches_of(trainer, dataloader, member.calendar.weights)
            loops.refuse_several_lengths(own, member.calendar)
        deals = partial(member.deals, place=place)
        return loops.dealt(trainer, dataloader, member.calendar.batches, deals, self._weight)

    def _place_of(self, trainer: Trainer) -> int:
        """Place of the loader that is processed now among those that are combined, also where they are loaded again."""
        combined = trainer.fit_loop._combined_loader
        place = self._processed if combined is None else self._processed % len(combined.flattened)
        self._processed += 1
        return place

    def _join(self, member: Participant, trainer: Trainer, dataloader: object) -> None:
        """Make this worker a member from here on."""
        member.seed = loops.seed_of(dataloader) if member.seed is None else member.seed
        self._begin(lambda: self._calendar(member, trainer, dataloader))
        member.calendar = member.calendar or self._calendar(member, trainer, dataloader)
        assert member.view is not None
        if member.view.number == 1:
            loops.refuse_other_calendar(self._calendar(member, trainer, dataloader), member.calendar)
        loops.refuse_unplanned(self.planned, member.calendar)
        if member.round or member.calendar.before or trainer.fit_loop.restarting:
            loops.go_to(trainer, member.calendar, member.round)

    def _calendar(self, member: Participant, trainer: Trainer, dataloader: object) -> Calendar:
        return loops.calendar_of(trainer, dataloader, self.weights if self.planned else member.founders)
