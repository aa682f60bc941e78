"""Elastic training: workers die while the others train on, and new ones join, by gossip or as whole token pipelines.

`option.Elastic` is what `GossipStrategy(elastic=...)` and `GossipReplicas(elastic=...)` take. It makes an elastic
`strategy` or one of `pipelines`. Both are a `run`: each worker has its own Trainer, and Lightning sees a single
`process`. `checks` and `late_tensors` refuse settings and tensors; `launcher` starts the workers of a machine.

Steps by which a new worker joins; a worker that hangs prints which of these steps it waits for:

    1 sets itself up, finds who began the run     run.ElasticRun, process (waits), wire/joining.Endpoint.founds
    2 sends heartbeats, gets a donor          wire/lobby_client (thread), plan/member_state (state machine),
                                                  wire/lobby_server, plan/lobby_state at the lobby
    3 fetches everything from the donor           wire/joining.Endpoint.healed (waits), wire/state_transfer
    4 waits for the membership that includes it   wire/joining.Endpoint.begin (waits), for wire/participant.begin;
                                                  who is let in: plan/lobby_state.LobbyState._following
    5 continues at the others' round, trains      dealt_loaders, loops, wire/rounds, wire/collective (means, decisions)

Below: `plan` (the protocol as pure functions of time), `compute` (reductions), `wire` (the protocol on sockets, and in
`wire/rounds` gossip among the current members). Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.elastic.option import Elastic as Elastic
    from lightning_decentral.elastic.plan.asynchronous import Asynchronous as Asynchronous
    from lightning_decentral.elastic.strategy import ElasticGossipStrategy as ElasticGossipStrategy
    from lightning_decentral.elastic.wire.rounds.simulation import simulate_asynchronous as simulate_asynchronous

__getattr__, __all__ = lazy_exports(__name__)
