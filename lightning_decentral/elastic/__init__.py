"""Elastic training: workers die while the others train on, and new ones join, by gossip or as whole token pipelines.

`option` is what `GossipStrategy(elastic=...)` and `GossipReplicas(elastic=...)` take. It makes an elastic `strategy` or
one of `pipelines`. Both are a `run`: each worker is a Trainer of its own, and Lightning sees one `process` everywhere.
`loops` takes a newcomer to where the others are, `checks` and `pruned` refuse what can't be elastic, and `launcher`
starts the workers of a machine. Below: `plan` (the protocol as pure functions of time), `compute`, `wire` (the protocol
on sockets, and in `wire/rounds` gossip over the members of the moment). Public: all names below.
"""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.elastic.option import Elastic as Elastic
    from lightning_decentral.elastic.plan.asynchronous import Asynchronous as Asynchronous
    from lightning_decentral.elastic.strategy import ElasticGossipStrategy as ElasticGossipStrategy
    from lightning_decentral.elastic.wire.rounds.simulation import simulate_asynchronous as simulate_asynchronous

__getattr__, __all__ = lazy_exports(__name__)
