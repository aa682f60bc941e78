"""Checkpoints of several workers: saved whole or not at all, read by all alike (own states or the mean).

`checkpoints` is what all methods have in common, `resuming_replicas` adds workers with a whole model each; `saving` and
`reading` are their halves, `store` what lies where on the disk. Public: nothing; strategies are made of these.

A wrong mean after a resume: `checkpoints` takes the mean at a save (by `shared.wire.mean`), `reading` decides between
own states and the mean, `resuming_replicas` restores, `shared.replica_strategy` lets all start from what was restored.
"""
