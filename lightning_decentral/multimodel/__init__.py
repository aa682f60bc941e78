"""Many models at once: a model larger than its device, sweeps that share devices shard by shard, jobs by the iteration.

A model larger than its device (`strategy="spilled"`): plan `footprint`, `shards`, `summary`; rule `blocks`, `spill`,
`moment`, `nested`, `ledger`, `device`, `measuring`, `loading`; wire `engine`; binding `strategy`.

Sweeps (`hydra/launcher=shard_parallel`): plan `policy` who is next, `arbiter` who runs where, `slots` the devices by
name; rule `residence` what a training has on its device, to the host and back; wire `messages`, `seat` a member's side
of the arbiter; binding `gate` the callback at its batches, `entrant`, `processes`, `sweep`, `table`, `gantt`, `launch`
the sweep itself, for Hydra.

Schedules of many jobs: plan `policy`, `dispatch` (who is loaded, who computes), `schedule` (its simulation), `optimum`,
`jigsaw` (gangs by the iteration), `spase` (how many devices each), `solver`, `workload` and `traces` (jobs from files);
wire `rehearsal` (the same schedule by processes that stand in).

(This Hydra, of Nagrecha, is a training system; hydra-core is the configuration library in which a sweep of it is
written.)
"""
