"""Option `elastic` of `GossipStrategy` and `GossipReplicas`, and the elastic strategy that it selects.

Short and separate, because it imports neither torch nor Lightning, and serves both of Lightning's packages."""

from dataclasses import dataclass

from lightning_decentral.elastic.plan.view import ElasticSettings
from lightning_decentral.shared.plan.arguments import Elasticity, checked


@checked
@dataclass(frozen=True)
class Elastic(ElasticSettings, Elasticity):
    """Settings of an elastic run, whose workers are separate processes with their own Trainers that meet at a lobby.

    Args:
        lobby: "host:port" of `lightning-decentral lobby`; by default the environment's LIGHTNING_DECENTRAL_LOBBY.
            Without both, the Trainer starts `devices` workers on this machine, and a lobby for them.
        workers: (minimum, maximum) number of workers, as given to the lobby.
        dead_after: seconds of silence after which a worker counts as dead; once connected, the lobby's value applies.
        host: address at which other workers reach this machine; by default its address towards the lobby.
        weight: multiple of the DataLoader's batch size that this worker takes; also its weight in the mean.
        asynchronous: rounds in which no worker waits for a slow worker or link; None: neighbours wait for each other.
        key: file of `lightning-decentral lobby --new-key`, the same for the lobby and all workers; by default the
            environment's LIGHTNING_DECENTRAL_KEY. Without a key, everybody who reaches the ports may take part.

    Raises:
        ValueError: not 1 <= minimum <= maximum, or `dead_after` isn't positive.
    """

    def strategy(self, cls: type) -> type:
        # Imported here: the strategies import this module, and a config that only names the option needs none of them.
        from lightning_decentral.elastic.pipelines import elastic_pipeline
        from lightning_decentral.elastic.run import ElasticRun
        from lightning_decentral.elastic.strategy import ElasticGossipStrategy
        from lightning_decentral.gossip.strategy import GossipStrategy
        from lightning_decentral.pipeline.strategy import TokenPipelineStrategy

        if issubclass(cls, ElasticRun):
            return cls
        if cls is GossipStrategy:
            return ElasticGossipStrategy
        if issubclass(cls, TokenPipelineStrategy):
            return elastic_pipeline(cls)
        raise ValueError(
            f"elastic=... selects its own strategy, which is no {cls.__module__}.{cls.__name__}: subclass "
            "ElasticGossipStrategy, and import Elastic and the strategy from one package, lightning_decentral or "
            "lightning_decentral.pytorch_lightning"
        )
