"""Hyperparameter sweeps whose trainings share devices (`hydra/launcher=shard_parallel`), after Nagrecha; JigSaw, SPASE.

`launcher` makes members of Hydra's words, `server` runs them in `processes`, `time_slicing` gives each its device
between batches, `eviction` takes it back, `progress` and `gantt` show it; `trainings` runs the jobs of a schedule.
Below: `plan` (who is next: values without torch), `wire` (the socket). Public: all names below.
"""

from lightning_decentral.sweep.plan.policy import FIFO, LRTF, SRTF, Complementary, Policy, RoundRobin

__all__ = [
    "FIFO",
    "LRTF",
    "SRTF",
    "Complementary",
    "Policy",
    "RoundRobin",
]
