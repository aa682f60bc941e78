"""Forecast of a run that begins with exact averages: a share of its steps all-reduce the parameters, and wait.

    seconds, bytes = share of the exact steps + (1 - share) of the rule's

A module of its own, however short: it is a method around that of `forecast`, not a part of it.
"""

from dataclasses import dataclass

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.topology.static import Complete
from lightning_decentral.shared.plan.forecast import Floats, Method, Setting
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.timeline import Task


@dataclass(frozen=True)
class WarmStarted(Method):
    """`exact_steps` as a share of the run."""

    share: float  # of the steps, in (0, 1)
    rest: GossipForecast  # of the others

    @property
    def first(self) -> GossipForecast:
        """All workers are averaged in every step, by an all-reduce of messages as they are."""
        return GossipForecast(Complete(), 0, within=self.rest.within)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return (*self.first.prices(setting), *self.rest.prices(setting))

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        return self.share * self.first.seconds(setting, factors) + (1 - self.share) * self.rest.seconds(
            setting, factors
        )

    def tasks(self, setting: Setting) -> list[Task[str]]:
        """Tasks of a step with the rule, after the warm start."""
        return self.rest.tasks(setting)

    def card_bytes(self, setting: Setting) -> float:
        return self.share * self.first.card_bytes(setting) + (1 - self.share) * self.rest.card_bytes(setting)

    def memory_bytes(self, setting: Setting) -> float:
        return max(self.first.memory_bytes(setting), self.rest.memory_bytes(setting))
