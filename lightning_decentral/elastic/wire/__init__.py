"""The elastic protocol at work. JSON, no pickle.

    lobby_server      the lobby's port                                  over plan/lobby_state
    lobby_client      a worker's thread, its heartbeats to the lobby    over plan/member_state
    state_transfer    what a newcomer takes from a donor
    collective        means and decisions of all members, outside of their rounds
    joining           one start of one worker, from where it waits to be let in: its `Endpoint` with all of these
    participant       what a strategy asks of an `Endpoint`: the next round, the mean over its members; over `course`
    rounds            gossip's messages and mixing over the members of a round

`starter` starts a machine's workers. Public: none; `lightning-decentral lobby` starts the server.
"""
