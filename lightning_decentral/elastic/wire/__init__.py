"""The elastic protocol at work. JSON, no pickle.

    lobby_server      the lobby's port                                  over plan/lobby_state
    lobby_client      a worker's thread, its heartbeats to the lobby    over plan/member_state
    state_transfer    what a newcomer takes from a donor
    collective        means and decisions of all members, outside of their rounds
    endpoint          one start of one worker: all of these, and its connections (`sockets`)
    participant       what a strategy asks of an endpoint: the next round, the mean over its members; over `course`
    rounds            gossip's messages and mixing over the members of a round

`starter` starts a machine's workers. Public: none; `lightning-decentral lobby` starts the server.
"""
