"""Gossip rounds of an elastic run: messages among the members of a view (membership), which join and leave.

`exchange` sends messages over the links of a view; `commits` lets all its members mix the same ones. `holding` and
`wholes` define which parts of the model a worker's devices keep. Public: none; `simulation` is
`gossip.simulate_asynchronous`."""
