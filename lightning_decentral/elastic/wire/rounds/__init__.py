"""Gossip's rounds where workers die and join while others train: messages over the members of a view.

`exchange` moves messages over the links of a view; `holding` and `wholes` define how a worker's devices have the
model. Public: none; `simulation` is `gossip.simulate_asynchronous`.
"""
