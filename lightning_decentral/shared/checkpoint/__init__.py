"""Checkpoints of several workers: saved whole or not at all; each resumes from its own state, or all from the mean.

`checkpoints` has what all methods share, `resuming_replicas` adds workers with a whole model each. Both use `saving`
and `reading`; `store` names and writes the files. Public: nothing; strategies use these modules.

A wrong mean after a resume: `checkpoints` takes the mean at a save (by `shared.wire.mean`), `reading` decides between
own states and the mean, `resuming_replicas` restores, `shared.replica_strategy` starts all from the restored states."""
