"""The elastic protocol on sockets, in JSON without pickle.

    lobby_server      server of the lobby's port                        runs plan/lobby_state
    lobby_client      a worker's thread that sends heartbeats           runs plan/member_state
    state_transfer    copy of the training state from a donor to a newcomer
    collective        means and decisions of all members, outside their gossip rounds
    joining           one start of one worker, its `Endpoint`: all of these, and its connections (`sockets`)
    participant       a strategy's interface to an endpoint: the next round, means over members; extends `course`
    rounds            gossip's messages and mixing among the members of a round

`starter` starts a machine's workers. Public: none; `lightning-decentral lobby` starts the server."""
