"""A model of equal blocks on a network of one kind of link."""

from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model

BLOCK_BYTES = 4_000_000


def model(blocks: int = 4, forward: float = 0.01, backward: float = 0.02, update: float = 0.002) -> Model:
    pieces = [BlockCost(f"b{i}", forward, backward, update, BLOCK_BYTES, 500_000, 100_000) for i in range(blocks)]
    return Model(
        "recipe=vit", "cpu", tuple(pieces), batch=8, state_bytes=2 * blocks * BLOCK_BYTES, words=("recipe=vit",)
    )


def links(latency: float = 1e-4, rate: float = 1e9, inside: float = 1e10) -> Network:
    return Network(
        (LinkCost("exchange", "between", 2, 1, latency, rate), LinkCost("exchange", "inside", 2, 1, 1e-5, inside))
    )


def setting(workers: int = 8, per_node: int = 1, rate: float = 1e9, **parts: float) -> Setting:
    return Setting(model(**parts), links(rate=rate), Cluster(workers, per_node))
