"""Many models at once: a model larger than its device, sweeps that share devices shard by shard, jobs by the iteration.

plan: `policy`, `footprint`, `shards`, `summary`; rule: `blocks`, `spill`, `moment`, `nested`, `ledger`, `device`,
`measuring`, `loading`; wire: `engine`; binding: `strategy`. (This Hydra, of Nagrecha, is a training system; hydra-core
is the configuration library in which a sweep of it is written.)
"""
