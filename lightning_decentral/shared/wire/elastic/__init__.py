"""The elastic protocol on sockets and clocks: the lobby's server, a worker's membership, its starter. JSON, no pickle.

Public: none; `lightning-decentral lobby` starts the server.
"""
