"""Communication between workers: exchanges (peer to peer, cliques, hierarchical, overlapped), the mixer, simulation.

Public: `simulate` of `simulation`, the islands of `island` and `GossipReplicas` of `replicas`; all else serves the
strategy.
"""
