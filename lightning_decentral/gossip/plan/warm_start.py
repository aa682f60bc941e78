"""Forecast of a run with `exact_steps`: a share of its steps all-reduces the parameters, then the rule begins.

cost = share * cost of an exact step + (1 - share) * cost of the rule's step     (seconds, bytes)

A short module of its own, as it only wraps a `GossipForecast`, which doesn't depend on it."""

from dataclasses import dataclass

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.topology.static import Complete
from lightning_decentral.shared.plan.forecast import Floats, Method, Setting
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.timeline import Task


@dataclass(frozen=True)
class WarmStarted(Method):
    """Forecast of gossip with `exact_steps` as a share of the run."""

    share: float  # share of exact steps, in (0, 1)
    rest: GossipForecast  # forecast of the other steps

    @property
    def first(self) -> GossipForecast:
        """Forecast of the exact steps: all workers are averaged in every step, by an unencoded all-reduce."""
        return GossipForecast(Complete(), 0, within=self.rest.within)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return (*self.first.prices(setting), *self.rest.prices(setting))

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        exact, rest = self.first.seconds(setting, factors), self.rest.seconds(setting, factors)
        return self.share * exact + (1 - self.share) * rest

    def tasks(self, setting: Setting) -> list[Task[str]]:
        """Tasks of a step with the rule, after the warm start."""
        return self.rest.tasks(setting)

    def card_bytes(self, setting: Setting) -> float:
        return self.share * self.first.card_bytes(setting) + (1 - self.share) * self.rest.card_bytes(setting)

    def memory_bytes(self, setting: Setting) -> float:
        return max(self.first.memory_bytes(setting), self.rest.memory_bytes(setting))
