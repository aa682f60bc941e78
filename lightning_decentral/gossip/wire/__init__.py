"""Communication between workers: exchanges (peer to peer, cliques, hierarchical, overlapped), the mixer, simulation.

Public: `simulate` and `MatrixExchange` of `simulation`; the other modules are internal.
"""
