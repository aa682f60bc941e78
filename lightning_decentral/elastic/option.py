"""Option `elastic` of `GossipStrategy` and `GossipReplicas`: its value, and which strategy it makes of theirs.

Short: a module of its own because it reads neither torch nor Lightning, and serves both of Lightning's packages.
"""

from dataclasses import dataclass

from lightning_decentral.elastic.plan.view import ElasticSettings
from lightning_decentral.shared.plan.arguments import Elasticity, checked


@checked
@dataclass(frozen=True)
class Elastic(ElasticSettings, Elasticity):
    """A run whose workers are processes of their own, each with a Trainer of its own, that meet at a lobby.

    Args:
        lobby: "host:port" of `lightning-decentral lobby`. Without, that of the environment's LIGHTNING_DECENTRAL_LOBBY;
            without that, too, the Trainer starts `devices` workers on this machine, and a lobby for them.
        workers: (least, most) of them, as given to the lobby.
        dead_after: seconds of silence, until a worker counts as dead; the lobby's, as soon as that is reached.
        host: the address at which others reach this machine; by default the one from which it reaches the lobby.
        weight: this worker's batches have so many times its DataLoader's examples, and count so much in the mean.
        asynchronous: rounds in which nobody waits for a slow worker or link; None: neighbours wait for each other.

    Raises:
        ValueError: not 1 <= least <= most, or no time to wait.
    """

    def strategy(self, cls: type) -> type:
        # Read here: they are made of this value, and who only writes it down has no use for them.
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
            f"elastic makes a strategy of its own, which is no {cls.__module__}.{cls.__name__}: subclass "
            "ElasticGossipStrategy, and take Elastic and the strategy from one package, lightning_decentral or "
            "lightning_decentral.pytorch_lightning"
        )
