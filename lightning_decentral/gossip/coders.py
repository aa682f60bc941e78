"""Which coder a codec needs."""

from lightning_decentral.buckets import Pool
from lightning_decentral.gossip.codec import Plain, PowerGossip
from lightning_decentral.gossip.coder import Coded, Coder, Direct
from lightning_decentral.gossip.coding import Codec, Coding
from lightning_decentral.gossip.paired import Paired
from lightning_decentral.gossip.plan import Topology, audiences


def coder(codec: Coding, topology: Topology, rank: int, size: int, pool: Pool) -> Coder:
    """Of one worker; what encodes nothing where nothing is to be encoded."""
    match codec:
        case Plain():
            return Direct(pool)
        case PowerGossip():
            return Paired(codec, rank, pool)
        case Codec():
            return Coded(codec, rank, audiences(topology, rank, size) if codec.remembers else {}, pool)
    raise TypeError(f"{codec} is no Codec: subclass lightning_decentral.gossip.coding.Codec")
