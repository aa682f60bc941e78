"""Many models at once: a model larger than its device, sweeps that share devices shard by shard, jobs by the iteration.

plan: `policy` who is next, `arbiter` who runs where, `slots` the devices by name. rule: `residence` what a training has
on its device, to the host and back. wire: `messages`, `seat` a member's side of the arbiter. binding: `gate` the
callback at its batches; `entrant`, `processes`, `sweep`, `table`, `gantt`, `launch` the sweep itself, for Hydra.
(This Hydra, of Nagrecha, is a training system; hydra-core is the configuration library in which a sweep of it is
written.)
"""
