"""The elastic protocol at work. JSON, no pickle.

    lobby_server      the lobby's port                       over plan/lobby_state
    membership        a worker's thread with the lobby       over plan/member_state
    endpoint          one start of one worker: its membership, its connections (`sockets`), its healing
    participant       what a strategy asks of all this: the next round, the mean over its members
    rounds            gossip's messages and mixing over the members of a round

`starter` starts a machine's workers. Public: none; `lightning-decentral lobby` starts the server.
"""
