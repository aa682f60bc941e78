"""Communication between workers: exchanges (peer to peer, cliques, hierarchical, overlapped), the mixer, simulation.

Bytes wrong: what is sent is counted where a message departs (`peer.Arrivals.depart`, `assembly`, `coded_clique`) and
added up in `exchange.Traffic`, by device; what is planned is `plan/planned_traffic`, by worker.

Public: `simulate` and `MatrixExchange` of `simulation`; the other modules are internal."""
